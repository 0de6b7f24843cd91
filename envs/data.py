"""Data sets: files and the hub, read into tables whose cells are checked when they are asked for.

A data set is a path (.jsonl, .json, .csv, each also with .gz, or .parquet), a folder of such files,
which the `datasets` package reads, or a hub id, "openai/gsm8k:main" with a subset.
An error names row, column, what was expected and got. Chats are made of tables in chat_rows.py.
Hub data goes to the `datasets` package's own cache in the user's home, never to the run folder.
What is larger than `LARGE` stays on disk (mapped_rows.py): a row is made when it is asked for.
"""

import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TypeGuard

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:.*)?")  # org/name, name, either with a :subset
HALF = re.compile("[\ud800-\udfff]")
LARGE = 32 << 20  # bytes of a data set; smaller ones are held in memory
EXTENSION = re.compile(r"^[^:/]*\.[^:/]*$|\.[A-Za-z]{2,}$")  # any dot in a bare word, or .txt


class Malformed(ValueError):
    """A cell that is not as expected; `fault` says so without the remedy."""

    def __init__(self, fault: str) -> None:
        super().__init__(f"{fault}; correct or remove the row")
        self.fault = fault


class Made(Sequence[Any]):
    """What `make` gives for each of `items`, made when it is asked for.

    `origin` says in JSON what they are made of: equal ones are the same rows, on any day.

    >>> Made(str, range(3))[1:][0]
    '1'
    """

    listed = True  # all of them may be looked at before a run

    def __init__(
        self, make: Callable[[Any], Any], items: Sequence[Any], origin: Any = None
    ) -> None:
        self.make, self.items, self.origin = make, items, origin

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return Made(self.make, self.items[index])
        return self.make(self.items[index])


def made(make: Callable[[Any], Any], items: Sequence[Any], *, origin: Any = None) -> Sequence[Any]:
    """Return what `make` gives for each item: a list of a list, else made when asked for."""
    return [make(item) for item in items] if isinstance(items, list) else Made(make, items, origin)


@dataclass(frozen=True)
class Table:
    """A data set: its name for errors, its column names, its rows, a list or on disk."""

    name: str
    columns: list[str]
    rows: Sequence[dict[str, Any]]

    @property
    def places(self) -> Sequence[int]:
        """Return the index of each row, a list where the rows are one."""
        size = len(self.rows)
        return list(range(size)) if isinstance(self.rows, list) else range(size)

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
        self, read: Callable[[int], Any], remedy: str, *, checked: bool = False
    ) -> Sequence[Any]:
        """Return what `read` gives for each index; `remedy` is for a table without a good row.

        Rows on disk that were `checked` before are not read now.
        """
        kept, good, bad, places = [], 0, None, self.places
        if not isinstance(self.rows, list):
            if checked:
                return Made(read, places)
            from envs.mapped_rows import shown

            kept, places = None, shown(places, f"checking {self.name}")
        for index in places:
            try:
                value = read(index)
                good += 1
                if kept is not None:
                    kept.append(value)
            except Malformed as error:
                bad = bad or error
            if bad and good:
                raise bad
        if bad and len(self.rows) > 1:
            raise ValueError(f"{bad.fault}, and none of the {len(self.rows)} rows fits; {remedy}")
        if bad:
            raise bad
        return Made(read, self.places) if kept is None else kept

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
        return Malformed(f"{place}: expected {expected}, got {shown} ({type(got).__name__})")


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
    named = _kind(path) in READERS or not HUB_ID.fullmatch(dataset)
    return named or EXTENSION.search(dataset) is not None or path.is_file()


def load_table(dataset: str, *, split: str = "train") -> Table:
    """Return a data set; `split` counts for the hub only, a file is one split.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "two.jsonl"
    >>> _ = path.write_text('{"question": "1+1", "answer": "2"}\\n{"question": "2+2"}\\n')
    >>> load_table(str(path)).columns
    ['question', 'answer']
    """
    path = Path(dataset).expanduser()
    rows = _read_file(path) if is_file(dataset) else _read_hub(dataset, split)
    if not rows:
        raise ValueError(f"{dataset}: expected at least one row, got an empty data set")
    columns = getattr(rows, "columns", None) or names_of(rows)
    return Table(dataset, columns, rows)


def names_of(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return the columns that any row has, in the order of their first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def _read_file(path: Path) -> Sequence[dict[str, Any]]:
    if not path.is_file():
        if set(path.name) & set("*?["):
            raise ValueError(
                f"{path}: expected one file, got a pattern; join them (cat {path} > all"
                f"{path.suffix}), or give a folder that has nothing else: env.dataset={path.parent}"
            )
        raise ValueError(
            f"no data file {path} (looked in {Path.cwd()}); give the path of a "
            f"{', '.join(READERS)} file, or a hub id"
        )
    if (kind := _kind(path)) not in READERS:
        raise ValueError(f"{path}: expected a file named {', '.join(READERS)}, got {path.name}")
    try:
        if kind == ".parquet":
            return _read_parquet(path)
        if path.stat().st_size <= LARGE:
            return list(_objects(path))
        from envs.mapped_rows import map_text  # few runs have one

        return map_text(path, _objects)
    except (EOFError, zlib.error) as error:
        raise ValueError(f"{path}: expected a whole .gz file ({error}); pack it again") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None


def _kind(path: Path) -> str:
    """Return how the name of a file ends, without the .gz of a packed text."""
    kind, packed = path.suffix.lower(), Path(path.stem).suffix.lower()
    return packed if kind == ".gz" and packed != ".parquet" else kind


def _open(path: Path) -> Any:
    """Return a file opened for its bytes, unpacked where its name ends in .gz."""
    return gzip.open(path) if path.suffix.lower() == ".gz" else open(path, "rb")


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a text file, each of which has to be an object."""
    for index, row in enumerate(READERS[_kind(path)](path)):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, row {index}: expected an object, got {row!r:.80}")
        yield row


def _text_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file, each with its end; the mark of Excel is left out."""
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: expected text in UTF-8, got the byte "
                    f"{error.object[error.start]:#x}; save it as UTF-8"
                ) from None


def _read_json_lines(path: Path) -> Iterator[Any]:
    decode = json.JSONDecoder(object_pairs_hook=_object).decode
    for number, line in enumerate(_text_lines(path), 1):
        if line.strip():
            try:
                yield decode(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{path}, line {number}: expected a JSON object, got {line[:60]!r} ({error})"
                ) from None


def _read_json(path: Path) -> list[Any]:
    text = "".join(_text_lines(path))
    try:
        rows = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a JSON list of objects ({error})") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a JSON list of objects, got {type(rows).__name__}")
    return rows


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; the last of two equal keys would win without a word."""
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError(f"expected each key once, got {_twice([key for key, _ in pairs])!r} twice")
    return out


def _twice(names: Sequence[str]) -> str | None:
    """Return a name that is there twice."""
    return next((name for i, name in enumerate(names) if name in names[:i]), None)


def _read_csv(path: Path) -> Iterator[Any]:
    with TextIOWrapper(_open(path), encoding="utf-8-sig", newline="") as file:
        try:
            yield from _csv_rows(path, csv.reader(file))
        except UnicodeDecodeError:
            for _ in _text_lines(path):  # which says where
                pass
            raise


def _csv_rows(path: Path, reader: Any) -> Iterator[Any]:
    try:
        header = next(reader, [])
        if (name := _twice([name for name in header if name])) is not None:
            raise ValueError(f"{path}: expected each column once, got {name!r} twice; rename one")
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
            f"{path}, line {reader.line_num}: expected comma-separated cells, got an error "
            f"({error}); is a quote left open? Texts above 128 KiB need .jsonl"
        ) from None


def _read_parquet(path: Path) -> Sequence[dict[str, Any]]:
    from pyarrow import ArrowException, parquet  # comes with datasets

    try:
        if path.stat().st_size > LARGE:
            from envs.mapped_rows import map_parquet

            return map_parquet(path)
        return parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"{path}: expected a parquet file ({reason})") from None


READERS: dict[str, Callable[[Path], Iterable[Any]]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _read_hub(dataset: str, split: str) -> Sequence[dict[str, Any]]:
    from envs.hub_rows import read_hub  # few runs read one

    name, _, subset = dataset.partition(":")
    if local := (folder := Path(dataset).expanduser()).is_dir():
        name, subset = str(folder), ""
    try:
        return read_hub(name, subset or None, split, large=LARGE)
    except ValueError as error:
        what = "cannot be read as a folder of data files" if local else "not found"
        raise ValueError(
            f"data set {dataset!r} (split {split!r}) {what}: {error}; give a file "
            f"({', '.join(READERS)}) with env.dataset=/path/to/it"
        ) from None
