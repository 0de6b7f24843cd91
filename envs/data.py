"""Load data sets from files, folders and the hub into tables, and check their cells.

A data set is a file (envs/data_files.py), a pattern with * for several files, a folder of files or
of `datasets` (save_to_disk), or a hub id: "openai/gsm8k", or "openai/gsm8k:main" with a subset.
An error names row, column, the expected and the actual value. Small data sets are lists; above
`LARGE` bytes rows are made on access, from memory for files and else from the cache of `datasets`.
shapes.py and chat_rows.py turn rows into chats.
"""

import json
import logging
import pickle
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from envs.data_files import KINDS, find_files, find_split, kind_of, read_files, refuse_deep_rows
from envs.rows import LazyRows, Row, is_file
from policies.files import sha256_of_path

LOADERS = {kind: (kind[1:], {}) for kind in (".csv", ".parquet", ".json")}  # loaders in `datasets`
LOADERS |= {".jsonl": ("json", {}), ".tsv": ("csv", {"sep": "\t"})}
LARGE = 32 << 20  # bytes; rows of larger data sets are made on access


@dataclass(frozen=True)
class Table:
    """A data set: name for errors, column names, and rows in a list or made on access."""

    name: str
    columns: list[str]
    rows: Sequence[dict[str, Any]]
    arrow: bool = False  # a nested dict has the keys of all rows, with None for missing ones

    def has(self, column: str) -> bool:
        """Return whether the table has a column; for a nested name, its outer column."""
        return column in self.columns or column.partition(".")[0] in self.columns

    def require(self, key: str, column: str, hint: str = "") -> str:
        """Return `column`, the value of env.columns.<key>; raise ValueError if it is missing."""
        if not self.has(column):
            raise ValueError(
                f"{self.name}: expected a column {column!r}, got {', '.join(self.columns)}; set "
                f"env.columns.{key}=<column>{hint}"
            )
        return column

    def text(self, index: int, column: str) -> str:
        """Return the text of a cell; raise ValueError if the cell is not a nonempty text."""
        value = self.rows[index].get(column)
        if not isinstance(value, str) or not value.strip():
            raise self.error(index, column, "a text", value)
        return value

    def error(self, index: int, column: str, expected: str, got: Any) -> ValueError:
        """Return the error for a malformed cell."""
        return ValueError(
            f"{self.name}, row {index}, {column}: expected {expected}, got {got!r:.80} "
            f"({type(got).__name__}); correct or remove the row (env.skip_bad_rows=true), or "
            "select another column with env.columns.question, env.columns.answer or "
            "env.columns.messages"
        )


def cell_of(row: Row, column: str) -> Any:
    """Return the cell of a column, or for a nested name a value in it (dict or JSON), or None.

    >>> cell_of({"reward_model": {"ground_truth": "72"}}, "reward_model.ground_truth")
    '72'
    """
    if column in row:
        return row[column]
    name, _, key = column.partition(".")
    cell = row.get(name) if key else None
    if isinstance(cell, str):
        with suppress(ValueError):
            cell = json.loads(cell)
    return cell_of(cell, key) if isinstance(cell, Mapping) else None


def load_table(dataset: str, *, split: str = "train", key: str = "env.dataset") -> Table:
    """Load a data set. `split` is a split of the hub or of a folder; a file is always loaded whole.

    Raise ValueError, with its `key`, if the data set is missing, unreadable or empty.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "two.jsonl"
    >>> _ = path.write_text('{"question": "1+1", "answer": "2"}\\n{"question": "2+2"}\\n')
    >>> load_table(str(path)).columns
    ['question', 'answer']
    """
    try:
        table = _read_files(dataset) if is_file(dataset) else _load_datasets(dataset, split)
    except (OSError, EOFError, zlib.error) as error:
        reason = " ".join(str(error).split()) or "no data"
        raise ValueError(
            f"{dataset}: cannot be read: {reason:.300}; set "
            f"{key}=<a file ({', '.join(KINDS)}), a folder or a hub id>"
        ) from None
    if not table.rows:
        raise ValueError(f"{dataset}: expected at least one row, got an empty data set")
    return table


def _read_files(dataset: str) -> Table:
    files = find_files(dataset)
    columns, packed = read_files(files)
    rows = LazyRows(partial(_unpack, columns), packed)
    small = sum(map(len, packed)) <= LARGE
    arrow = any(kind_of(file) == ".parquet" for file in files)
    return Table(dataset, columns, list(rows) if small else rows, arrow)


def _unpack(columns: list[str], packed: bytes) -> dict[str, Any]:
    return dict.fromkeys(columns) | pickle.loads(packed)


def _load_datasets(dataset: str, split: str) -> Table:
    """Load a split of the hub or of a folder with `datasets`."""
    import datasets  # takes a second
    import huggingface_hub

    datasets.disable_progress_bars()
    for logger in (datasets.logging, huggingface_hub.logging):
        logger.set_verbosity(logging.CRITICAL)
    path = Path(dataset).expanduser()
    name, _, subset = dataset.partition(":")
    options: dict[str, Any] = {"name": subset or None, "split": split}
    is_saved = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
    if path.is_dir() and not is_saved:
        files = find_split(path, split)
        refuse_deep_rows(files)
        name, sep = LOADERS[kind_of(files[0])]
        # `datasets` identifies a file by path and time, so each content gets its own cache.
        cache = Path(datasets.config.HF_DATASETS_CACHE) / "leash" / sha256_of_path(path)
        options = {"data_files": [*map(str, files)], "split": "train", "cache_dir": cache, **sep}
    try:
        if is_saved:
            saved = datasets.load_from_disk(str(path))
            splits = saved if isinstance(saved, dict) else {"train": saved}
            if split not in splits:
                raise ValueError(f"expected a split {' or '.join(splits)}, got {split!r}")
            data = splits[split]
        else:
            data = datasets.load_dataset(name, **options)
    except (OSError, ValueError, StopIteration, datasets.exceptions.DatasetsError) as error:
        raise OSError(error.__cause__ or error) from None
    small = data.data.nbytes <= LARGE
    rows = data.to_list() if small else LazyRows(data.__getitem__, range(len(data)))
    return Table(dataset, data.column_names, rows, arrow=True)
