"""What stands at a key of a td: values dense, [B, ...], or ragged, one tensor per row."""

from __future__ import annotations

from typing import Any

from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor

from policies.padding import inner

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
        from envs.transforms.ragged import read_rows

        if (value := read_rows(held, name)) is not None:
            return value
    return None


def set_values(td: TensorDictBase, key: NestedKey, values: Values) -> None:
    """Set dense values as they are, and rows as td holds rows: stacked lazily, or nested."""
    if isinstance(values, Tensor):
        td.set(key, values)
    else:
        from envs.transforms.ragged import write_rows

        write_rows(td, key, values)


class Dense:
    """The border of values that all came dense: they are computed with as they are."""

    real: Tensor | None = None  # [B, T], which entries are tokens, where any came ragged

    def dense(self, values: Any, what: str = "values") -> Tensor:
        """Return values as [B, T, ...]."""
        return values

    def ragged(self, values: Tensor) -> Values:
        """Return values [B, T, ...] as they came."""
        return values


def border(*values: Values | None, side: str) -> Dense:
    """Return what makes values dense, and ragged again where one of them came so."""
    if not any(isinstance(value, list) for value in values):
        return Dense()
    from envs.transforms.ragged import Border

    return Border(*values, side=side)
