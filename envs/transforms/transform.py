"""Transforms of an environment's outputs, and their composition.

`_step(td, next_td)` reads the step's td and writes next_td; `_reset(td, td_reset)` does the same
for a first state; `_call` is for transforms that need only one td. Called on a plain td, a
transform writes under "next", or without "next" into the td itself.
A transform may declare its additions to TorchRL's specs by `transform_*_spec(spec)`; see
`apply_hook` of envs/torchrl/hooks.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

from tensordict import NestedKey, TensorDictBase
from torch import nn


class Transform(nn.Module):
    """Map `in_keys` to `out_keys` by `_apply_transform`; override a hook for anything else.

    In a step, raise KeyError for a missing in_key; a reset, or `missing_tolerance`, skips it.
    """

    _container: Any  # a TransformedEnv, a Compose or None
    stays_last = False  # True: transforms appended later go before it

    def __init__(
        self, in_keys: Sequence[NestedKey] = (), out_keys: Sequence[NestedKey] | None = None
    ) -> None:
        super().__init__()
        self.in_keys = list(in_keys)
        self.out_keys = list(in_keys if out_keys is None else out_keys)
        self.missing_tolerance = False
        self._hold(None)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Transform the td's "next", or the td itself when it has none; writes in place."""
        next_td = tensordict.get("next", None)
        if next_td is None:
            return self._step(tensordict, tensordict)
        return tensordict.set("next", self._step(tensordict, next_td))

    def inv(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the input of the inner environment; the caller's td stays unchanged."""
        return self._inv_call(tensordict.copy())

    def _step(self, tensordict: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        return self._call(next_td)

    def _reset(self, tensordict: TensorDictBase | None, td_reset: TensorDictBase) -> TensorDictBase:
        tolerance, self.missing_tolerance = self.missing_tolerance, True
        try:
            return self._call(td_reset)
        finally:
            self.missing_tolerance = tolerance

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            value = next_td.get(in_key, None)
            if value is not None:
                next_td.set(out_key, self._apply_transform(value))
            elif not self.missing_tolerance:
                raise KeyError(
                    f"{type(self).__name__} expected {in_key!r}, got keys "
                    f"{sorted(map(str, next_td.keys()))}"
                )
        return next_td

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict

    def _apply_transform(self, value: Any) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__} needs _apply_transform(value), _call(td) or _step(td, next_td)"
        )

    def set_container(self, container: Any) -> None:
        """Store the environment or Compose of this transform; raise ValueError for a second one."""
        if self._container is not None:
            raise ValueError(
                f"this {type(self).__name__} already belongs to a "
                f"{type(self._container).__name__}; use one transform per environment"
            )
        self._hold(container)

    def _hold(self, container: Any) -> None:
        # Bypass nn.Module, which would register a Compose as a child of its child.
        object.__setattr__(self, "_container", container)

    @property
    def container(self) -> Any:
        """Return the environment of this transform, or None."""
        holder = self._container
        return holder.container if isinstance(holder, Transform) else holder

    @property
    def parent(self) -> Any:
        """Return the environment with only the transforms before this one."""
        before, part = list[Transform](), self
        while isinstance(holder := part._container, Compose):
            others = list(holder)
            before = [*others[: others.index(part)], *before]
            part = holder
        return None if holder is None else holder.seen_through(before)

    def unmounted(self) -> Transform:
        """Return a copy with the same modules and state, to mount elsewhere."""
        shared = copy(self)
        shared._hold(None)
        return shared


class Compose(Transform):
    """Run transforms one after the other (their inverses in the opposite order)."""

    def __init__(self, *transforms: Transform) -> None:
        super().__init__()
        self.transforms = nn.ModuleList()
        for transform in transforms:
            self.append(transform)

    def append(self, transform: Transform) -> None:
        """Add a transform at the end, before one that stays last."""
        transform.set_container(self)
        last = len(self) > 0 and self[-1].stays_last
        self.transforms.insert(len(self) - last, transform)

    def pop(self, index: int = -1) -> Transform:
        """Remove and return a transform; it may be mounted elsewhere."""
        transform: Any = self.transforms.pop(index)
        transform._hold(None)
        return transform

    def _step(self, tensordict: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        for transform in self:
            next_td = transform._step(tensordict, next_td)
        return next_td

    def _reset(self, tensordict: TensorDictBase | None, td_reset: TensorDictBase) -> TensorDictBase:
        for transform in self:
            td_reset = transform._reset(tensordict, td_reset)
        return td_reset

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        for transform in reversed(list(self)):
            tensordict = transform._inv_call(tensordict)
        return tensordict

    def __len__(self) -> int:
        return len(self.transforms)

    def __iter__(self) -> Iterator[Transform]:
        return iter(self.transforms)  # type: ignore[return-value]

    def __getitem__(self, index: int) -> Transform:
        return self.transforms[index]  # type: ignore[return-value]
