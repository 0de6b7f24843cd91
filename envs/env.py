"""Environments over TensorDicts.

`reset(td)` gives the first state; `step(td)` reads the action in td and writes the outcome (reward,
done, the next state) under "next", so that `td["next"]` is what the policy reads in the next turn.
A subclass fills `_reset` and `_step`, and `_specs` to say what they read and write.
Left out on purpose: auto-reset (LLMCollector gives a place to the next chat).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from tensordict import TensorDictBase

if TYPE_CHECKING:
    from envs.transformed_env import TransformedEnv
    from envs.transforms.transform import Transform
    from policies.specs import Composite

OUTPUTS = ("full_observation_spec", "full_reward_spec", "full_done_spec")
INPUTS = ("full_action_spec", "full_state_spec")


class EnvBase:
    """Common behaviour of environments: subclasses implement `_reset(td)` and `_step(td)`.

    `full_observation_spec`, `full_reward_spec` and `full_done_spec` say what comes out,
    `full_action_spec` and `full_state_spec` what a step and a reset read.
    """

    _collector: ref | None = None

    def reset(self, td: TensorDictBase | None = None) -> TensorDictBase:
        """Return the first state; td may carry the data to start from."""
        return self._reset(td)

    def step(self, td: TensorDictBase) -> TensorDictBase:
        """Write the outcome of the action in td under "next", and return td."""
        return td.set("next", self._step(td))

    def rand_action(self, td: TensorDictBase) -> TensorDictBase:
        """Write some action that fits `full_action_spec` into td, and return td."""
        return td.update(self.full_action_spec.rand())

    def rollout(self, max_steps: int, policy: Any = None, **options: Any) -> TensorDictBase:
        """Return at most `max_steps` steps of a policy, [B, T]; see `envs.rollout.rollout`."""
        from envs.rollout import rollout

        return rollout(self, max_steps, policy, **options)

    @property
    def base_env(self) -> EnvBase:
        """Return the environment below all transforms."""
        return self

    def append_transform(self, transform: Transform) -> TransformedEnv:
        """Return this environment seen through one more transform."""
        from envs.transformed_env import TransformedEnv

        return TransformedEnv(self, transform)

    def register_collector(self, collector: Any) -> None:
        """Remember who collects from this environment, by a weak reference."""
        self._collector = ref(collector)

    @property
    def collector(self) -> Any:
        """Return the registered collector, or None."""
        return None if self._collector is None else self._collector()

    @property
    def output_spec(self) -> Composite:
        """Return the specs of what comes out, by their names."""
        return _declared(self._specs(), OUTPUTS)

    @property
    def input_spec(self) -> Composite:
        """Return the specs of what is read, by their names."""
        return _declared(self._specs(), INPUTS)

    full_observation_spec = property(lambda self: self.output_spec["full_observation_spec"])
    full_reward_spec = property(lambda self: self.output_spec["full_reward_spec"])
    full_done_spec = property(lambda self: self.output_spec["full_done_spec"])
    full_action_spec = property(lambda self: self.input_spec["full_action_spec"])
    full_state_spec = property(lambda self: self.input_spec["full_state_spec"])

    def _specs(self) -> dict[str, Composite]:
        """Return the specs of this environment by name; those left out are empty."""
        return {}

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        raise NotImplementedError(f"{type(self).__name__} has no _reset(td)")

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        raise NotImplementedError(f"{type(self).__name__} has no _step(td)")


def _declared(own: dict[str, Composite], names: tuple[str, ...]) -> Composite:
    from policies.specs import Composite  # a run declares nothing

    return Composite({name: own.get(name, Composite()) for name in names})
