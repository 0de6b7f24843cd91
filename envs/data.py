"""Data sets for tasks: files and the hub, read into checked rows.

A data set is a path (.jsonl, .json, .csv, .parquet) or a hub id, "openai/gsm8k:main" with a subset.
Rows are checked when they are loaded: an error names row, column, what was expected and got.
Hub data goes to the `datasets` package's own cache in the user's home, never to the run folder.
"""

import csv
import io
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from envs.hub import read_hub

Message = dict[str, Any]

COLUMNS = {"messages": "messages", "question": "question", "answer": "answer"}
ROLES = ("system", "user", "assistant", "tool")
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:.*)?")  # org/name, name, either with a :subset
EXTENSION = re.compile(r"^[^:/]*\.[^:/]*$|\.[A-Za-z]{2,}$")  # any dot in a bare word, or .txt
EVAL_SHARE, EVAL_ROWS = 0.1, 200  # what is split off where there is no eval data, at most


@dataclass(frozen=True)
class Table:
    """A data set in memory: its name for errors, its column names, its rows."""

    name: str
    columns: list[str]
    rows: list[dict[str, Any]]

    def require(self, column: str) -> str:
        """Return the column's name; one line with the columns there are if it is missing."""
        if column not in self.columns:
            raise ValueError(
                f"{self.name}: expected a column {column!r}, got {', '.join(self.columns)}; name "
                "the right one in env.columns"
            )
        return column

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

    def error(self, index: int, column: str, expected: str, got: Any) -> ValueError:
        """Return the error for a malformed cell."""
        shown = repr(got)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return ValueError(
            f"{self.name}, row {index}, {column}: expected {expected}, got {shown} "
            f"({type(got).__name__}); correct or remove the row"
        )


def load_chats(
    dataset: str | None,
    *,
    eval_dataset: str | None = None,
    columns: Mapping[str, str | None] | None = None,
    split: str = "train",
    eval_split: str | None = None,
    seed: int = 0,
) -> dict[str, list[dict[str, Any]]]:
    """Return the checked "train" and "eval" rows of a data set.

    A row has "messages" (the prompt), "answer" (the last reply), "index", and "columns": all its
    cells by column name.

    A column `messages` is used where there is one, else `question` and `answer`; `columns` renames
    any of the three. Eval rows: `eval_dataset`, else `eval_split` of a hub data set, else a seeded
    tenth of the data (`split_off`); a file has no splits.
    """
    if not dataset:
        raise ValueError(
            f"env.dataset: expected a file ({', '.join(READERS)}) or a hub id, got none; give one "
            "with env.dataset=/path/to/it"
        )
    unknown = sorted(set(columns or {}) - set(COLUMNS))
    if unknown:
        raise ValueError(f"env.columns: expected keys among {sorted(COLUMNS)}, got {unknown}")
    names = {name: column for name, column in (columns or {}).items() if column is not None}
    train = _chats(load_table(dataset, split=split), names)
    if eval_dataset or (eval_split and not is_file(dataset)):
        table = load_table(eval_dataset or dataset, split=eval_split or split)
        return {"train": train, "eval": _chats(table, names)}
    kept, held_out = split_off([json.dumps(row["messages"]) for row in train], seed=seed)
    return {"train": [train[i] for i in kept], "eval": [train[i] for i in held_out]}


def _chats(table: Table, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return prompt and answer of each row of a table."""
    column = names.get("messages", COLUMNS["messages"])
    by_question = "question" in names or "answer" in names
    if "messages" in names or (column in table.columns and not by_question):
        table.require(column)
        return [_chat(table, index, column) for index in range(len(table.rows))]
    question, answer = (table.require(names.get(n, n)) for n in ("question", "answer"))
    return [
        {
            "index": index,
            "messages": [{"role": "user", "content": table.text(index, question)}],
            "answer": table.text(index, answer),
            "columns": table.rows[index],
        }
        for index in range(len(table.rows))
    ]


def _chat(table: Table, index: int, column: str) -> dict[str, Any]:
    messages = table.messages(index, column)
    last = messages[-1]
    if last["role"] != "assistant" or not last["content"].strip() or len(messages) < 2:
        expected = "a prompt and then a reply of the assistant as the last message"
        raise table.error(index, column, expected, [m["role"] for m in messages])
    return {
        "index": index,
        "messages": messages[:-1],
        "answer": last["content"],
        "columns": table.rows[index],
    }


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
    name, _, subset = dataset.partition(":")
    try:
        return read_hub(name, subset or None, split)
    except ValueError as error:
        raise ValueError(
            f"data set {dataset!r} (split {split!r}) not found: {error}; give a file "
            f"({', '.join(READERS)}) with env.dataset=/path/to/it"
        ) from None


def split_off(prompts: Sequence[str], *, seed: int = 0) -> tuple[list[int], list[int]]:
    """Return the indices of the train and of the eval rows, where no eval data is given.

    A tenth of the distinct prompts, at most 200, goes to eval; equal prompts stay together.

    >>> train, held_out = split_off(["a", "b", "a", "c"])
    >>> len({"abac"[i] for i in held_out}), sorted(train + held_out)
    (1, [0, 1, 2, 3])
    """
    distinct = list(dict.fromkeys(prompts))
    if len(distinct) < 2:
        raise ValueError(
            f"expected at least 2 different prompts to split eval rows off, got {len(distinct)}; "
            "give env.eval_dataset"
        )
    count = min(max(1, int(len(distinct) * EVAL_SHARE)), EVAL_ROWS)
    chosen = set(random.Random(seed).sample(distinct, count))
    train = [i for i, prompt in enumerate(prompts) if prompt not in chosen]
    return train, [i for i, prompt in enumerate(prompts) if prompt in chosen]
