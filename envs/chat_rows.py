"""Load the chats of a data set: prompts, right responses, and the held-out rows.

envs/shapes.py finds the columns, envs/chat_cells.py parses the messages.
"""

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from string import ascii_uppercase
from typing import Any

from envs.answers.choices import read_options, right_letter
from envs.chat_cells import Cells, is_empty, role_and_text
from envs.data import KINDS, Table, cell_of, load_table
from envs.row_parts import NAMED, PARTS, UnreadColumn, find_parts, texts_of
from envs.rows import LazyRows, Message, Row, is_file
from envs.shapes import Shape, find_shape

LABELS = ("label", "kto_tag", "is_correct", "helpfulness")  # false marks a response to avoid
LABELS += ("correct", "desirable", "accepted")
TRUTHS = {"true": True, "1": True, "1.0": True, "yes": True, "good": True, "desirable": True}
TRUTHS |= dict.fromkeys(("false", "0", "0.0", "-1", "no", "bad", "undesirable"), False)
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
EVAL_SHARE, EVAL_ROWS = 0.1, 200  # share of held-out prompts, and their largest number


@dataclass
class Origin:
    """The shapes of a data set's rows, and the columns and keys that no chat uses."""

    shapes: dict[tuple[str, ...], int] = field(default_factory=dict)  # name, columns -> rows
    unused: dict[str, None] = field(default_factory=dict)  # columns, and keys of messages
    left_out: int = 0  # number of rows
    bad: list[str] = field(default_factory=list)  # the faults of rows that cannot be read

    @property
    def why(self) -> str:
        """Return why rows are left out."""
        reasons = "a label of false, or a pair with equal or empty responses or two prompts"
        return f"left out {self.left_out:,} rows ({reasons})"

    def describe(self, readers: str = "") -> str:
        """Return one line; `readers`: the parts that read the unused columns."""
        parts = [", ".join(map(_count, self.shapes, self.shapes.values()))]
        if self.left_out:
            parts.append(self.why)
        if self.bad:
            first = self.bad[0].partition("; correct")[0]
            parts.append(f"bad rows left out: {len(self.bad):,}, the first: {first}")
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
    prepare: Callable[[Row], Row] | None = None,
    skip_bad_rows: bool = False,
) -> dict[str, Sequence[Row]]:
    """Return the checked "train" and "eval" rows of a data set, or of several in their order.

    A row has "messages" (the prompt), "answer" (text of the right answer), "index", "columns" (all
    cells by column name, None for missing ones) and "origin", an `Origin`. If the data has them:
    "response" (the message to learn), "answers" (several right texts), "options" (letter -> text;
    the answer is a letter), "question" (the cell of the prompt), "tools", "chat_template_kwargs",
    and "unlearnt" (indices of messages with weight 0).

    `columns` names the column "messages" (whole chats), or "question" and "answer"; without it the
    shape is found (`find_shape`, which takes `chats_first`). It also names the columns of other
    parts (envs/row_parts.py); a column with None is ignored. Without `answers` an answer is read
    only if `columns` names it. `rejected`: rows also have the response of the column "rejected";
    pairs with equal or empty responses are left out. `prepare` completes a row. `skip_bad_rows`
    leaves out rows that cannot be read or prepared. Eval rows: `eval_dataset`, else `eval_split` of
    a hub data set, else a seeded tenth of the data (`split_off`); a file has no splits.
    """
    columns = dict(_flat(columns or {}))
    for name, column in columns.items():
        if column and name not in (*NAMED, *PARTS):
            known = ", ".join((*NAMED, *PARTS))
            raise ValueError(f"env.columns.{name}={column}: expected one of {known}, or null")
    reading = _Reading(columns, answers, rejected, chats_first, prepare, skip_bad_rows)
    read = partial(_read, reading=reading)
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
        key = "env.eval_dataset" if eval_dataset else "env.dataset"
        return {"train": rows, "eval": read(held_out, eval_split or split, key=key)[0]}
    parts = split_off(keys, seed=seed)
    listed = isinstance(rows, list)
    splits = ([rows[i] for i in p] if listed else LazyRows(rows.__getitem__, p) for p in parts)
    return dict(zip(("train", "eval"), splits, strict=True))


def _flat(columns: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str | None]]:
    """Yield (part or column, column or None); a dot in a name is a level in YAML."""
    for name, column in columns.items():
        if isinstance(column, Mapping):
            yield from _flat(column, f"{prefix}{name}.")
        elif column is not None or prefix + name not in NAMED:
            yield prefix + name, column


def _listed(dataset: str | Sequence[str] | None) -> list[str]:
    names = [dataset] if isinstance(dataset, str) else [*(dataset or [])]
    return [str(name) for name in names]


@dataclass(frozen=True)
class _Reading:
    """The arguments of `load_chats` for reading rows."""

    columns: Mapping[str, str | None]
    answers: bool
    rejected: bool
    chats_first: bool
    prepare: Callable[[Row], Row] | None
    skip_bad_rows: bool

    def shape_of(self, table: Table) -> Shape:
        """Return the shape of a table."""
        return find_shape(
            table,
            {key: self.columns[key] or "" for key in NAMED if key in self.columns},
            answers=self.answers,
            rejected=self.rejected,
            chats_first=self.chats_first,
        )


def _read(
    sets: Sequence[str], split: str, *, reading: _Reading, key: str = "env.dataset"
) -> tuple[Sequence[Row], list[bytes]]:
    """Return the rows of data sets, and a key of each row's prompt, equal for equal prompts.

    Lazy rows are all made once now, to check them, and made again on access.
    """
    origin, keys = Origin(), list[bytes]()
    parts: list[Sequence[Row]] = []
    tables = [load_table(name, split=split, key=key) for name in sets]
    _check_left_out(tables, reading.columns)
    for name, table in zip(sets, tables, strict=True):
        left = [column for column in table.columns if reading.columns.get(column, column)]
        make = _Rows(replace(table, columns=left), reading, origin, several=len(sets) > 1)
        listed, indices = list[Row](), list[int]()
        for index in range(len(table.rows)):
            try:
                row = make(index)
            except ValueError as fault:
                if not reading.skip_bad_rows or isinstance(fault, UnreadColumn):
                    raise
                origin.bad.append(str(fault))
                continue
            if row is None:
                origin.left_out += 1
                continue
            indices.append(index)
            keys.append(_digest(json.dumps(row["messages"])))
            if isinstance(table.rows, list):
                listed.append(row)
        if not indices:
            why = origin.bad[0] if origin.bad else origin.why
            raise ValueError(f"{name}: expected at least one row that is kept, {why}")
        label = (make.shape.name, *make.columns)
        origin.shapes[label] = origin.shapes.get(label, 0) + len(indices)
        parts.append(listed or LazyRows(make, indices))
    return _joined(parts), keys


def _check_left_out(tables: Sequence[Table], columns: Mapping[str, str | None]) -> None:
    """Raise ValueError if `columns` ignores a column that no table has."""
    known = [column for table in tables for column in table.columns]
    for name, column in columns.items():
        if column is None and name.partition(".")[0] not in (*known, *PARTS):
            raise ValueError(f"env.columns.{name}=null: expected one of {', '.join(known)}")


def _joined(parts: list[Sequence[Row]]) -> Sequence[Row]:
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, list) for part in parts):
        return [row for part in parts for row in part]
    places = [(part, index) for part in parts for index in range(len(part))]
    return LazyRows(lambda place: place[0][place[1]], places)


class _Rows:
    """Make the rows of a table in a shape; None for a row that is left out (`Origin.why`)."""

    def __init__(self, table: Table, reading: _Reading, origin: Origin, *, several: bool) -> None:
        self.table, self.origin, self.several = table, origin, several
        self.shape = shape = reading.shape_of(table)
        self.rejected, self.prepare = reading.rejected, reading.prepare
        self.cells = Cells(table, origin.unused, pairs=self.rejected)
        needed = [*shape.needs(), *(["rejected"] if self.rejected else [])]
        self.parts = find_parts(table, reading.columns, shape, pairs=self.rejected)
        read = [column for part in self.parts.read.values() for column in part]
        self.columns = [*shape.needs(), *read, *needed[len(shape.needs()) :]]
        self.media = [name for name in MEDIA if name in table.columns]
        self.labels = self._labels(refuse_scores=reading.chats_first) if shape.response else []
        read = {name.partition(".")[0] for name in self.columns} | {*self.columns, *self.labels}
        origin.unused.update((name, None) for name in table.columns if name not in read)

    def _labels(self, *, refuse_scores: bool) -> list[str]:
        """Return the label columns: 1 or true for responses to learn, 0 or false for others."""
        labels = []
        for name in LABELS:
            if name not in self.table.columns or name in self.columns:
                continue
            values = {str(row.get(name)).lower() for row in self.table.rows} - {"none", ""}
            is_class = name == "label" and "answer" in str(self.shape.response)  # as in SST-2
            if values <= ({"true", "false"} if is_class else {*TRUTHS}):
                labels.append(name)
            elif refuse_scores and all(value.replace(".", "").isdigit() for value in values):
                raise ValueError(
                    f"{self.table.name}: expected {name} to tell responses to learn (1, true) from "
                    f"others (0, false), got {', '.join(sorted(values)[:5])}; write a column of "
                    f"these two, or learn all responses with env.columns.{name}=null"
                )
        return labels

    def __call__(self, index: int) -> Row | None:
        """Return a row; raise ValueError with its index and column if it is malformed."""
        cells = self.table.rows[index]
        for name in self.media:
            if cells.get(name):
                raise self.table.error(index, name, "a row of text alone", cells[name])
        if any(TRUTHS.get(str(cells.get(name)).lower()) is False for name in self.labels):
            return None
        row = self.shape.convert(cells) if self.shape.convert else cells
        out: Row = {"index": index, "columns": cells, "origin": self.origin}
        if self.several:
            out["index"] = f"{index} of {self.table.name}"
        if self.shape.prompt is not None:
            out["question"] = cell_of(row, self.shape.prompt)
            row = self._answered(index, row, out)
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
        self._add_thoughts(index, row, chat)
        if self.parts.unread:
            texts = [str(m[key]) for m in chat for key in m if key != "role"]
            self.parts.refuse_unread(self.table, cells, "\n".join(texts))
        if off := [place for place, message in enumerate(chat) if "weight" in message]:
            out["unlearnt"] = off
            for place in off:
                del chat[place]["weight"]
        for _, cell in self._cells_of("tools", row):
            self._add_tools(index, cell, chat, out)
        for column, cell in self._cells_of("chat_template_kwargs", row):
            out["chat_template_kwargs"] = self.cells.variables(index, column, cell)
        if self.shape.response is not None:
            response = chat.pop()
            out.setdefault("answer", response["content"])
            if self.shape.learnt:
                out["response"] = response
        out["messages"] = chat
        return self.prepare(out) if self.prepare else out

    def _cells_of(self, part: str, row: Row) -> list[tuple[str, Any]]:
        """Return the columns of a part for which a row has a cell, with the cells."""
        cells = [(column, cell_of(row, column)) for column in self.parts.read.get(part, ())]
        return [(column, cell) for column, cell in cells if cell not in (None, "", [], {})]

    def _answered(self, index: int, row: Row, out: Row) -> Row:
        """Return a row with the text to learn, and add to `out` what is right.

        The text is the first of several right answers; letter and text of an option, as in the
        prompt, so that lm-eval, which reads the first letter, finds it; a solution followed by the
        answer.
        """
        column = self.shape.response
        if column is None or self.rejected:
            return row
        learnt = right = cell_of(row, column)
        labels, options = self._options(index, row)
        if options:
            letter = right_letter(right, labels, list(options.values()))
            if letter:
                out |= {"answer": letter, "options": options}
                learnt = f"{letter}. {options[letter]}"
            else:
                remedy = f"env.columns.{self.parts.read['options'][0]}=null leaves the options out"
                expected = f"a letter, index or text of the options ({remedy})"
                raise self.table.error(index, column, expected, right)
        elif several := self.cells.right_answers(index, column, right):
            learnt = several[0]
            out |= {"answer": learnt, "answers": several}
        for solution, cell in self._cells_of("solution", row):
            text, answer = self.cells.text(index, solution, cell), str(learnt)
            out.setdefault("answer", answer)
            # 15, 5.5 and 5,000 do not contain the number 5.
            has_answer = re.search(rf"(?<![\w.,]){re.escape(answer)}(?!\w|[.,]\d)", text)
            learnt = text if has_answer else f"{text}\n#### {answer}"
        return row if learnt is right else {**row, column: learnt}

    def _options(self, index: int, row: Row) -> tuple[list[str], dict[str, str]]:
        """Return the labels of a row's options, and their texts by letter."""
        for column, cell in self._cells_of("options", row):
            try:
                labels, texts = read_options(cell)
            except ValueError:
                form = "options as a list of texts, {text, label} or {A: ..., B: ...}"
                raise self.table.error(index, column, form, cell) from None
            return labels, dict(zip(ascii_uppercase, texts, strict=False))
        return [], {}

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
        self._complete(index, row, messages)
        if response is None:
            return messages
        return cells.response(index, response, cell_of(row, response), prompt=messages)

    def _complete(self, index: int, row: Row, prompt: list[Message]) -> None:
        """Add a row's history before its prompt, and its context and options at the end."""
        last = prompt[-1]
        texts = [self.cells.text(index, *cell) for cell in self._cells_of("context", row)]
        lines = [f"{letter}. {text}" for letter, text in self._options(index, row)[1].items()]
        if not all(line in last["content"] for line in lines):
            texts.append("\n".join(lines))
        last["content"] = "\n\n".join([last["content"], *texts])
        for cell in self._cells_of("history", row):
            past = self.cells.history(index, *cell)
            for message in past:
                if message["role"] == "assistant":
                    message["weight"] = 0
            place = int(prompt[0]["role"] == "system")
            prompt[place:place] = past

    def _add_system(self, index: int, row: Row, chat: list[Message]) -> None:
        """Insert the text of a system column, unless the chat has a system message."""
        for name, text in self._cells_of("system", row):
            if not isinstance(text, str):
                raise self.table.error(index, name, "a text", text)
            if chat[0]["role"] != "system":
                chat.insert(0, {"role": "system", "content": text})
            elif text.strip() not in chat[0]["content"]:
                expected = f"the text of the system message (env.columns.{name}=null drops it)"
                raise self.table.error(index, name, expected, text)

    def _add_thoughts(self, index: int, row: Row, chat: list[Message]) -> None:
        """Add the thoughts of a row to its response, unless the response has thoughts."""
        for column, cell in self._cells_of("thoughts", row):
            if any(text not in chat[-1]["content"] for text in texts_of(cell)):
                chat[-1].setdefault("reasoning_content", self.cells.text(index, column, cell))

    def _add_tools(self, index: int, cell: Any, chat: list[Message], out: Row) -> None:
        """Add the schemas of a row's tools, unless its system message has them (as in Hermes)."""
        tools = self.cells.tools(index, cell)
        if tools and not (chat[0]["role"] == "system" and "<tools>" in chat[0]["content"]):
            out["tools"] = tools


def _digest(prompt: str) -> bytes:
    return blake2b(prompt.encode(), digest_size=8).digest()


def split_off(keys: Sequence[Any], *, seed: int = 0) -> tuple[list[int], list[int]]:
    """Return the indices of train and eval rows for data without an eval split.

    A tenth of the distinct keys of prompts, at most 200, goes to eval; equal keys stay together.

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
