"""Transforms that give their Ray version when asked; Ray is imported only then."""

from __future__ import annotations

from typing import Any

RESOURCES = ("actor_name", "num_cpus", "num_gpus")


class Shareable:
    """A class that gives its Ray version, Ray<name>, when asked with use_ray_service=True."""

    def __new__(cls, *args: Any, use_ray_service: bool = False, **kwargs: Any) -> Any:
        """Return an object of the class, or the Ray version; resources need Ray."""
        from envs import transforms

        if not use_ray_service:
            given = [name for name in RESOURCES if kwargs.get(name) is not None]
            if given:
                raise ValueError(f"{', '.join(given)}: expected use_ray_service=True with them")
            return super().__new__(cls)
        if getattr(transforms, cls.__name__, None) is not cls:
            raise TypeError(f"{cls.__name__} has no Ray version; use RayTransform({cls.__name__})")
        return getattr(transforms, f"Ray{cls.__name__}")(*args, **kwargs)
