"""Rows of data sets and tasks: lists, or sequences that make a row on access."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Message = dict[str, Any]  # {"role": ..., "content": ...}

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:.*)?")  # org/name or name; :subset is optional
EXTENSION = re.compile(r"^[^:/]*\.[^:/]*$|\.[A-Za-z]{2,}$")  # found in paths: my.data, x/y.txt


class LazyRows(Sequence[Any]):
    """A sequence of rows: make(item) for each of `items`, computed on access.

    >>> LazyRows(str, range(3))[1:][0]
    '1'
    """

    def __init__(
        self, make: Callable[[Any], Any], items: Sequence[Any], *, listed: bool = True
    ) -> None:
        self.make, self.items = make, items
        self.listed = listed  # False: checks before a run do not read all rows

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return LazyRows(self.make, self.items[index], listed=self.listed)
        return self.make(self.items[index])


def is_listed(rows: Sequence[Any]) -> bool:
    """Return whether all rows may be read before a run; False for generated rows."""
    return isinstance(rows, list | tuple) or getattr(rows, "listed", False)


def map_rows(make: Callable[[Any], Any], items: Sequence[Any]) -> Sequence[Any]:
    """Apply `make` to each item: now if `items` is a list, else on access."""
    return [make(item) for item in items] if isinstance(items, list) else LazyRows(make, items)


def is_file(dataset: str) -> bool:
    """Return whether `dataset` names a file, existing or not, and not a hub id or a folder.

    >>> is_file("my.txt"), is_file("./rows"), is_file("org/v1.1"), is_file("org/name:part.a")
    (True, True, False, False)
    """
    path = Path(dataset).expanduser()
    if path.is_dir():
        return False
    is_path = HUB_ID.fullmatch(dataset) is None or EXTENSION.search(dataset) is not None
    return is_path or path.is_file()
