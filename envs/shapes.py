"""The shapes in which people publish rows, recognised by their columns.

`SHAPES` is the table of docs/environments.md; the first that fits a file is taken. A `convert`
joins the columns of a row that make up its prompt or response; envs/chat_cells.py then reads both.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from envs.data import Row, Table, cell_of

REWARD = "with a reward of your own (env.rewards)"
NAMED = "the named columns"
SYSTEM = ("system", "system_prompt")
TURN = re.compile(r"\n\n(Human|Assistant):")
SPEAKERS = {"Human": "user", "Assistant": "assistant"}


class BadCell(ValueError):
    """A column that a shape cannot read: its name, what was expected, and its value."""


def _unchanged(row: Row) -> Row:
    return row


def _any(_: Row) -> bool:
    return True


@dataclass(frozen=True)
class Shape:
    """Columns of rows: `prompt`, and `response` (for prompt=None whole chats).

    `also`: columns that a row may have besides. `fits`: whether a row has this form of cells;
    `convert` returns a row with a text or a chat in the columns `prompt` and `response`.
    """

    name: str
    prompt: str | None
    response: str | None
    also: tuple[str, ...] = SYSTEM
    fits: Callable[[Row], bool] = _any
    convert: Callable[[Row], Row] = _unchanged

    def needs(self, *, answers: bool = True) -> list[str]:
        """Return the columns that a table must have, without `answers` those of the prompt."""
        columns = [self.prompt, self.response if answers or not self.prompt else None]
        return [column for column in columns if column is not None]

    def reads(self, table: Table) -> list[str]:
        """Return the columns of a table that are read."""
        also = [column for column in (*self.also, "tools") if column in table.columns]
        return [*self.needs(), *also]


def _starts_by(key: str, column: str) -> Callable[[Row], bool]:
    """Return whether the first message in a column of a row has a key."""

    def fits(row: Row) -> bool:
        chat = row.get(column)
        return isinstance(chat, list) and chat != [] and _has(chat[0], key)

    return fits


def _has(value: Any, key: str) -> bool:
    return isinstance(value, Mapping) and value.get(key) is not None


def _join_input(row: Row) -> Row:
    """Return an instruction with its input (or context) below, after the turns of its history."""
    parts = [row["instruction"], row.get("input") or row.get("context")]
    for column in ("input", "context"):
        if row.get(column) and not isinstance(row[column], str):
            raise BadCell(column, "a text", row[column])
    if not isinstance(parts[0], str):
        return row
    text = "\n\n".join(part for part in parts if part)
    history = row.get("history") or []
    if not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise BadCell("history", "pairs of a prompt and a response", history)
    past = [
        {"role": role, "content": content}
        for turn in history
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
    chat = [*past, {"role": "user", "content": text}]
    return {**row, "instruction": chat if past else text}


def _as_calls(row: Row) -> Row:
    """Return a row whose answers, calls as JSON, are a message of the assistant."""
    message = {"role": "assistant", "content": "", "tool_calls": row.get("answers")}
    return {**row, "answers": [message]}


def _split_turns(row: Row) -> Row:
    """Return a row with chats for the texts "\\n\\nHuman: ... \\n\\nAssistant: ..."."""
    names = [name for name in ("prompt", "chosen", "rejected") if isinstance(row.get(name), str)]
    return {**row, **{name: _turns(row[name]) for name in names}}


def _turns(text: str) -> str | list[dict[str, str]]:
    if not TURN.match(text):
        return text.strip()
    pieces = TURN.split(text)[1:]  # speaker, text, speaker, text, ...
    pairs = zip(pieces[::2], pieces[1::2], strict=True)
    return [
        {"role": SPEAKERS[name], "content": content.strip()}
        for name, content in pairs
        if content.strip()
    ]


def _in_turns(column: str) -> Callable[[Row], bool]:
    """Return whether a column of a row is a text of HH-RLHF."""

    def fits(row: Row) -> bool:
        return isinstance(row[column], str) and TURN.match(row[column]) is not None

    return fits


ALPACA = ("input", "context", "history", *SYSTEM)  # Dolly has the context, Alpaca the input
TRUTH = "reward_model.ground_truth"
SHAPES = [
    Shape("ShareGPT pairs", "conversations", "chosen"),
    Shape("ShareGPT", None, "conversations", fits=_starts_by("from", "conversations")),
    Shape("ShareGPT", None, "messages", fits=_starts_by("from", "messages")),
    Shape("OpenAI messages", None, "messages"),
    Shape("OpenAI messages", None, "conversations"),
    Shape("verl", "prompt", TRUTH, fits=lambda row: cell_of(row, TRUTH) is not None),
    Shape("xLAM", "query", "answers", convert=_as_calls),
    Shape("Alpaca", "instruction", "output", also=ALPACA, convert=_join_input),
    Shape("Alpaca pairs", "instruction", "chosen", also=ALPACA, convert=_join_input),
    Shape("Dolly", "instruction", "response", also=ALPACA, convert=_join_input),
    Shape("questions and answers", "question", "answer"),
    Shape("questions and responses", "question", "response"),
    Shape("preferences", "question", "chosen"),
    Shape("prompts and answers", "prompt", "answer"),
    Shape("prompts and completions", "prompt", "completion"),
    Shape("prompts and responses", "prompt", "response"),
    Shape("HH-RLHF", "prompt", "chosen", fits=_in_turns("prompt"), convert=_split_turns),
    Shape("preferences", "prompt", "chosen"),
    Shape("HH-RLHF", None, "chosen", fits=_in_turns("chosen"), convert=_split_turns),
    Shape("preferences of chats", None, "chosen", fits=_starts_by("role", "chosen")),
    Shape("preferences of chats", None, "chosen", fits=_starts_by("from", "chosen")),
]


def find_shape(
    table: Table, names: Mapping[str, str], *, answers: bool = True, rejected: bool = False
) -> Shape:
    """Return the shape of a table, of the columns `names` if there are any.

    Without `answers` a shape of prompts fits without its responses. `rejected`: rows need the
    column "rejected". ValueError with the nearest shape if none fits.
    """
    if rejected and "rejected" not in table.columns:
        raise ValueError(
            f"{table.name}: expected a column 'rejected' with the worse responses, got "
            f"{', '.join(table.columns)}; rename the column that has them to rejected"
        )
    if names:
        return _named(table, names, answers=answers or "answer" in names)
    shapes = SHAPES
    if rejected:  # whole chats beside the pairs are not what is compared
        shapes = sorted(SHAPES, key=lambda shape: shape.response != "chosen")
    elif not answers:  # a column of whole chats is no prompt
        shapes = sorted(SHAPES, key=lambda shape: shape.prompt is not None)
    for shape in shapes:
        needed = shape.needs(answers=answers)
        if all(map(table.has, needed)) and shape.fits(_typical(table, needed)):
            return shape if answers else _of_prompts(shape)
    raise ValueError(f"{table.name}: {_describe_lack(table, shapes)}")


def _typical(table: Table, columns: list[str]) -> Row:
    """Return the first row with a value in these columns, of the first hundred."""
    some = (table.rows[i] for i in range(min(len(table.rows), 100)))
    full = (row for row in some if all(cell_of(row, name) is not None for name in columns))
    return next(full, table.rows[0])


def _of_prompts(shape: Shape) -> Shape:
    if shape.prompt is None:
        return shape
    return Shape("prompts", shape.prompt, None, also=shape.also, convert=shape.convert)


def _named(table: Table, names: Mapping[str, str], *, answers: bool) -> Shape:
    """Return the shape of named columns; the columns that are not named have common names."""
    if "messages" in names:
        return Shape(NAMED, None, table.require("messages", names["messages"]), also=())
    question = names.get("question") or _first(table, "question", "prompt")
    table.require("question", question)
    if not answers:
        return Shape("prompts", question, None, also=())
    alone = f"; without answers: env=prompts env.columns.question={question}, {REWARD}"
    answer = names.get("answer") or _first(table, "answer", "completion", "chosen")
    return Shape(NAMED, question, table.require("answer", answer, alone), also=())


def _first(table: Table, *columns: str) -> str:
    return next((column for column in columns if column in table.columns), columns[0])


def _describe_lack(table: Table, shapes: list[Shape]) -> str:
    """Return what the nearest shape needs, and a remedy, for a table that none fits."""
    got = f"got {', '.join(table.columns)}"
    for column, value in table.rows[0].items():
        if any(_starts_by(key, column)({column: value}) for key in ("role", "from")):
            return f"expected a known shape of rows, {got}; set env.columns.messages={column}"
    if table.columns == ["text"]:
        bare = "bare texts are prompts: env=prompts env.columns.question=text"
        return f"expected prompts with responses, {got} alone; {bare}, {REWARD}"
    close = [shape for shape in shapes if any(map(table.has, shape.needs()))]
    if not close:
        both = "set env.columns.question=<column> env.columns.answer=<column>"
        return f"expected columns question and answer, or another shape, {got}; {both}"
    near = max(close, key=lambda shape: (_share(table, shape), shape.fits is _any))
    lacks = [column for column in near.needs() if not table.has(column)]
    needs = f"needs {', '.join(lacks)}" if lacks else "has other cells"
    text = f"expected a known shape of rows, {got}; the nearest, {near.name}, {needs}"
    if near.prompt is None:
        return f"{text}; give the prompts in a column, env.columns.question=<column>"
    if not table.has(near.prompt):
        return f"{text}; set env.columns.question=<column> env.columns.answer={near.response}"
    question = f"env.columns.question={near.prompt}"
    alone = f"without answers: env=prompts {question}, {REWARD}"
    return f"{text}; set {question} env.columns.answer=<column>; {alone}"


def _share(table: Table, shape: Shape) -> float:
    """Return the share of a shape's columns that a table has."""
    return sum(map(table.has, shape.needs())) / len(shape.needs())
