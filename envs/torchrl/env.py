"""TorchRL's environments: specs, a check of them, random actions, rollouts and collectors.

The environments of a run (envs/env.py) only reset and step; these classes add the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from tensordict import TensorDictBase, lazy_stack

from envs import env as plain
from envs.torchrl.hooks import apply_hook
from envs.transforms.transform import Transform
from policies.torchrl.specs import Composite

OUTPUTS = ("full_observation_spec", "full_reward_spec", "full_done_spec")
INPUTS = ("full_action_spec", "full_state_spec")


class EnvBase(plain.Env):
    """Common behaviour of environments: subclasses implement `_reset(td)` and `_step(td)`.

    `full_observation_spec`, `full_reward_spec` and `full_done_spec` describe outputs,
    `full_action_spec` and `full_state_spec` the inputs of a step and a reset. A subclass
    implements `_specs`, which returns them by name.
    """

    _collector: ref | None = None

    def transformed(self, transform: Transform) -> TransformedEnv:
        """Return a TransformedEnv of this environment."""
        return TransformedEnv(self, transform)

    def rand_action(self, td: TensorDictBase) -> TensorDictBase:
        """Write some action that fits `full_action_spec` into td, and return td."""
        return td.update(self.full_action_spec.rand())

    def rollout(
        self,
        max_steps: int,
        policy: Callable[[TensorDictBase], TensorDictBase] | None = None,
        *,
        tensordict: TensorDictBase | None = None,
        auto_reset: bool = True,
        break_when_any_done: bool = True,
    ) -> TensorDictBase:
        """Act and step until an episode of the batch is done; return a lazy stack [B, N].

        The default policy is `rand_action`. `tensordict` is the input of reset; with
        auto_reset=False it is the first state. Raise ValueError for break_when_any_done=False.
        """
        if max_steps < 1 or not break_when_any_done:
            raise ValueError(
                f"expected max_steps >= 1 and break_when_any_done=True, got {max_steps} and "
                f"{break_when_any_done}; LLMCollector starts new chats in place of finished ones"
            )
        td: Any = self.reset(tensordict) if auto_reset else tensordict
        keys, steps = list(td.keys()), []
        while True:
            td = self.step(self.rand_action(td) if policy is None else policy(td))
            steps.append(list(td.unbind(0)))
            following = td.get("next")
            if len(steps) == max_steps or following.get("done").any():
                return lazy_stack([lazy_stack(list(turns)) for turns in zip(*steps, strict=True)])
            before, td = td, td.empty()
            for key in keys:
                td.set(key, following.get(key) if key in following else before.get(key))

    def register_collector(self, collector: Any) -> None:
        """Keep a weak reference to the collector of this environment."""
        self._collector = ref(collector)

    @property
    def collector(self) -> Any:
        """Return the registered collector, or None."""
        return None if self._collector is None else self._collector()

    @property
    def reward_keys(self) -> list[Any]:
        """Return the keys of a step's rewards."""
        return list(self.full_reward_spec.keys(True, True))

    @property
    def output_spec(self) -> Composite:
        """Return the specs of outputs by name."""
        return _declared(self._specs(), OUTPUTS)

    @property
    def input_spec(self) -> Composite:
        """Return the specs of inputs by name."""
        return _declared(self._specs(), INPUTS)

    full_observation_spec = property(lambda self: self.output_spec["full_observation_spec"])
    full_reward_spec = property(lambda self: self.output_spec["full_reward_spec"])
    full_done_spec = property(lambda self: self.output_spec["full_done_spec"])
    full_action_spec = property(lambda self: self.input_spec["full_action_spec"])
    full_state_spec = property(lambda self: self.input_spec["full_state_spec"])

    def _specs(self) -> dict[str, Composite]:
        """Return the specs of this environment by name; a missing spec is empty."""
        return {}


def _declared(specs: dict[str, Composite], names: tuple[str, ...]) -> Composite:
    return Composite({name: specs.get(name, Composite()) for name in names})


class TransformedEnv(EnvBase, plain.TransformedEnv):
    """Run `transform` on the outputs of `env` and the inverse transform on the inputs."""

    def rand_action(self, td: TensorDictBase) -> TensorDictBase:
        """Write some action of the inner environment into td, and return td."""
        return self.env.rand_action(td)

    @property
    def output_spec(self) -> Composite:
        """Return the specs of outputs by name."""
        return apply_hook(self.transform, "transform_output_spec", self.env.output_spec.clone())

    @property
    def input_spec(self) -> Composite:
        """Return the specs of inputs by name."""
        return apply_hook(self.transform, "transform_input_spec", self.env.input_spec.clone())


def check_env_specs(
    env: EnvBase,
    policy: Callable[[TensorDictBase], TensorDictBase] | None = None,
    *,
    data: TensorDictBase | None = None,
) -> None:
    """Reset and step once; raise ValueError with the first key that does not fit its spec.

    The default of `policy` is `env.rand_action`. `data` is the input of reset, by default an
    example of `full_state_spec` (None if the spec is empty).
    """
    out = env.output_spec
    state = env.full_state_spec
    if data is None and len(state):
        data = state.zero()
    td = env.reset(data)
    observed = out["full_observation_spec"]
    # Entries that transforms add (log-probs, rewards) may be missing before the first step.
    base = env.base_env.full_observation_spec
    first = [key for key in observed if key in base or key in td]
    declared = Composite(shape=observed.shape).update(state)
    for name in out:
        declared.update(out[name])
    data_keys = [] if data is None else list(data.keys())  # copied to the outputs
    first_spec = Composite({key: observed[key] for key in first}, shape=observed.shape)
    _compare("reset", td, first_spec, declared, data_keys)
    td = env.step(env.rand_action(td) if policy is None else policy(td))
    step_spec = Composite(shape=observed.shape)
    for name in out:
        step_spec.update(out[name].clone())
    _compare("step", td.get("next"), step_spec, declared, data_keys)


def _compare(
    where: str, td: TensorDictBase, spec: Composite, declared: Composite, data_keys: list
) -> None:
    if text := spec.explain(td):
        raise ValueError(f"{where} does not fit the specs of the environment: {text}")
    if extra := _undeclared(td.exclude(*data_keys), declared):
        raise ValueError(f"{where} returns {'.'.join(extra)}, which no spec describes")


def _undeclared(td: TensorDictBase, spec: Composite) -> tuple[str, ...]:
    """Return the path of the first entry without a spec; () if every entry has one."""
    for key in sorted(map(str, td.keys())):
        inner = spec.get(key)
        if inner is None:
            return (key,)
        value = td.get(key, None)
        nested = isinstance(inner, Composite) and isinstance(value, TensorDictBase)
        if nested and (rest := _undeclared(value, inner)):
            return (key, *rest)
    return ()
