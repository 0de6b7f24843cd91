"""Parts of TorchRL's transforms that no run needs: spec hooks, a collector, Ray versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from envs.transforms.transform import Compose, Transform
from policies.torchrl.specs import Composite

RESOURCES = ("actor_name", "num_cpus", "num_gpus")
KINDS = {
    "transform_output_spec": ("observation", "reward", "done"),
    "transform_input_spec": ("action", "state"),
}


def apply_hook(transform: Any, hook: str, spec: Composite) -> Composite:
    """Return a spec after a transform's hook, `transform_<kind>_spec`, or `default_hook`."""
    change = getattr(transform, hook, None)
    return default_hook(transform, hook, spec) if change is None else change(spec)


def default_hook(transform: Any, hook: str, spec: Composite) -> Composite:
    """Return a spec after the hooks of a Compose's parts, or of the kinds that `hook` stands for.

    The hook of outputs stands for observation, reward and done, the hook of inputs for action and
    state; other hooks return the spec unchanged.
    """
    if isinstance(transform, Compose):
        for part in transform:
            spec = apply_hook(part, hook, spec)
        return spec
    for kind in KINDS.get(hook, ()):
        key = f"full_{kind}_spec"
        spec[key] = apply_hook(transform, f"transform_{kind}_spec", spec[key])
    return spec


def _hook(name: str) -> Any:
    """Return a spec hook that calls `_through(name, spec)`."""
    return lambda self, spec: self._through(name, spec)


class SpecHooks(Transform):
    """Declare a transform's changes of an environment's specs.

    Each hook may change its argument and returns it; a subclass overrides hooks for its entries.
    """

    transform_output_spec = _hook("transform_output_spec")
    transform_input_spec = _hook("transform_input_spec")
    transform_observation_spec = _hook("transform_observation_spec")
    transform_reward_spec = _hook("transform_reward_spec")
    transform_done_spec = _hook("transform_done_spec")
    transform_action_spec = _hook("transform_action_spec")
    transform_state_spec = _hook("transform_state_spec")

    def _through(self, hook: str, spec: Composite) -> Composite:
        return default_hook(self, hook, spec)

    @property
    def collector(self) -> Any:
        """Return the collector registered with the environment, or None."""
        return None if self.container is None else self.container.collector


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
