"""Environments over TensorDicts, and an environment with transforms of its inputs and outputs.

`reset(td)` returns the first state; `step(td)` reads the action in td and writes the outcome
(reward, done, the next state) under "next", so that the policy reads `td["next"]` in the next turn.
TorchRL's specs, random actions and rollouts are in envs/torchrl/env.py, because no run needs them.
"""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase

from envs.transforms.transform import Compose, Transform


class Env:
    """Common behaviour of environments: subclasses implement `_reset(td)` and `_step(td)`."""

    def reset(self, td: TensorDictBase | None = None) -> TensorDictBase:
        """Return the first state; td may hold data for it, such as prompts."""
        return self._reset(td)

    def step(self, td: TensorDictBase) -> TensorDictBase:
        """Write the outcome of the action in td under "next", and return td."""
        return td.set("next", self._step(td))

    @property
    def base_env(self) -> Any:
        """Return the environment without its transforms."""
        return self

    def transformed(self, transform: Transform) -> Any:
        """Return a TransformedEnv of this environment."""
        return TransformedEnv(self, transform)

    def append_transform(self, transform: Transform) -> Any:
        """Return this environment with one more transform."""
        return self.transformed(transform)

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        raise NotImplementedError(f"{type(self).__name__} has no _reset(td)")

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        raise NotImplementedError(f"{type(self).__name__} has no _step(td)")


class TransformedEnv(Env):
    """Run `transform` on the outputs of `env` and the inverse transform on the inputs.

    Attributes that this class lacks come from `env`. Use a `Compose` for several transforms.
    """

    def __init__(self, env: Any, transform: Transform) -> None:
        transform.set_container(self)
        self.env, self.transform = env, transform

    @property
    def base_env(self) -> Any:
        """Return the environment without its transforms."""
        return self.env.base_env

    def append_transform(self, transform: Transform) -> Any:
        """Add a transform after the others; return this environment."""
        if not isinstance(self.transform, Compose):
            self.transform._hold(None)
            self.transform = Compose(self.transform)
            self.transform.set_container(self)
        self.transform.append(transform)
        return self

    def seen_through(self, transforms: list[Transform]) -> Any:
        """Return the inner environment with unmounted copies of `transforms`."""
        env = self.env
        for transform in transforms:
            env = env.transformed(transform.unmounted())
        return env

    def with_group_size(self, group_size: int) -> Any:
        """Return a copy with the same transforms and `group_size` samples per prompt."""
        env = self.env.with_group_size(group_size)
        for other in self.transform if isinstance(self.transform, Compose) else [self.transform]:
            env = env.append_transform(other.unmounted())
        return env

    def __getattr__(self, name: str) -> Any:
        # Only public names, because copy and pickle look up private names before `env` exists.
        if name.startswith("_") or name in ("env", "transform"):
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return getattr(self.env, name)

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        return self.transform._reset(td, self.env.reset(td))

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        out = self.env.step(self.transform.inv(td))
        return self.transform._step(td, out.get("next"))
