"""Data sets: files and the hub, read into tables whose cells are checked when they are asked for.

A data set is a path (.jsonl, .json, .csv, each also with .gz, or .parquet), a folder of such files
or a hub id, "openai/gsm8k:main" with a subset. An error names row, column, what was expected and
got. Chats are made of tables in chat_rows.py.
Parquet files, folders and the hub are read by `datasets`. Texts are parsed here, for Arrow would
turn cells that look like dates or numbers into them; above `LARGE` bytes their rows go to the
memory-mapped cache of `datasets`, and a row is made when it is asked for.
"""

import csv
import gzip
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:.*)?")  # org/name, name, either with a :subset
HALF = re.compile("[\ud800-\udfff]")
LARGE = 32 << 20  # bytes of a data set; smaller ones are held in memory
EXTENSION = re.compile(r"^[^:/]*\.[^:/]*$|\.[A-Za-z]{2,}$")  # any dot in a bare word, or .txt
KINDS = (".jsonl", ".json", ".csv", ".parquet")


class Malformed(ValueError):
    """A cell of a column that is not as expected."""

    def __init__(self, fault: str, column: str) -> None:
        super().__init__(f"{fault}; correct or remove the row")
        self.fault, self.column = fault, column


class LazyRows(Sequence[Any]):
    """What `make` gives for each of `items`, made when it is asked for.

    >>> LazyRows(str, range(3))[1:][0]
    '1'
    """

    columns: Sequence[str] = ()  # of a table's rows

    def __init__(
        self, make: Callable[[Any], Any], items: Sequence[Any], *, listed: bool = True
    ) -> None:
        self.make, self.items = make, items
        self.listed = listed  # whether all of them may be looked at before a run

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return LazyRows(self.make, self.items[index], listed=self.listed)
        return self.make(self.items[index])


def map_rows(make: Callable[[Any], Any], items: Sequence[Any]) -> Sequence[Any]:
    """Return what `make` gives for each item: a list of a list, else made when asked for."""
    return [make(item) for item in items] if isinstance(items, list) else LazyRows(make, items)


@dataclass(frozen=True)
class Table:
    """A data set: its name for errors, its column names, its rows, a list or on disk."""

    name: str
    columns: list[str]
    rows: Sequence[dict[str, Any]]

    def require(self, key: str, column: str, hint: str = "") -> str:
        """Return the column that env.columns.<key> names; one line with those there are without."""
        if column not in self.columns:
            if len(self.columns) == 1 and ";" in self.columns[0]:
                hint += "; or save it with commas, its cells are separated by ';'"
            raise ValueError(
                f"{self.name}: expected a column {column!r}, got {', '.join(self.columns)}; name "
                f"the right one: env.columns.{key}=<column>{hint}"
            )
        return column

    def each(
        self, read: Callable[[int], dict[str, Any]], remedies: Mapping[str, str]
    ) -> Sequence[dict[str, Any]]:
        """Return what `read` gives for each index; all are read now, and checked by that.

        `remedies`, by column, are for a table without a good row.
        """
        rows, good, bad = [], 0, None
        for index in range(len(self.rows)):
            try:
                row = read(index)
                good += 1
                if isinstance(self.rows, list):
                    rows.append(row)
            except Malformed as error:
                bad = bad or error
            if bad and good:
                raise bad
        if bad and len(self.rows) > 1:
            fault = f"{bad.fault}, and none of the {len(self.rows)} rows fits"
            raise ValueError(f"{fault}; {remedies[bad.column]}")
        if bad:
            raise bad
        return rows if isinstance(self.rows, list) else LazyRows(read, range(len(self.rows)))

    def cells(self, index: int) -> dict[str, Any]:
        """Return a row with all columns of the table: None where it has no cell."""
        row = self.rows[index]
        return {name: row.get(name) for name in self.columns}

    def text(self, index: int, column: str) -> str:
        """Return a cell that has to be a text with something in it."""
        value = self.rows[index].get(column)
        if not is_text(value) or not value.strip():
            raise self.error(index, column, "a text", value)
        return value

    def messages(self, index: int, column: str) -> list[Message]:
        """Return a cell that has to be a chat: dicts with a known role and a text, some user's."""
        value = self.rows[index].get(column)
        if not isinstance(value, list) or not value:
            raise self.error(index, column, "a list of messages", value)
        for place, message in enumerate(value):
            where = f"{column}[{place}]"
            if not isinstance(message, Mapping):
                raise self.error(index, where, "a dict with role and content", message)
            if message.get("role") not in ROLES:
                raise self.error(index, f"{where}.role", " | ".join(ROLES), message.get("role"))
            if not is_text(message.get("content")):
                raise self.error(index, f"{where}.content", "a text", message.get("content"))
        return [{"role": m["role"], "content": m["content"]} for m in value]

    def turns(self, index: int, column: str, role: str) -> list[Message]:
        """Return a cell that has to be a text of `role`, or messages of which it says the last."""
        value = self.rows[index].get(column)
        if role == "assistant" and isinstance(value, (int, float)):  # an answer, as in a .csv
            value = json.dumps(value)
        if not isinstance(value, list):
            if not is_text(value) or not value.strip():
                raise self.error(index, column, "a text or a list of messages", value)
            return [{"role": role, "content": value}]
        messages = self.messages(index, column)
        if messages[-1]["role"] != role or not messages[-1]["content"].strip():
            got = [m["role"] for m in messages]
            raise self.error(index, column, f"a text of the {role} as the last message", got)
        return messages

    def error(self, index: int, column: str, expected: str, got: Any) -> Malformed:
        """Return the error for a malformed cell."""
        shown = repr(got)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        place = f"{self.name}, row {index}, {column}"
        fault = f"{place}: expected {expected}, got {shown} ({type(got).__name__})"
        return Malformed(fault, column.partition("[")[0])


def is_text(value: Any) -> TypeGuard[str]:
    """Return whether a value is a text that UTF-8 can hold: half an emoji breaks tokenizers."""
    return isinstance(value, str) and (value.isascii() or not HALF.search(value))


def is_file(dataset: str) -> bool:
    """Return whether a data set is named as a file, not as a hub id or a folder.

    >>> is_file("my.txt"), is_file("./rows"), is_file("org/v1.1"), is_file("org/name:part.a")
    (True, True, False, False)
    """
    path = Path(dataset).expanduser()
    if path.is_dir():
        return False
    named = _kind(path) in KINDS or not HUB_ID.fullmatch(dataset)
    return named or EXTENSION.search(dataset) is not None or path.is_file()


def load_table(dataset: str, *, split: str = "train") -> Table:
    """Return a data set; `split` counts for the hub and folders, a file is one split.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "two.jsonl"
    >>> _ = path.write_text('{"question": "1+1", "answer": "2"}\\n{"question": "2+2"}\\n')
    >>> load_table(str(path)).columns
    ['question', 'answer']
    """
    path = Path(dataset).expanduser()
    rows = _read_file(path) if is_file(dataset) else _read_hub(dataset, split)
    if not len(rows):
        raise ValueError(f"{dataset}: expected at least one row, got an empty data set")
    columns = getattr(rows, "columns", None) or list(dict.fromkeys(n for row in rows for n in row))
    return Table(dataset, columns, rows)


def _read_file(path: Path) -> Sequence[dict[str, Any]]:
    if not path.is_file():
        if set(path.name) & set("*?["):
            raise ValueError(
                f"{path}: expected one file, got a pattern; join them (cat {path} > all"
                f"{path.suffix}), or give a folder that has nothing else: env.dataset={path.parent}"
            )
        raise ValueError(
            f"no data file {path} (looked in {Path.cwd()}); give the path of a "
            f"{', '.join(KINDS)} file, or a hub id"
        )
    if (kind := _kind(path)) not in KINDS:
        raise ValueError(f"{path}: expected a file named {', '.join(KINDS)}, got {path.name}")
    try:
        if kind == ".parquet":
            return _read_parquet(path)
        if path.stat().st_size <= LARGE:
            return list(_text_rows(path))
        return _mapped_rows(path)
    except (EOFError, zlib.error) as error:
        raise ValueError(f"{path}: expected a whole .gz file ({error}); pack it again") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None


def _kind(path: Path) -> str:
    """Return how the name of a file ends, without the .gz of a packed text."""
    kind, packed = path.suffix.lower(), Path(path.stem).suffix.lower()
    return packed if kind == ".gz" and packed != ".parquet" else kind


def _text_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a text file, each of which has to be an object."""
    read = {".jsonl": _json_lines, ".json": _json_list, ".csv": _csv_rows}[_kind(path)]
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
        try:
            for index, row in enumerate(read(path, file)):
                if not isinstance(row, dict):
                    raise ValueError(f"{path}, row {index}: expected an object, got {row!r:.80}")
                yield row
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: expected text in UTF-8 ({error}); save it as such") from None


def _json_lines(path: Path, file: Any) -> Iterator[Any]:
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(
                    f"{path}, line {number}: expected a JSON object, got {line[:60]!r} ({error})"
                ) from None


def _json_list(path: Path, file: Any) -> list[Any]:
    try:
        rows = json.load(file)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: expected a JSON list of objects ({error})") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a JSON list of objects, got {type(rows).__name__}")
    return rows


def _csv_rows(path: Path, file: Any) -> Iterator[Any]:
    reader = csv.reader(file)
    try:
        header = next(reader, [])
        for cells in reader:
            if any(cells[len(header) :]):
                raise ValueError(
                    f"{path}, line {reader.line_num}: expected {len(header)} cells, got "
                    f"{len(cells)}; put quotes around a cell with a comma in it"
                )
            if cells:
                missing = [None] * (len(header) - len(cells))
                yield dict(zip(header, [*cells, *missing], strict=False))
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {reader.line_num}: expected comma-separated cells ({error}); is a quote "
            "left open? Texts above 128 KiB need .jsonl"
        ) from None


def _mapped_rows(path: Path) -> LazyRows:
    """Return the rows of a large text file from the memory-mapped cache of `datasets`.

    A row is kept as its JSON, so that its cells stay what they are.
    """
    datasets, stat = _quiet_datasets(), path.stat()
    content = {"path": path.resolve(), "size": stat.st_size, "changed": stat.st_mtime_ns}
    try:
        found = datasets.Dataset.from_generator(
            _as_json,
            datasets.Features(dict.fromkeys(("keys", "row"), datasets.Value("string"))),
            gen_kwargs=content,
        )
    except datasets.exceptions.DatasetGenerationError as error:
        raise (error.__cause__ or error) from None
    texts: Any = found.data.column("row")
    rows = LazyRows(lambda i: json.loads(texts[i].as_py()), range(len(found)))
    keys = [json.loads(names) for names in found.unique("keys")]
    rows.columns = list(dict.fromkeys(name for names in keys for name in names))
    return rows


def _as_json(path: Path, **content: int) -> Iterator[dict[str, str]]:
    for row in _text_rows(path):
        yield {"keys": json.dumps(list(row)), "row": json.dumps(row)}


def _read_parquet(path: Path) -> Sequence[dict[str, Any]]:
    try:
        return _load("parquet", split="train", data_files=str(path))
    except ValueError as error:
        raise ValueError(f"{path}: expected a parquet file ({error})") from None


def _read_hub(dataset: str, split: str) -> Sequence[dict[str, Any]]:
    name, _, subset = dataset.partition(":")
    if local := (folder := Path(dataset).expanduser()).is_dir():
        name, subset = str(folder), ""
    try:
        return _load(name, split=split, name=subset or None)
    except ValueError as error:
        what = "cannot be read as a folder of data files" if local else "not found"
        raise ValueError(
            f"data set {dataset!r} (split {split!r}) {what}: {error}; give a file "
            f"({', '.join(KINDS)}) with env.dataset=/path/to/it"
        ) from None


def _load(path: str, **arguments: Any) -> Sequence[dict[str, Any]]:
    """Return what `datasets.load_dataset` finds: its rows, made on demand if they are many."""
    datasets = _quiet_datasets()
    try:
        found = datasets.load_dataset(path, **arguments)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(reason if len(reason) <= 300 else f"{reason[:297]}...") from None
    if found.data.nbytes <= LARGE:
        return found.to_list()
    rows = LazyRows(found.__getitem__, range(len(found)))
    rows.columns = found.column_names
    return rows


def _quiet_datasets() -> Any:
    """Return `datasets`, whose messages and bars are not for a run's output."""
    import datasets  # a second, and most data sets are small texts
    import huggingface_hub

    datasets.disable_progress_bars()
    for logger in (datasets.logging, huggingface_hub.logging):
        logger.set_verbosity(logging.CRITICAL)
    return datasets
