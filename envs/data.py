"""Data sets: files and the hub, read into tables whose cells are checked when they are asked for.

A data set is a path (.jsonl, .json, .csv, .parquet) or a hub id, "openai/gsm8k:main" with a subset.
An error names row, column, what was expected and got. Chats are made of tables in chat_rows.py.
Hub data goes to the `datasets` package's own cache in the user's home, never to the run folder.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:.*)?")  # org/name, name, either with a :subset
EXTENSION = re.compile(r"^[^:/]*\.[^:/]*$|\.[A-Za-z]{2,}$")  # any dot in a bare word, or .txt


class Malformed(ValueError):
    """A cell that is not as expected; `fault` says so without the remedy."""

    def __init__(self, fault: str) -> None:
        super().__init__(f"{fault}; correct or remove the row")
        self.fault = fault


@dataclass(frozen=True)
class Table:
    """A data set in memory: its name for errors, its column names, its rows."""

    name: str
    columns: list[str]
    rows: list[dict[str, Any]]

    def require(self, key: str, column: str) -> str:
        """Return the column that env.columns.<key> names; one line with those there are without."""
        if column not in self.columns:
            raise ValueError(
                f"{self.name}: expected a column {column!r}, got {', '.join(self.columns)}; name "
                f"the right one: env.columns.{key}=<column>"
            )
        return column

    def each(self, read: Callable[[int], Any], remedy: str) -> list[Any]:
        """Return what `read` gives for each index; `remedy` is for a table without a good row."""
        good, bad = [], None
        for index in range(len(self.rows)):
            try:
                good.append(read(index))
            except Malformed as error:
                bad = bad or error
            if bad and good:
                raise bad
        if bad and len(self.rows) > 1:
            raise ValueError(f"{bad.fault}, and none of the {len(self.rows)} rows fits; {remedy}")
        if bad:
            raise bad
        return good

    def cells(self, index: int) -> dict[str, Any]:
        """Return a row with all columns of the table: None where it has no cell."""
        return {name: self.rows[index].get(name) for name in self.columns}

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
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def is_file(dataset: str) -> bool:
    """Return whether a data set is named as a file, not as a hub id or a folder.

    >>> is_file("my.txt"), is_file("./rows"), is_file("org/v1.1"), is_file("org/name:part.a")
    (True, True, False, False)
    """
    path = Path(dataset).expanduser()
    if path.is_dir():
        return False
    named = path.suffix.lower() in READERS or not HUB_ID.fullmatch(dataset)
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
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"{dataset}, row {index}: expected an object, got {row!r:.80}")
    if not rows:
        raise ValueError(f"{dataset}: expected at least one row, got an empty data set")
    return Table(dataset, list(dict.fromkeys(name for row in rows for name in row)), rows)


def _read_file(path: Path) -> list[Any]:
    if not path.is_file():
        raise ValueError(
            f"no data file {path} (looked in {Path.cwd()}); give the path of a "
            f"{', '.join(READERS)} file, or a hub id"
        )
    if path.suffix.lower() not in READERS:
        raise ValueError(f"{path}: expected a file named {', '.join(READERS)}, got {path.name}")
    try:
        return READERS[path.suffix.lower()](path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")  # -sig: Excel begins its files with a mark
    except UnicodeDecodeError as error:
        data, at = error.object, error.start
        line = data.count(b"\n", 0, at) + 1
        raise ValueError(
            f"{path}, line {line}: expected text in UTF-8, got the byte "
            f"{data[at]:#x}; save it as UTF-8"
        ) from None


def _read_json_lines(path: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{path}, line {number}: expected a JSON object, got {line[:60]!r} ({error})"
                ) from None
    return rows


def _read_json(path: Path) -> list[Any]:
    text = _read_text(path)
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a JSON list of objects ({error})") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a JSON list of objects, got {type(rows).__name__}")
    return rows


def _read_csv(path: Path) -> list[Any]:
    reader = csv.DictReader(io.StringIO(_read_text(path), newline=""), restkey="(too many cells)")
    try:
        return list(reader)
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {reader.line_num}: expected comma-separated cells, got an error "
            f"({error}); is a quote left open? Texts above 128 KiB need .jsonl"
        ) from None


def _read_parquet(path: Path) -> list[Any]:
    from pyarrow import ArrowException, parquet  # comes with datasets

    try:
        return parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"{path}: expected a parquet file ({reason})") from None


READERS: dict[str, Callable[[Path], list[Any]]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _read_hub(dataset: str, split: str) -> list[Any]:
    from envs.hub_rows import read_hub  # few runs read one

    name, _, subset = dataset.partition(":")
    try:
        return read_hub(name, subset or None, split)
    except ValueError as error:
        raise ValueError(
            f"data set {dataset!r} (split {split!r}) not found: {error}; give a file "
            f"({', '.join(READERS)}) with env.dataset=/path/to/it"
        ) from None
