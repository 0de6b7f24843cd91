"""What TorchRL's transforms have beyond those of a run: spec hooks, a collector, Ray versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from envs.torchrl.env import apply_hook
from envs.transforms.transform import Compose, Transform
from policies.torchrl.specs import Composite

RESOURCES = ("actor_name", "num_cpus", "num_gpus")


class SpecHooks(Transform):
    """Declare a transform's changes of an environment's specs.

    Each hook may change its argument and returns it; a subclass overrides those of its entries.
    """

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Return the specs of outputs, by one hook for each of the three."""
        return self._transform_specs(output_spec, "observation", "reward", "done")

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Return the specs of inputs, by one hook for each of the two."""
        return self._transform_specs(input_spec, "action", "state")

    def _transform_specs(self, spec: Composite, *kinds: str) -> Composite:
        for kind in kinds:
            hook = getattr(self, f"transform_{kind}_spec")
            spec[f"full_{kind}_spec"] = hook(spec[f"full_{kind}_spec"])
        return spec

    def _same(self, spec: Composite) -> Composite:
        """Return the spec unchanged."""
        return spec

    transform_observation_spec = transform_reward_spec = transform_done_spec = _same
    transform_action_spec = transform_state_spec = _same

    @property
    def collector(self) -> Any:
        """Return the collector registered with the environment, or None."""
        return None if self.container is None else self.container.collector


def _hook(name: str) -> Any:
    """Return a spec hook that calls `_through(name, spec)`."""
    return lambda self, spec: self._through(name, spec)


class PassesSpecs(SpecHooks):
    """A transform that delegates its specs to `_through(hook, spec)`, by default to its parts."""

    transform_output_spec = _hook("transform_output_spec")
    transform_input_spec = _hook("transform_input_spec")
    transform_observation_spec = _hook("transform_observation_spec")
    transform_reward_spec = _hook("transform_reward_spec")
    transform_done_spec = _hook("transform_done_spec")
    transform_action_spec = _hook("transform_action_spec")
    transform_state_spec = _hook("transform_state_spec")

    def _through(self, hook: str, spec: Composite) -> Composite:
        """Apply the spec hooks of the parts to a spec."""
        assert isinstance(self, Compose)
        for part in self:
            spec = apply_hook(part, hook, spec)
        return spec


class Shareable:
    """A class whose Ray version is created by use_ray_service=True; envs/torchrl/ray.py sets it."""

    ray_version: ClassVar[Callable[..., Any] | None] = None

    def __new__(cls, *args: Any, use_ray_service: bool = False, **kwargs: Any) -> Any:
        """Return an object of the class or its Ray version; resources need Ray."""
        if not use_ray_service:
            if resources := [name for name in RESOURCES if kwargs.get(name) is not None]:
                raise ValueError(f"{', '.join(resources)}: expected use_ray_service=True with them")
            return super().__new__(cls)
        version = cls.__dict__.get("ray_version")
        if version is None:
            raise TypeError(f"{cls.__name__} has no Ray version; use RayTransform({cls.__name__})")
        return version(*args, **kwargs)
