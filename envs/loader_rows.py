"""The rows of any dataloader, one after the other, epoch after epoch."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor


def endless(loader: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a loader, epoch after epoch."""
    while True:
        count = 0
        for item in loader:
            for row in _rows(item):
                count += 1
                yield row
        if not count:
            raise ValueError(
                "expected a dataloader that can be read again and has rows, got no row; a "
                "generator is empty after one epoch"
            )


def _rows(item: Any) -> list[dict[str, Any]]:
    """Return the rows of what a dataloader gives: a TensorDict, a dict, or a list of dicts."""
    if isinstance(item, TensorDictBase):
        parts = [item] if item.ndim == 0 else item.unbind(0)
        return [{name: part[name] for name in part.keys()} for part in parts]  # noqa: SIM118
    if isinstance(item, Mapping):
        if not all(map(_is_column, item.values())):
            return [dict(item)]
        columns = zip(*item.values(), strict=True)
        return [dict(zip(item, values, strict=True)) for values in columns]
    if isinstance(item, list) and all(isinstance(row, Mapping) for row in item):
        return [dict(row) for row in item]
    raise TypeError(
        "expected rows as a TensorDict, a dict of columns or a list of dicts, got "
        f"{type(item).__name__}; give a collate_fn that makes them"
    )


def _is_column(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, Tensor) and value.ndim > 0)
