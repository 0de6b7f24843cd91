"""The border of the KL transforms: what comes as ragged rows is dense inside, [B, T].

Rows come as lazy stacks or as nested tensors. They are padded once on the way in; what goes out
has their lengths again, and nested rows their layout.
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
    """Return what the first td that has the key holds there: dense, or a list of its rows.

    Also a list of texts, for keys that hold some. None where no td has the key.

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
        held = inner(owner)
        if not isinstance(held, LazyStackedTensorDict):
            value = held.get(name, None)
            if isinstance(value, Tensor) and not value.is_nested:
                return value
            if value is None:
                continue
        if (value := read_rows(held, name)) is not None:
            return value
    return None


def read_rows(held: TensorDictBase, name: str) -> Any:
    """Return the rows at a name of a lazy stack, of a nested tensor, or a list of texts."""
    options = {"as_list": True} if isinstance(held, LazyStackedTensorDict) else {}
    value = held.get(name, None, **options)
    if isinstance(value, Tensor):
        return Rows(value.unbind(), value.layout) if value.is_nested else value
    return value if value is None or isinstance(value, list) else value.tolist()


def set_values(td: TensorDictBase, key: NestedKey, values: Values) -> None:
    """Set dense values as they are, nested rows as they came, and others as a lazy stack.

    A dense td has no lazy stack to hold rows at a single-name key: there they are jagged.
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
    """Tensors, one per row; `layout` is that of the nested tensor they came from, if any."""

    def __init__(self, rows: Any, layout: torch.layout | None = None) -> None:
        super().__init__(rows)
        self.layout = layout


def layout_of(rows: Any) -> torch.layout | None:
    """Return the layout of the nested tensor that rows came from, None for other rows."""
    return getattr(rows, "layout", None)


def map_rows(function: Callable[[Tensor], Tensor], values: Values) -> Values:
    """Return what a function makes of dense values, or of each row."""
    if isinstance(values, Tensor):
        return function(values)
    return Rows(map(function, values), layout_of(values))


class Border:
    """Make values dense, and ragged again where one of `values` is; dense ones stay as they are.

    `real` [B, T] says which entries of a padded batch are tokens, None where nothing was ragged.

    >>> rows = [torch.tensor([1, 2]), torch.tensor([3])]
    >>> border = Border(rows, side="left")
    >>> border.dense(rows).tolist(), border.ragged(border.dense(rows))[1].tolist()
    ([[1, 2], [0, 3]], [3])
    """

    def __init__(self, *values: Values | None, side: str) -> None:
        self.side, self.real = side, None
        if found := [value for value in values if isinstance(value, list)]:
            self.lengths = [len(row) for row in found[0]]
            self.layout = next((layout for rows in found if (layout := layout_of(rows))), None)
            self.real = pad_mask(self.lengths, side=side, device=found[0][0].device)

    def dense(self, values: Values, what: str = "values") -> Tensor:
        """Return values as [B, T, ...]; rows of other lengths than the first are a ValueError."""
        if self.real is not None:
            check_lengths(self.lengths, values, what)
        return values if isinstance(values, Tensor) else pad(values, side=self.side)

    def ragged(self, values: Tensor) -> Values:
        """Return values [B, T, ...] as they came: rows have no padding."""
        if self.real is None:
            return values
        return Rows(unpad(values, self.real.to(values.device)), self.layout)


def check_lengths(lengths: list[int], values: Values, what: str) -> None:
    """Raise unless the rows of `values` have these lengths."""
    if (got := [len(row) for row in values]) != lengths:
        raise ValueError(
            f"expected {what} of {lengths} tokens a row, got {got}; was one of them padded "
            "(pad_output)?"
        )


def lay_out(
    log_probs: Values,
    mask: Values,
    real: Values | None,
    own: tuple[Values | None, Values | None],
    *,
    side: str,
    padded: bool,
) -> Values:
    """Return log-probs with 0 outside the mask, as the td's own rows lie.

    `real` are the attended tokens of what was scored. `own` are the td's ids, or masks in place of
    them, and its attention mask. Where they hold no such rows the values are dense if `padded`,
    filled up on `side`, else ragged.
    """
    scored, kept = _attended(log_probs, real), _attended(mask, real)
    check_lengths([len(row) for row in scored], kept, "a mask")
    rows = [row.masked_fill(~m.bool(), 0) for row, m in zip(scored, kept, strict=True)]
    lengths, (ids, seen) = [len(row) for row in rows], own
    if ids is not None and [len(row) for row in _attended(ids, seen)] == lengths:
        places = [torch.ones_like(row, dtype=torch.bool) for row in ids]
        if seen is not None:
            places = [row.bool() for row in seen]
        pairs = zip(places, rows, strict=True)
        lain = [torch.zeros_like(m, dtype=r.dtype).masked_scatter(m, r) for m, r in pairs]
        return torch.stack(lain) if isinstance(ids, Tensor) else Rows(lain, layout_of(ids))
    return pad(rows, side=side) if padded else Rows(rows, layout_of(log_probs))


def _attended(values: Values, real: Values | None) -> list[Tensor]:
    """Return the rows of values without padding; those that the mask is not of have none."""
    if real is None or any(len(v) != len(m) for v, m in zip(values, real, strict=True)):
        return list(values)
    return [row[keep.bool()] for row, keep in zip(values, real, strict=True)]
