"""Input of the public losses: settable keys, and values of any shape and layout.

Values are read at the root or under "next". Ragged rows are padded once, to dense [B, T] under the
keys of trainer/batch.py, which the objectives of the trainer read.
"""

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from policies.padding import is_ragged, pad, rows

REDUCTIONS = ("mean", "sum", "none")


class LossModule(nn.Module):
    """Base of the losses: input keys are in `tensor_keys`; `set_keys(name=key)` changes them."""

    tensor_keys: Any

    def set_keys(self, **keys: NestedKey) -> None:
        """Read values under other keys; raise ValueError for an unknown name."""
        known = [f.name for f in fields(self.tensor_keys)]
        unknown = sorted(set(keys) - set(known))
        if unknown:
            raise ValueError(f"expected names of keys among {known}, got {unknown}")
        self.tensor_keys = replace(self.tensor_keys, **keys)


def check_choice(name: str, value: str, known: Iterable[str]) -> None:
    """Raise ValueError unless the value is in `known`."""
    if value not in known:
        raise ValueError(f"expected {name} in {sorted(known)}, got {value!r}")


def locate(td: TensorDictBase, key: NestedKey) -> tuple[str, ...] | None:
    """Return the path of a key, as it is or with or without "next"; None if missing."""
    path = (key,) if isinstance(key, str) else tuple(key)
    other = path[1:] if path[0] == "next" else ("next", *path)
    return next((p for p in (path, other) if p and rows(td, p) is not None), None)


def get_dense(td: TensorDictBase, key: NestedKey) -> Tensor | None:
    """Return the value at a key, ragged rows padded left; None if missing."""
    place = locate(td, key)
    if place is None:
        return None
    owner = td.get(place[:-1]) if len(place) > 1 else td
    return pad(rows(td, place) or [], side="left") if is_ragged(owner) else td.get(place)


def require(td: TensorDictBase, key: NestedKey) -> Tensor:
    """Return the value at a key as `get_dense` does; raise KeyError if missing."""
    value = get_dense(td, key)
    if value is None:
        got = sorted(map(str, td.keys()))
        raise KeyError(f"expected {key} at the root or under 'next', got {got}; use set_keys")
    return value


def aligned(td: TensorDictBase, key: NestedKey, real: Tensor, *, ragged: bool) -> Tensor:
    """Return the value at a key aligned with the tokens, [B, T].

    `real` [B, T] is the attention mask. A row holds a value for each real token or, unless the
    batch is `ragged`, for each column.
    """
    require(td, key)
    values = [row.squeeze(-1) if row.ndim == 2 else row for row in rows(td, locate(td, key)) or []]
    sizes, lengths = [len(row) for row in values], real.sum(-1).tolist()
    if not ragged and sizes == [real.shape[1]] * len(real):
        return torch.stack(values)
    if sizes != lengths:
        raise ValueError(f"expected {lengths} values in the rows of {key}, got {sizes}")
    return values[0].new_zeros(real.shape).masked_scatter(real, torch.cat(values))


def per_token(value: Tensor, mask: Tensor, fill: float | None = None) -> Tensor:
    """Return [B, T] from [B, T], [B, T, 1], [B, 1] or [B, 1, 1], with `fill` outside the mask."""
    value = value.squeeze(-1) if value.ndim == mask.ndim + 1 else value
    if value.shape != mask.shape and value.shape != (*mask.shape[:-1], 1):
        raise ValueError(f"expected shape {tuple(mask.shape)}, got {tuple(value.shape)}")
    value = value.expand(mask.shape)
    return value if fill is None else value.masked_fill(~mask, fill)


def masked_mean(value: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the mask, a scalar; 0 for an empty mask."""
    return value[mask].sum() / mask.sum().clamp(min=1)
