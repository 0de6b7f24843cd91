"""The shapes in which people publish rows, recognised by their columns.

`SHAPES` is the table of docs/data.md; the first that fits a file is taken. A `convert`
gives the columns of a row another form; envs/chat_cells.py then reads both, and the other parts of
a prompt or response (envs/row_parts.py).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from envs.chat_cells import ROLES
from envs.data import Table, cell_of
from envs.rows import Row

REWARD = "with a reward of your own (env.rewards)"
NAMED = "the named columns"
TURN = re.compile(r"\n\n(Human|Assistant):")
SPEAKERS = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True)
class Shape:
    """Columns of rows: `prompt` and `response`; with prompt=None the response is a whole chat.

    `fits`: whether cells of the needed columns have this form. `convert` returns a row with a text
    or a chat in `prompt` and `response`. `beside`: the table must also have one of these columns.
    If not `learnt`, the response is only a right answer for the reward, not a text to learn.
    """

    name: str
    prompt: str | None
    response: str | None
    fits: Callable[[Row], bool] | None = None
    convert: Callable[[Row], Row] | None = None
    beside: tuple[str, ...] = ()
    learnt: bool = True

    def needs(self, *, answers: bool = True) -> list[str]:
        """Return the columns that a table must have; without `answers` only the prompt's."""
        columns = [self.prompt, self.response if answers or not self.prompt else None]
        return [column for column in columns if column is not None]

    def is_of(self, table: Table, *, answers: bool) -> bool:
        """Return whether a table has the needed columns with cells of this form."""
        needed = self.needs(answers=answers)
        lacks = self.beside and not {*self.beside} & {*table.columns}
        if lacks or not all(map(table.has, needed)):
            return False
        return self.fits is None or self.fits(_typical(table, needed))


def _typical(table: Table, columns: list[str]) -> Row:
    """Return these columns' cells of the first row, among 100, that has all of them."""
    rows = ({name: cell_of(row, name) for name in columns} for row in islice(table.rows, 100))
    return next((row for row in rows if None not in row.values()), dict.fromkeys(columns))


def _first_message_has(key: str, column: str) -> Callable[[Row], bool]:
    """Return whether the first message in a column of a row has a key."""

    def fits(row: Row) -> bool:
        chat = row.get(column)
        return isinstance(chat, list) and chat != [] and _has(chat[0], key)

    return fits


def _has(value: Any, key: str) -> bool:
    return isinstance(value, Mapping) and value.get(key) is not None


def _asks(column: str) -> Callable[[Row], bool]:
    """Return whether the chat of a row ends with a message that is not the assistant's."""

    def fits(row: Row) -> bool:
        chat = row.get(column)
        last = chat[-1] if isinstance(chat, list) and chat else None
        return isinstance(last, Mapping) and ROLES.get(str(last.get("role"))) in ("user", "tool")

    return fits


def _as_calls(row: Row) -> Row:
    """Return a row with its answers, calls as JSON, in one assistant message."""
    message = {"role": "assistant", "content": "", "tool_calls": row.get("answers")}
    return {**row, "answers": [message]}


def _split_turns(row: Row) -> Row:
    """Return a row with chats for the texts "\\n\\nHuman: ... \\n\\nAssistant: ..."."""
    names = [name for name in ("prompt", "chosen", "rejected") if isinstance(row.get(name), str)]
    return {**row, **{name: _turns(row[name], response=name != "prompt") for name in names}}


def _turns(text: str, *, response: bool) -> str | list[dict[str, str]]:
    """Return the non-empty turns of a text; the last turn of a `response` may be empty."""
    if not TURN.match(text):
        return text.strip()
    pieces = TURN.split(text)[1:]  # speaker, text, speaker, text, ...
    pairs = zip(pieces[::2], pieces[1::2], strict=True)
    turns = [{"role": SPEAKERS[name], "content": content.strip()} for name, content in pairs]
    last = turns[-1] if response and turns[-1]["role"] == "assistant" else None
    return [turn for turn in turns if turn["content"] or turn is last]


def _in_turns(column: str) -> Callable[[Row], bool]:
    """Return whether a column of a row is a text of HH-RLHF."""

    def fits(row: Row) -> bool:
        return isinstance(row[column], str) and TURN.match(row[column]) is not None

    return fits


def _has_calls(row: Row) -> bool:
    """Return whether the answers of a row are calls or JSON; True for a row without answers."""
    answers = row.get("answers", "[]")
    if isinstance(answers, str):
        return answers.lstrip().startswith(("[", "{"))
    return _first_message_has("name", "answers")(row)


TRUTH = "reward_model.ground_truth"
OPTIONS = ("options", "choices")  # columns of multiple choice
PROMPTS = ("question", "prompt", "problem", "query", "instruction", "input", "messages")
ANSWERS = ("answer", "response", "output", "completion", "ground_truth", "solution", "label")
SHAPES = [
    Shape("ShareGPT pairs", "conversations", "chosen"),
    Shape("ShareGPT", None, "conversations", fits=_first_message_has("from", "conversations")),
    Shape("ShareGPT", None, "messages", fits=_first_message_has("from", "messages")),
    *(
        Shape("chats and answers", "messages", name, fits=_asks("messages"), learnt=False)
        for name in ("ground_truth", "solution", "answer")
    ),
    Shape("OpenAI messages", None, "messages"),
    Shape("OpenAI messages", None, "conversations"),
    Shape("verl", "prompt", TRUTH, fits=lambda row: cell_of(row, TRUTH) is not None, learnt=False),
    Shape("xLAM", "query", "answers", fits=_has_calls, convert=_as_calls),
    Shape("Alpaca", "instruction", "output"),
    Shape("Alpaca pairs", "instruction", "chosen"),
    Shape("Dolly", "instruction", "response"),
    Shape("multiple choice", "question", "answer", beside=OPTIONS),
    Shape("multiple choice", "question", "answerKey", beside=OPTIONS),
    Shape("questions and answers", "question", "answer"),
    Shape("questions and several answers", "question", "answers"),
    Shape("questions and several answers", "question", "golden_answers"),
    Shape("questions and responses", "question", "response"),
    Shape("preferences", "question", "chosen"),
    Shape("prompts and answers", "prompt", "answer"),
    Shape("prompts and completions", "prompt", "completion"),
    Shape("prompts and responses", "prompt", "response"),
    Shape("inputs and outputs", "input", "output"),
    Shape("HH-RLHF", "prompt", "chosen", fits=_in_turns("prompt"), convert=_split_turns),
    Shape("preferences", "prompt", "chosen"),
    Shape("HH-RLHF", None, "chosen", fits=_in_turns("chosen"), convert=_split_turns),
    Shape("preferences of chats", None, "chosen", fits=_first_message_has("role", "chosen")),
    Shape("preferences of chats", None, "chosen", fits=_first_message_has("from", "chosen")),
]


def find_shape(
    table: Table,
    names: Mapping[str, str],
    *,
    answers: bool = True,
    rejected: bool = False,
    chats_first: bool = True,
) -> Shape:
    """Return the shape of a table.

    `names`: columns named in env.columns. answers=False: the response column may be missing.
    `rejected`: require the column "rejected". chats_first=False: prefer an answer column to a
    column of whole chats. Raise ValueError with the nearest shape if none fits.
    """
    if rejected and "rejected" not in table.columns:
        raise ValueError(
            f"{table.name}: expected a column 'rejected' with the worse responses, got "
            f"{', '.join(table.columns)}; rename the column that has them, or write rows of "
            "prompt, chosen and rejected from the scores of responses"
        )
    if names:
        return _named(table, names, answers=answers or "answer" in names)
    first = ("chosen",) if rejected else () if chats_first else ("answer", TRUTH)
    shapes = sorted(SHAPES, key=lambda shape: shape.response not in first)
    for with_answers in (True,) if answers else (True, False):
        for shape in shapes:
            if shape.is_of(table, answers=with_answers):
                return shape if answers else _of_prompts(shape)
    raise ValueError(f"{table.name}: {_describe_lack(table, shapes)}")


def _of_prompts(shape: Shape) -> Shape:
    return replace(shape, name="prompts", response=None) if shape.prompt else shape


def _named(table: Table, names: Mapping[str, str], *, answers: bool) -> Shape:
    """Return the shape of named columns; columns not in `names` need one of the common names."""
    if "messages" in names:
        if alone := [name for name in ("question", "answer") if name in names]:
            got = " and ".join(f"env.columns.{name}" for name in ("messages", *alone))
            raise ValueError(f"expected env.columns.messages alone, got {got}; leave one out")
        return Shape(NAMED, None, table.require("messages", names["messages"]))
    question = names.get("question") or _first(table, ("question", "prompt"), "question")
    table.require("question", question)
    if not answers:
        return Shape("prompts", question, None)
    alone = f"; without answers: env=prompts env.columns.question={question}, {REWARD}"
    answer = names.get("answer") or _first(table, ("answer", "completion", "chosen"), "answer")
    return Shape(NAMED, question, table.require("answer", answer, alone))


def _first(table: Table, names: Sequence[str], default: str) -> str:
    """Return the table's column for the first of these names that it has, ignoring case."""
    columns = {column.lower(): column for column in reversed(table.columns)}
    return next((columns[name] for name in names if name in columns), default)


def _describe_lack(table: Table, shapes: list[Shape]) -> str:
    """Return the nearest shape, and a remedy, for a table that no shape fits."""
    got = f"expected a known shape of rows, got {', '.join(table.columns)}"
    for column in table.columns:
        is_chat = any(_first_message_has(key, column)(table.rows[0]) for key in ("role", "from"))
        if is_chat and not _asks(column)(table.rows[0]):
            return f"{got}; set env.columns.messages={column}"

    def nearness(shape: Shape) -> tuple[float, bool]:
        share = sum(map(table.has, shape.needs())) / len(shape.needs())
        return share, shape.response == "answer"

    near = max(shapes, key=nearness)
    question = _first(table, (near.prompt or "", *PROMPTS), "<column>")
    answer = _first(table, (near.response or "", *ANSWERS), "<column>")
    return (
        f"{got}; the nearest is {near.name}, with {' and '.join(near.needs())}; set env.columns."
        f"question={question} env.columns.answer={answer}, or for prompts alone env=prompts "
        f"env.columns.question={question}, {REWARD}"
    )
