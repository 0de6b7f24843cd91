"""Load data sets from files, folders and the hub into tables, and check their cells.

A data set is a file (.parquet, .jsonl, .json or .csv; the last three also as .gz), a pattern for
several files, a folder of files, or a hub id: "openai/gsm8k", or "openai/gsm8k:main" with a subset.
An error names row, column, the expected and the actual value. Small data sets are lists; above
`LARGE` bytes the rows stay on disk, in the cache of `datasets`. chat_rows.py turns rows into chats.
"""

import csv
import gzip
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import IO, Any

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:.*)?")  # org/name or name; :subset is optional
LARGE = 32 << 20  # bytes; larger data sets stay on disk
EXTENSION = re.compile(r"^[^:/]*\.[^:/]*$|\.[A-Za-z]{2,}$")  # of paths: my.data, x/y.txt
DEEPEST = 100  # levels of lists and objects in a row, as in Parquet
JSON_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}  # loaders


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


def map_rows(make: Callable[[Any], Any], items: Sequence[Any]) -> Sequence[Any]:
    """Apply `make` to each item: now if `items` is a list, else on access."""
    return [make(item) for item in items] if isinstance(items, list) else LazyRows(make, items)


@dataclass(frozen=True)
class Table:
    """A data set: name for errors, column names, and rows in a list or on disk."""

    name: str
    columns: list[str]
    rows: Sequence[dict[str, Any]]

    def require(self, key: str, column: str, hint: str = "") -> str:
        """Return `column`, the value of env.columns.<key>; ValueError if the table lacks it."""
        if column not in self.columns:
            raise ValueError(
                f"{self.name}: expected a column {column!r}, got {', '.join(self.columns)}; set "
                f"env.columns.{key}=<column>{hint}"
            )
        return column

    def each(self, read: Callable[[int], dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Apply `read` to each index. Rows on disk are checked now and read again on access."""
        indices = range(len(self.rows))
        if isinstance(self.rows, list):
            return [read(index) for index in indices]
        for index in indices:
            read(index)
        return LazyRows(read, indices)

    def text(self, index: int, column: str) -> str:
        """Return the text of a cell; ValueError if the cell is not a nonempty text."""
        value = self.rows[index].get(column)
        if not isinstance(value, str) or not value.strip():
            raise self.error(index, column, "a text", value)
        return value

    def messages(self, index: int, column: str) -> list[Message]:
        """Return the chat of a cell; ValueError if the cell is not a list of messages."""
        value = self.rows[index].get(column)
        if not isinstance(value, list) or not value:
            raise self.error(index, column, "a list of messages", value)
        for i, message in enumerate(value):
            where = f"{column}[{i}]"
            if not isinstance(message, Mapping):
                raise self.error(index, where, "a dict with role and content", message)
            if message.get("role") not in ROLES:
                raise self.error(index, f"{where}.role", " | ".join(ROLES), message.get("role"))
            if not isinstance(message.get("content"), str):
                raise self.error(index, f"{where}.content", "a text", message.get("content"))
        return [{"role": m["role"], "content": m["content"]} for m in value]

    def turns(self, index: int, column: str, role: str) -> list[Message]:
        """Return a cell as messages: a text gets `role`, a chat must end with `role`."""
        value = self.rows[index].get(column)
        if role == "assistant" and isinstance(value, (int, float)):  # an answer such as 42
            value = json.dumps(value)
        if not isinstance(value, list):
            if not isinstance(value, str) or not value.strip():
                raise self.error(index, column, "a text or a list of messages", value)
            return [{"role": role, "content": value}]
        messages = self.messages(index, column)
        if messages[-1]["role"] != role or not messages[-1]["content"].strip():
            got = [m["role"] for m in messages]
            raise self.error(index, column, f"a text of the {role} as the last message", got)
        return messages

    def error(self, index: int, column: str, expected: str, got: Any) -> ValueError:
        """Return the error for a malformed cell."""
        return ValueError(
            f"{self.name}, row {index}, {column}: expected {expected}, got {got!r:.80} "
            f"({type(got).__name__}); correct or remove the row, or select another column "
            "with env.columns.question, env.columns.answer or env.columns.messages"
        )


def is_file(dataset: str) -> bool:
    """Return whether `dataset` names a file, existing or not, and not a hub id or a folder.

    >>> is_file("my.txt"), is_file("./rows"), is_file("org/v1.1"), is_file("org/name:part.a")
    (True, True, False, False)
    """
    path = Path(dataset).expanduser()
    if path.is_dir():
        return False
    is_path = _kind(path) in KINDS or not HUB_ID.fullmatch(dataset)
    return is_path or EXTENSION.search(dataset) is not None or path.is_file()


def load_table(dataset: str, *, split: str = "train") -> Table:
    """Load a data set. `split` is a split of the hub or of a folder; a file is always loaded whole.

    ValueError if the data set is missing, unreadable or empty.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "two.jsonl"
    >>> _ = path.write_text('{"question": "1+1", "answer": "2"}\\n{"question": "2+2"}\\n')
    >>> load_table(str(path)).columns
    ['question', 'answer']
    """
    import datasets  # takes a second
    import huggingface_hub

    datasets.disable_progress_bars()
    for logger in (datasets.logging, huggingface_hub.logging):
        logger.set_verbosity(logging.CRITICAL)
    path = Path(dataset).expanduser()
    _refuse_deep_rows(path.rglob("*") if path.is_dir() else map(Path, glob(str(path))))
    name, _, subset = (str(path), "", "") if path.is_dir() else dataset.partition(":")
    failures = (OSError, EOFError, ValueError, StopIteration, datasets.exceptions.DatasetsError)
    try:
        if is_file(dataset):
            data = _load_file(path)
        else:
            data = datasets.load_dataset(name, name=subset or None, split=split)
    except failures as error:
        reason = " ".join(str(error.__cause__ or error).split()) or "no data"
        raise ValueError(
            f"{dataset}{_broken_line(path)}: cannot be read: {reason:.300}; set "
            f"env.dataset=<a file ({', '.join(KINDS)}), a folder or a hub id>"
        ) from None
    if not len(data):
        raise ValueError(f"{dataset}: expected at least one row, got an empty data set")
    small = data.data.nbytes <= LARGE
    rows = data.to_list() if small else LazyRows(data.__getitem__, range(len(data)))
    return Table(dataset, data.column_names, rows)


def _kind(path: Path) -> str:
    """Return the suffix of a file name, without .gz."""
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()


def _load_file(path: Path) -> Any:
    """Load a file with `datasets`; in a .csv, numbers stay texts."""
    import datasets

    if (kind := _kind(path)) not in KINDS:
        raise ValueError(f"expected the extension {', '.join(KINDS)}, got {path.name}")
    options: dict[str, Any] = {"keep_default_na": False} if kind == ".csv" else {}
    if kind == ".csv":
        with _open(path) as file:
            header = enumerate(next(csv.reader(file), []))
        names = [name or f"Unnamed: {i}" for i, name in header]  # as in pandas
        options["features"] = datasets.Features({name: datasets.Value("string") for name in names})
    return datasets.load_dataset(KINDS[kind], data_files=str(path), split="train", **options)


def _refuse_deep_rows(files: Iterable[Path]) -> None:
    """Raise ValueError for a row nested so deeply that pyarrow's JSON reader would crash on it."""
    for file in files:
        if _kind(file) not in (".json", ".jsonl"):
            continue
        depth = 0
        with suppress(OSError, EOFError, zlib.error), _open(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                for bracket in re.findall(rb"[\[{\]}]", JSON_STRING.sub(b"", line)):
                    depth += 1 if bracket in b"[{" else -1
                    if depth > DEEPEST:
                        raise ValueError(
                            f"{file}, line {number}: expected at most {DEEPEST} levels of lists "
                            "and objects in a row, got more; correct or remove the row"
                        )


def _broken_line(path: Path) -> str:
    """Return ", line N" for the first unreadable line of a .jsonl file, else ""."""
    if _kind(path) != ".jsonl" or not path.is_file():
        return ""
    number = 0
    try:
        with _open(path) as file:
            for line in file:
                number += 1
                json.loads(line.strip() or "{}")
    except (ValueError, EOFError, OSError, zlib.error):
        return f", line {number}"
    return ""


def _open(path: Path, mode: str = "rt") -> IO[Any]:
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    text = {"encoding": "utf-8-sig", "newline": ""} if mode == "rt" else {}
    return opener(path, mode, **text)
