"""Load the chats of a data set: prompts, right responses, and the held-out rows.

envs/shapes.py finds the columns, envs/chat_cells.py parses the messages.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

from envs.chat_cells import Cells, is_empty, role_and_text
from envs.data import KINDS, LazyRows, Message, Row, Table, cell_of, is_file, load_table
from envs.shapes import SYSTEM, BadCell, Shape, find_shape

LABELS = ("label", "kto_tag")  # KTO: false for a response to avoid
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
EVAL_SHARE, EVAL_ROWS = 0.1, 200  # size of the split without eval data, at most


@dataclass
class Origin:
    """The shapes of a data set's rows, and what of them is in no chat."""

    shapes: dict[tuple[str, ...], int] = field(default_factory=dict)  # rows by name and columns
    unused: dict[str, None] = field(default_factory=dict)  # columns, and keys of messages
    left_out: int = 0  # rows

    @property
    def why(self) -> str:
        """Return why rows are left out."""
        reasons = "a label of false, or a pair with equal or empty responses or two prompts"
        return f"left out {self.left_out:,} rows ({reasons})"

    def describe(self, readers: str = "") -> str:
        """Return one line; `readers`: who reads the unused columns."""
        parts = [", ".join(map(_count, self.shapes, self.shapes.values()))]
        if self.left_out:
            parts.append(self.why)
        if self.unused:
            parts.append(f"columns not used{readers}: {', '.join(self.unused)}")
        return f"data: {'; '.join(parts)}"


def _count(shape: tuple[str, ...], count: int) -> str:
    name, *columns = shape
    return f"{count:,} {'row' if count == 1 else 'rows'} of {name} ({', '.join(columns)})"


def load_chats(
    dataset: str | Sequence[str] | None,
    *,
    eval_dataset: str | Sequence[str] | None = None,
    columns: Mapping[str, str | None] | None = None,
    split: str = "train",
    eval_split: str | None = None,
    seed: int = 0,
    answers: bool = True,
    rejected: bool = False,
    chats_first: bool = True,
) -> dict[str, Sequence[Row]]:
    """Return the checked "train" and "eval" rows of a data set, or of several in their order.

    A row has "messages" (the prompt), "response" (the message after it), "answer" (its text),
    "index", "columns": all its cells by column name, None where the file has none, and "origin", an
    `Origin`. If there are any: "question" (the cell of the prompt), "tools", and "unlearnt": the
    indices of messages with a weight of 0.

    `columns` names the column "messages" (whole chats), or "question" and "answer"; without it the
    shape is found (`find_shape`, which takes `chats_first`). Without `answers` an answer is read
    only if `columns` names it. `rejected`: rows also have the response of the column "rejected";
    pairs with equal or empty responses are left out. Eval rows: `eval_dataset`, else `eval_split`
    of a hub data set, else a seeded tenth of the data (`split_off`); a file has no splits.
    """
    names = {name: column for name, column in (columns or {}).items() if column is not None}
    options = {"answers": answers, "rejected": rejected, "chats_first": chats_first}
    read = partial(_read, names=names, options=options)
    sets, held_out = _listed(dataset), _listed(eval_dataset)
    if not sets:
        raise ValueError(
            f"env.dataset: expected a file ({', '.join(KINDS)}) or a hub id, got none; give one "
            "with env.dataset=/path/to/it"
        )
    if split != "train" and any(map(is_file, sets)):
        remedy = "give the file of that split as env.dataset, without env.split"
        raise ValueError(f"env.split={split}: expected a hub data set, got a file; {remedy}")
    if not held_out and eval_split:
        held_out = [name for name in sets if not is_file(name)]
    rows, keys = read(sets, split)
    if held_out:
        return {"train": rows, "eval": read(held_out, eval_split or split)[0]}
    parts = split_off(keys, seed=seed)
    listed = isinstance(rows, list)
    splits = ([rows[i] for i in p] if listed else LazyRows(rows.__getitem__, p) for p in parts)
    return dict(zip(("train", "eval"), splits, strict=True))


def _listed(dataset: str | Sequence[str] | None) -> list[str]:
    names = [dataset] if isinstance(dataset, str) else [*(dataset or [])]
    return [str(name) for name in names]


def _read(
    sets: Sequence[str], split: str, *, names: Mapping[str, str], options: Mapping[str, bool]
) -> tuple[Sequence[Row], list[bytes]]:
    """Return the rows of data sets, and a key of each row's prompt, equal for equal prompts.

    Rows made on access are checked now and made again. `options` are those of `find_shape`.
    """
    origin, keys = Origin(), list[bytes]()
    parts: list[Sequence[Row]] = []
    for name in sets:
        table = load_table(name, split=split)
        shape = find_shape(table, names, **options)
        make = _Rows(table, shape, origin, rejected=options["rejected"], several=len(sets) > 1)
        listed, indices = list[Row](), list[int]()
        for index in range(len(table.rows)):
            row = make(index)
            if row is None:
                origin.left_out += 1
                continue
            indices.append(index)
            keys.append(_digest(json.dumps(row["messages"])))
            if isinstance(table.rows, list):
                listed.append(row)
        if not indices:
            raise ValueError(f"{name}: expected at least one row that is kept, {origin.why}")
        label = (shape.name, *make.columns)
        origin.shapes[label] = origin.shapes.get(label, 0) + len(indices)
        parts.append(listed or LazyRows(make, indices))
    return _joined(parts), keys


def _joined(parts: list[Sequence[Row]]) -> Sequence[Row]:
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, list) for part in parts):
        return [row for part in parts for row in part]
    places = [(part, index) for part in parts for index in range(len(part))]
    return LazyRows(lambda place: place[0][place[1]], places)


class _Rows:
    """Make the rows of a table in a shape; None for a row that is left out (`Origin.why`)."""

    def __init__(
        self, table: Table, shape: Shape, origin: Origin, *, rejected: bool, several: bool
    ) -> None:
        self.table, self.shape, self.origin = table, shape, origin
        self.rejected, self.several = rejected, several
        self.cells = Cells(table, origin.unused, pairs=rejected)
        self.columns = [*shape.reads(table), *(["rejected"] if rejected else [])]
        self.system = [name for name in SYSTEM if name in self.columns]
        self.media = [name for name in MEDIA if name in table.columns]
        first = table.rows[0]
        self.labels = [name for name in LABELS if isinstance(first.get(name), bool)]
        read = {name.partition(".")[0] for name in self.columns}
        read |= {*self.columns, *self.labels, "tools"}
        origin.unused.update((name, None) for name in table.columns if name not in read)

    def __call__(self, index: int) -> Row | None:
        """Return a row; ValueError with its index and column if it is malformed."""
        cells = self.table.rows[index]
        for name in self.media:
            if cells.get(name):
                raise self.table.error(index, name, "a row of text alone", cells[name])
        if any(cells.get(name) is False for name in self.labels):
            return None
        try:
            row = self.shape.convert(cells) if self.shape.convert else cells
        except BadCell as fault:
            raise self.table.error(index, *fault.args) from None
        out: Row = {"index": index, "columns": cells, "origin": self.origin}
        if self.several:
            out["index"] = f"{index} of {self.table.name}"
        if self.shape.prompt is not None:
            out["question"] = cell_of(row, self.shape.prompt)
        chat = self._chat(index, row, self.shape.response)
        if self.rejected:
            worse = self._chat(index, row, "rejected")
            if [*map(role_and_text, chat[:-1])] != [*map(role_and_text, worse[:-1])]:
                return None
            last = {str(self.shape.response): chat[-1], "rejected": worse[-1]}
            texts = [role_and_text(message) for message in last.values()]
            if texts[0] == texts[1] or any(map(is_empty, last.values())):
                return None
            for column, message in last.items():
                if more := message.keys() - {"role", "content", "weight", "name"}:
                    expected = f"a response of text alone, without {', '.join(sorted(more))}"
                    raise self.table.error(index, column, expected, message)
            out["rejected"] = worse[-1]["content"]
        self._add_system(index, row, chat)
        if off := [place for place, message in enumerate(chat) if "weight" in message]:
            out["unlearnt"] = off
            for place in off:
                del chat[place]["weight"]
        if row.get("tools"):
            self._add_tools(index, row, chat, out)
        if self.shape.response is not None:
            out["response"] = chat.pop()
            out["answer"] = out["response"]["content"]
        return out | {"messages": chat}

    def _chat(self, index: int, row: Row, response: str | None) -> list[Message]:
        """Return the prompt of a row, with a response if its column is given."""
        cells, prompt = self.cells, self.shape.prompt
        if prompt is None:
            assert response is not None
            return cells.chat(index, response, cell_of(row, response))
        messages = cells.prompt(index, prompt, cell_of(row, prompt))
        for message in messages:
            if message["role"] == "assistant":
                message["weight"] = 0  # a prompt is context
        if response is None:
            return messages
        return cells.response(index, response, cell_of(row, response), prompt=messages)

    def _add_system(self, index: int, row: Row, chat: list[Message]) -> None:
        """Insert the text of a system column, unless the chat has a system message."""
        for name in self.system:
            text = row[name]
            if text and not isinstance(text, str):
                raise self.table.error(index, name, "a text", text)
            if text and chat[0]["role"] != "system":
                chat.insert(0, {"role": "system", "content": text})

    def _add_tools(self, index: int, row: Row, chat: list[Message], out: Row) -> None:
        """Add the schemas of a row's tools, unless its system message has them (as in Hermes)."""
        tools = self.cells.tools(index, row["tools"])
        if tools and not (chat[0]["role"] == "system" and "<tools>" in chat[0]["content"]):
            out["tools"] = tools


def _digest(prompt: str) -> bytes:
    return blake2b(prompt.encode(), digest_size=8).digest()


def split_off(keys: Sequence[Any], *, seed: int = 0) -> tuple[list[int], list[int]]:
    """Return the indices of train and eval rows for data without an eval split.

    A tenth of the distinct keys of prompts, at most 200, goes to eval; equal ones stay together.

    >>> train, held_out = split_off(["a", "b", "a", "c"])
    >>> len({"abac"[i] for i in held_out}), sorted([*train, *held_out])
    (1, [0, 1, 2, 3])
    """
    distinct = list(dict.fromkeys(keys))
    if len(distinct) < 2:
        raise ValueError(
            f"expected at least 2 different prompts to split eval rows off, got {len(distinct)}; "
            "give env.eval_dataset"
        )
    count = min(max(1, int(len(distinct) * EVAL_SHARE)), EVAL_ROWS)
    chosen = set(random.Random(seed).sample(distinct, count))
    train, held_out = list[int](), list[int]()
    for index, key in enumerate(keys):
        (held_out if key in chosen else train).append(index)
    return train, held_out
