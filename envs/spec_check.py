"""Does an environment give what its specs say? One reset and one step show it."""

from collections.abc import Callable

from tensordict import TensorDictBase

from envs.env import EnvBase
from policies.specs import Composite


def check_env_specs(
    env: EnvBase,
    policy: Callable[[TensorDictBase], TensorDictBase] | None = None,
    *,
    data: TensorDictBase | None = None,
) -> None:
    """Reset and step once; a ValueError names the first key that its spec does not describe.

    `policy` acts, without one `env.rand_action`; `data` is what reset is given, by default an
    example of `full_state_spec` (None if that is empty).
    """
    out = env.output_spec
    state = env.full_state_spec
    if data is None and len(state):
        data = state.zero()
    td = env.reset(data)
    observed = out["full_observation_spec"]
    # What transforms add (log-probs, rewards) may come with the first step.
    base = env.base_env.full_observation_spec
    first = [key for key in observed if key in base or key in td]
    known = Composite(shape=observed.shape).update(state)
    for name in out:
        known.update(out[name])
    given = [] if data is None else list(data.keys())  # stays beside the chat
    first_spec = Composite({key: observed[key] for key in first}, shape=observed.shape)
    _compare("reset", td, first_spec, known, given)
    td = env.rand_action(td) if policy is None else policy(td)
    td = env.step(td)
    written = Composite(shape=observed.shape)
    for name in out:
        written.update(out[name].clone())
    _compare("step", td.get("next"), written, known, given)


def _compare(
    where: str, td: TensorDictBase, spec: Composite, known: Composite, given: list
) -> None:
    if text := spec.explain(td):
        raise ValueError(f"{where} does not fit the specs of the environment: {text}")
    if extra := _undeclared(td.exclude(*given), known):
        raise ValueError(
            f"{where} gives {'.'.join(extra)}, which no spec describes; declare it in the "
            "transform's transform_*_spec or the environment's _specs"
        )


def _undeclared(td: TensorDictBase, spec: Composite) -> tuple[str, ...]:
    """Return the path of the first entry that has no spec; fields of containers are theirs."""
    for key in sorted(map(str, td.keys())):
        inner = spec.get(key)
        if inner is None:
            return (key,)
        value = td.get(key, None)
        nested = isinstance(inner, Composite) and isinstance(value, TensorDictBase)
        if nested and (rest := _undeclared(value, inner)):
            return (key, *rest)
    return ()
