"""Environments over TensorDicts, and an environment seen through transforms.

`reset(td)` gives the first state; `step(td)` reads the action in td and writes the outcome (reward,
done, the next state) under "next". A subclass fills `_reset` and `_step`.
Left out on purpose: rollouts (trainer/collect.py) and auto-reset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from tensordict import TensorDictBase

if TYPE_CHECKING:
    from envs.transforms.transform import Transform


class EnvBase:
    """Common behaviour of environments: subclasses implement `_reset(td)` and `_step(td)`."""

    _collector: ref | None = None

    def reset(self, td: TensorDictBase | None = None) -> TensorDictBase:
        """Return the first state; td may carry the data to start from."""
        return self._reset(td)

    def step(self, td: TensorDictBase) -> TensorDictBase:
        """Write the outcome of the action in td under "next", and return td."""
        return td.set("next", self._step(td))

    @property
    def base_env(self) -> EnvBase:
        """Return the environment below all transforms."""
        return self

    def register_collector(self, collector: Any) -> None:
        """Remember who collects from this environment, by a weak reference."""
        self._collector = ref(collector)

    @property
    def collector(self) -> Any:
        """Return the registered collector, or None."""
        return None if self._collector is None else self._collector()

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        raise NotImplementedError(f"{type(self).__name__} has no _reset(td)")

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        raise NotImplementedError(f"{type(self).__name__} has no _step(td)")


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
