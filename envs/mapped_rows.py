"""Rows of a large data set, on disk: read when they are asked for, in constant memory.

A text file is copied once to leash's cache, a row a line, so that who edits it edits no run. What
looking at all rows finds is kept there too, by `place_for`.
"""

import hashlib
import json
import mmap
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from policies.cache import build_once, cache_dir, sha256_file

ROWS, ENDS = "rows.jsonl", "ends.bin"  # and where each row ends in it, 8 bytes a row
_DECODE = json.JSONDecoder().decode
BLOCK = 64  # rows of an Arrow table that are read at a time


class TextRows(Sequence[dict[str, Any]]):
    """The rows that `write_rows` wrote to a folder."""

    def __init__(self, folder: Path, columns: list[str]) -> None:
        self.folder, self.columns, self.origin = folder, columns, folder.name
        self._text, self._ends = _mapped(folder / ROWS), memoryview(_mapped(folder / ENDS))
        self._places = self._ends.cast("q")
        self._known = range(len(self._places) - 1)
        self._last = -1, dict[str, Any]()  # place and row: its columns are asked for in turn

    def __len__(self) -> int:
        return len(self._known)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = self._known[index]
        if self._last[0] != at:
            text = self._text[self._places[at] : self._places[at + 1]]
            self._last = at, _DECODE(text.decode())
        return dict(self._last[1])

    def __reduce__(self) -> tuple:
        return TextRows, (self.folder, self.columns)


class ArrowRows(Sequence[dict[str, Any]]):
    """The rows of the record batches of an Arrow table, which stay on disk."""

    def __init__(self, batches: Sequence[pa.RecordBatch], origin: Any = None) -> None:
        self.origin = origin
        self._batches = [batch for batch in batches if batch.num_rows]
        self.columns = list(batches[0].schema.names) if batches else []
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))
        self._block, self._begin = list[dict[str, Any]](), 0

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        if not 0 <= at - self._begin < len(self._block):
            number = bisect_right(self._ends, at)
            first = self._ends[number - 1] if number else 0
            self._begin = first + (at - first) // BLOCK * BLOCK
            self._block = self._batches[number].slice(self._begin - first, BLOCK).to_pylist()
        return dict(self._block[at - self._begin])


def map_text(path: Path, read: Callable[[Path], Iterable[dict[str, Any]]]) -> TextRows:
    """Return the rows of a text file, which `read` yields; read once for a content."""
    folder = _place(path)
    words = f"copying {path.name}, {path.stat().st_size / 2**20:,.0f} MiB"

    def build(work: Path) -> dict[str, Any]:
        return {"columns": write_rows(work, shown(read(path), words))}

    return TextRows(folder, build_once(folder, build)["about"]["columns"])


def map_parquet(path: Path) -> ArrowRows:
    """Return the rows of a parquet file, unpacked once for a content."""

    def build(work: Path) -> None:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            with pa.OSFile(str(work / ROWS), "wb") as out, pa.ipc.new_file(out, schema) as writer:
                for batch in file.iter_batches():
                    writer.write_batch(batch)

    folder = _place(path)
    build_once(folder, build)
    reader = pa.ipc.open_file(pa.memory_map(str(folder / ROWS)))
    batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
    return ArrowRows(batches, folder.name)


def write_rows(folder: Path, rows: Iterable[dict[str, Any]]) -> list[str]:
    """Write rows for `TextRows`; return their columns."""
    end, columns = 0, dict[str, None]()
    with open(folder / ROWS, "wb") as file, open(folder / ENDS, "wb") as ends:
        ends.write(array("q", [0]).tobytes())
        for row in rows:
            if not row.keys() <= columns.keys():
                columns |= dict.fromkeys(row)
            end += file.write(f"{json.dumps(row)}\n".encode())
            ends.write(array("q", [end]).tobytes())
    return list(columns)


def place_for(name: str, *about: Any) -> Path:
    """Return the folder in the cache for what this version of leash finds out about rows.

    `about`, which JSON can hold, says of which and how.
    """
    known, root = hashlib.sha256(json.dumps(about).encode()), Path(__file__).parents[1]
    for part in ("envs", "policies/chats"):
        for path in sorted((root / part).rglob("*.py")):
            known.update(path.read_bytes())
    return cache_dir() / name / known.hexdigest()[:32]


def shown(items: Iterable[Any], words: str, total: int | None = None) -> Iterable[Any]:
    """Return the items, with a bar where there is a terminal, else a line that says so."""
    if not sys.stderr.isatty():
        print(f"{words} (once for this content)", file=sys.stderr)
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, words, total, console=Console(stderr=True), transient=True)


def _place(path: Path) -> Path:
    return cache_dir() / "data" / f"{sha256_file(path)[:32]}{path.suffix.lower()}"


def _mapped(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
