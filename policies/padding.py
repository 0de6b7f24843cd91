"""Pad and unpad rows; nothing else in leash does.

Rows are 1-D tensors of different lengths; a padded batch is [B, T] with a bool mask, True = keep.
Masks come from lengths, never from `ids != pad`, because a row may contain the pad id.
"""

from collections.abc import Sequence

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensorclass
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence


def pad(rows: Sequence[Tensor], value: float | bool = 0, *, side: str = "right") -> Tensor:
    """Stack 1-D rows into [B, T], filling the shorter ones with `value` on `side`.

    >>> pad([torch.tensor([1, 2]), torch.tensor([3])], side="left").tolist()
    [[1, 2], [0, 3]]
    """
    return pad_sequence(list(rows), batch_first=True, padding_value=value, padding_side=side)


def widen(values: Tensor, width: int, value: float | bool = 0, *, side: str = "right") -> Tensor:
    """Return [B, t] filled up to [B, width] with `value` on `side`.

    >>> widen(torch.tensor([[1, 2]]), 3, side="left").tolist()
    [[0, 1, 2]]
    """
    more = width - values.shape[-1]
    assert more >= 0, f"expected at most {width} columns, got {values.shape[-1]}"
    return functional.pad(values, (0, more) if side == "right" else (more, 0), value=value)


def pad_mask(lengths: Sequence[int], *, side: str = "right", device=None) -> Tensor:
    """Return the bool [B, T] mask of rows of these lengths padded on `side`.

    >>> pad_mask([2, 1], side="left").int().tolist()
    [[1, 1], [0, 1]]
    """
    size = torch.tensor(list(lengths), device=device).unsqueeze(1)  # [B, 1]
    index = torch.arange(int(size.max()), device=device).unsqueeze(0)  # [1, T]
    return index < size if side == "right" else index >= size.max() - size


def unpad(values: Tensor, mask: Tensor) -> list[Tensor]:
    """Return the kept entries of each row of `values` [B, T] as a list of 1-D tensors.

    >>> [r.tolist() for r in unpad(torch.tensor([[1, 2], [0, 3]]), pad_mask([2, 1], side="left"))]
    [[1, 2], [3]]
    """
    flat = values[mask]  # [K], row-major
    return list(flat.split(mask.sum(-1).tolist()))


def compact(
    values: Tensor, mask: Tensor, value: float | bool = 0, *, side: str = "right"
) -> Tensor:
    """Return the kept entries of each row of [B, T] next to each other, padded on `side`.

    >>> compact(torch.tensor([[1, 2, 3]]), torch.tensor([[True, False, True]])).tolist()
    [[1, 3]]
    """
    size = int(mask.sum(-1).max())
    order = mask.int().argsort(dim=-1, descending=side == "right", stable=True)
    order = order[:, :size] if side == "right" else order[:, mask.shape[-1] - size :]
    return values.gather(-1, order).masked_fill(~mask.gather(-1, order), value)


def positions(mask: Tensor) -> Tensor:
    """Return the index of each kept token within its row, [B, T]; padding reads 0.

    >>> positions(torch.tensor([[False, True, True]])).tolist()
    [[0, 0, 1]]
    """
    return (mask.cumsum(-1) - 1).clamp(min=0)


def predicted(attention: Tensor, keep: Tensor | None = None) -> Tensor:
    """Return the mask of tokens to keep that have a predecessor, [B, T]; padding is never kept.

    >>> predicted(torch.tensor([[False, True, True]])).tolist()
    [[False, False, True]]
    """
    keep = attention if keep is None else keep & attention
    return keep & (positions(attention) > 0)


def is_ragged(container: TensorDictBase) -> bool:
    """Return whether a TensorDict or tensorclass is a lazy stack or holds nested tensors."""
    td = inner(container)
    lazy = isinstance(td, LazyStackedTensorDict)
    return lazy or any(isinstance(v, Tensor) and v.is_nested for v in td.values())


def inner(container: TensorDictBase) -> TensorDictBase:
    """Return the TensorDict inside a tensorclass; a TensorDict itself."""
    return container._tensordict if is_tensorclass(container) else container


def rows(td: TensorDictBase, key: str | tuple[str, ...]) -> list[Tensor] | None:
    """Return the rows at a key of a dense or lazily stacked TensorDict; None without the key."""
    path = (key,) if isinstance(key, str) else tuple(key)
    owner = td if len(path) == 1 else td.get(path[:-1], None) if path else None
    if owner is None:
        return None
    lazy = isinstance(inner(owner), LazyStackedTensorDict)
    options = {"as_list": True} if lazy else {}
    value = owner.get(path[-1], None, **options)
    if value is None or isinstance(value, list):
        return value
    return list(value.unbind(0))  # a nested tensor has no iterator


def attended(ids: list[Tensor], masks: list[Tensor] | None, *, ragged: bool) -> list[Tensor]:
    """Return the ids that the masks keep, row by row; without masks all ids.

    Rows of a lazy stack (`ragged`) hold no padding, so a mask of another length is ignored. Raise
    ValueError for such a mask of dense rows.

    >>> attended([torch.tensor([0, 7])], [torch.tensor([0, 1])], ragged=False)
    [tensor([7])]
    """
    if masks is None:
        return ids
    if all(mask.shape == row.shape for mask, row in zip(masks, ids, strict=True)):
        return [row[mask.bool()] for row, mask in zip(ids, masks, strict=True)]
    if ragged:
        return ids
    raise ValueError(f"expected an attention mask of {len(ids[0])} entries, got {len(masks[0])}")
