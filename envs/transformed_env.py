"""An environment seen through transforms."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase

from envs.env import EnvBase
from envs.transforms.transform import Compose, Transform
from policies.specs import Composite


class TransformedEnv(EnvBase):
    """Run `transform` on what `env` gives (and its inverse on what `env` is given).

    Attributes that it does not have are those of `env`. Several transforms go in a `Compose`.
    """

    def __init__(self, env: EnvBase, transform: Transform) -> None:
        transform.set_container(self)
        self.env, self.transform = env, transform

    @property
    def base_env(self) -> EnvBase:
        """Return the environment below all transforms."""
        return self.env.base_env

    def append_transform(self, transform: Transform) -> TransformedEnv:
        """Add a transform after the others; returns this environment."""
        if not isinstance(self.transform, Compose):
            self.transform._hold(None)
            self.transform = Compose(self.transform)
            self.transform.set_container(self)
        self.transform.append(transform)
        return self

    def regrouped(self, group_size: int) -> TransformedEnv:
        """Return the same environment and transforms, with so many samples of each prompt."""
        env = self.env.regrouped(group_size)  # type: ignore[attr-defined]
        for other in self.transform if isinstance(self.transform, Compose) else [self.transform]:
            env = env.append_transform(other.unmounted())
        return env

    def rand_action(self, td: TensorDictBase) -> TensorDictBase:
        """Write some action of the environment below into td, and return td."""
        return self.env.rand_action(td)

    @property
    def output_spec(self) -> Composite:
        """Return the specs of what comes out, by their names."""
        return self.transform.transform_output_spec(self.env.output_spec.clone())

    @property
    def input_spec(self) -> Composite:
        """Return the specs of what is read, by their names."""
        return self.transform.transform_input_spec(self.env.input_spec.clone())

    def __getattr__(self, name: str) -> Any:
        # Only public names: copy and pickle look for dunders before `env` is there.
        if name.startswith("_") or name in ("env", "transform"):
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return getattr(self.env, name)

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        return self.transform._reset(td, self.env.reset(td))

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        out = self.env.step(self.transform.inv(td))
        return self.transform._step(td, out.get("next"))
