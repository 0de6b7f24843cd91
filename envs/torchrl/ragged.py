"""Convert ragged rows to dense tensors [B, T] for the KL transforms, and back.

Rows are lazy stacks or nested tensors. They are padded once on input. Outputs have the lengths of
the rows, and the layout of nested rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from policies.padding import inner, pad, pad_mask, unpad

Values = Tensor | list[Tensor]

RESPONSE = ("masks", "all_response_mask")
ASSISTANT = ("masks", "all_assistant_mask")
ATTENTION = ("masks", "all_attention_mask")


def get_values(key: NestedKey, *tds: TensorDictBase) -> Any:
    """Return the values at a key of the first td that has it: dense, or a list of rows.

    Texts are returned as a list. None if no td has the key.

    >>> from tensordict import TensorDict, lazy_stack
    >>> import torch
    >>> get_values("a", lazy_stack([TensorDict(a=torch.ones(1)), TensorDict(a=torch.ones(2))]))
    [tensor([1.]), tensor([1., 1.])]
    """
    *path, name = (key,) if isinstance(key, str) else key
    for td in tds:
        owner: Any = td.get(tuple(path), None) if path else td
        if owner is None:
            continue
        container = inner(owner)
        if not isinstance(container, LazyStackedTensorDict):
            value = container.get(name, None)
            if isinstance(value, Tensor) and not value.is_nested:
                return value
            if value is None:
                continue
        if (value := read_rows(container, name)) is not None:
            return value
    return None


def read_rows(container: TensorDictBase, name: str) -> Any:
    """Return the rows at a name, from a lazy stack or a nested tensor, or a list of texts."""
    options = {"as_list": True} if isinstance(container, LazyStackedTensorDict) else {}
    value = container.get(name, None, **options)
    if isinstance(value, Tensor):
        return Rows(value.unbind(), value.layout) if value.is_nested else value
    return value if value is None or isinstance(value, list) else value.tolist()


def set_values(td: TensorDictBase, key: NestedKey, values: Values) -> None:
    """Set dense values unchanged, nested rows in their layout, and other rows as a lazy stack.

    A dense td cannot have a lazy stack at a single-name key, so rows are jagged there.
    """
    if isinstance(values, Tensor):
        td.set(key, values)
        return
    *path, name = (key,) if isinstance(key, str) else key
    layout = layout_of(values)
    if isinstance(td, LazyStackedTensorDict):
        for row_td, value in zip(td.tensordicts, values, strict=True):
            row_td.set(key, value)
    elif path and layout is None:
        owner = td.get(tuple(path), None)
        rows = [TensorDict() for _ in values] if owner is None else list(owner.unbind(0))
        for row_td, value in zip(rows, values, strict=True):
            row_td.set(name, value)
        td.set(tuple(path), lazy_stack(rows))
    else:
        td.set(key, torch.nested.as_nested_tensor(list(values), layout=layout or torch.jagged))


class Rows(list):
    """Tensors, one per row; `layout`: the layout of the nested tensor they came from, if any."""

    def __init__(self, rows: Any, layout: torch.layout | None = None) -> None:
        super().__init__(rows)
        self.layout = layout


def layout_of(rows: Any) -> torch.layout | None:
    """Return the layout of the nested tensor that rows came from, None for other rows."""
    return getattr(rows, "layout", None)


def map_rows(function: Callable[[Tensor], Tensor], values: Values) -> Values:
    """Apply a function to dense values, or to each row."""
    if isinstance(values, Tensor):
        return function(values)
    return Rows(map(function, values), layout_of(values))


class Border:
    """Make values dense, and ragged again if one of `values` is ragged.

    `real` [B, T] is the mask of tokens in a padded batch, None if all values are dense.

    >>> rows = [torch.tensor([1, 2]), torch.tensor([3])]
    >>> border = Border(rows, side="left")
    >>> border.dense(rows).tolist(), border.ragged(border.dense(rows))[1].tolist()
    ([[1, 2], [0, 3]], [3])
    """

    def __init__(self, *values: Values | None, side: str) -> None:
        self.side, self.real = side, None
        if ragged := [value for value in values if isinstance(value, list)]:
            self.lengths = [len(row) for row in ragged[0]]
            self.layout = next((layout for rows in ragged if (layout := layout_of(rows))), None)
            self.real = pad_mask(self.lengths, side=side, device=ragged[0][0].device)

    def dense(self, values: Values, label: str = "values") -> Tensor:
        """Return values as [B, T, ...]; raise ValueError if their row lengths differ."""
        if self.real is not None:
            check_lengths(self.lengths, values, label)
        return values if isinstance(values, Tensor) else pad(values, side=self.side)

    def ragged(self, values: Tensor) -> Values:
        """Return values [B, T, ...] in the original layout: rows have no padding."""
        if self.real is None:
            return values
        return Rows(unpad(values, self.real.to(values.device)), self.layout)


def check_lengths(lengths: list[int], values: Values, label: str) -> None:
    """Raise ValueError unless the rows of `values` have these lengths."""
    if (got := [len(row) for row in values]) != lengths:
        raise ValueError(
            f"expected {label} of {lengths} tokens a row, got {got}; was one of them padded "
            "(pad_output)?"
        )


def lay_out(
    log_probs: Values,
    mask: Values,
    real: Values | None,
    target: tuple[Values | None, Values | None],
    *,
    side: str,
    padded: bool,
) -> Values:
    """Return log-probs with 0 outside the mask, in the layout of the td's rows.

    `real` is the attention mask of the scored tokens. `target` has the td's ids (or masks in place
    of them) and its attention mask. If their lengths do not fit, the result is dense and padded on
    `side` if `padded`, else ragged.
    """
    scored, masks = _attended(log_probs, real), _attended(mask, real)
    check_lengths([len(row) for row in scored], masks, "a mask")
    rows = [row.masked_fill(~m.bool(), 0) for row, m in zip(scored, masks, strict=True)]
    lengths, (ids, seen) = [len(row) for row in rows], target
    if ids is not None and [len(row) for row in _attended(ids, seen)] == lengths:
        places = [torch.ones_like(row, dtype=torch.bool) for row in ids]
        if seen is not None:
            places = [row.bool() for row in seen]
        pairs = zip(places, rows, strict=True)
        lain = [torch.zeros_like(m, dtype=r.dtype).masked_scatter(m, r) for m, r in pairs]
        return torch.stack(lain) if isinstance(ids, Tensor) else Rows(lain, layout_of(ids))
    return pad(rows, side=side) if padded else Rows(rows, layout_of(log_probs))


def _attended(values: Values, real: Values | None) -> list[Tensor]:
    """Return the rows of values without padding; a mask of other lengths is ignored."""
    if real is None or any(len(v) != len(m) for v, m in zip(values, real, strict=True)):
        return list(values)
    return [row[keep.bool()] for row, keep in zip(values, real, strict=True)]
