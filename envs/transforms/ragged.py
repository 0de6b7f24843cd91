"""The border of the KL transforms: what comes as ragged rows is dense inside, [B, T].

Rows come as lazy stacks or as nested tensors. They are padded once on the way in; what goes out
has their lengths again.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)
from torch import Tensor

from policies.padding import inner, pad, pad_mask, unpad

Values = Tensor | list[Tensor]  # dense [B, ...], or one tensor per row


class Border:
    """The lengths of the rows of `values`, if any of them is ragged, and how they are padded.

    `real` [B, T] says which entries of a padded batch are tokens; None if all came dense.

    >>> rows = [torch.tensor([1, 2]), torch.tensor([3])]
    >>> border = Border(rows, side="left")
    >>> border.dense(rows).tolist(), border.ragged(border.dense(rows))[1].tolist()
    ([[1, 2], [0, 3]], [3])
    """

    real: Tensor | None = None
    lengths: list[int] | str = "equally many"

    def __init__(self, *values: Values | None, side: str) -> None:
        self.side = side
        rows = next((v for v in values if isinstance(v, list)), None)
        if rows is not None:
            self.lengths = [len(row) for row in rows]
            self.real = pad_mask(self.lengths, side=side, device=rows[0].device)  # [B, T]

    def dense(self, values: Values, what: str = "values") -> Tensor:
        """Return values as [B, T, ...]; rows of other lengths than the first are a ValueError."""
        if self.real is None and isinstance(values, Tensor):
            return values
        lengths = [len(row) for row in values]
        if lengths != self.lengths:
            raise ValueError(
                f"expected {what} of {self.lengths} tokens a row, got {lengths}; was one of them "
                "padded (pad_output)?"
            )
        return values if isinstance(values, Tensor) else pad(values, side=self.side)

    def ragged(self, values: Tensor) -> Values:
        """Return values [B, T, ...] as rows without padding, or as they are if all came dense."""
        return values if self.real is None else unpad(values, self.real.to(values.device))


def get_values(key: NestedKey, *tds: TensorDictBase) -> Any:
    """Return what the first td that has the key holds there: dense, or a list of its rows.

    Also a list of texts, for keys that hold some. None where no td has the key.

    >>> get_values("a", lazy_stack([TensorDict(a=torch.ones(1)), TensorDict(a=torch.ones(2))]))
    [tensor([1.]), tensor([1., 1.])]
    """
    *path, name = (key,) if isinstance(key, str) else key
    for td in tds:
        owner: Any = td.get(tuple(path), None) if path else td
        if owner is None:
            continue
        held = inner(owner)
        as_list = {"as_list": True} if isinstance(held, LazyStackedTensorDict) else {}
        value = held.get(name, None, **as_list)
        if isinstance(value, Tensor):
            return list(value.unbind()) if value.is_nested else value
        if value is not None:
            return value if isinstance(value, list) else value.tolist()
    return None


def set_values(td: TensorDictBase, key: NestedKey, values: Values) -> None:
    """Set dense values as they are, and rows as a lazy stack.

    A dense td has no lazy stack to hold rows at a single-name key: there they are jagged.
    """
    *path, name = (key,) if isinstance(key, str) else key
    if isinstance(values, Tensor):
        td.set(key, values)
    elif isinstance(td, LazyStackedTensorDict):
        for row_td, value in zip(td.tensordicts, values, strict=True):
            row_td.set(key, value)
    elif path:
        owner = td.get(tuple(path), None)
        rows = [TensorDict() for _ in values] if owner is None else list(owner.unbind(0))
        for row_td, value in zip(rows, values, strict=True):
            row_td.set(name, value)
        td.set(tuple(path), lazy_stack(rows))
    else:
        td.set(name, torch.nested.as_nested_tensor(values, layout=torch.jagged))
