"""Which columns of a table belong to a prompt or a response, by their names.

If such a column is not read, the run ends. Ids, sources, scores and dates need not be read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from envs.data import Table, cell_of
from envs.rows import Row
from envs.shapes import OPTIONS, Shape

# Columns that may contain something else, so they are read only with env.columns.<part>=<column>.
OTHER_CONTEXTS = ("story", "evidence", "sentence", "sentences", "table", "sql_context", "ctxs")
OTHER_CONTEXTS += ("context_text", "dialogue", "starter_code", "few_shot")
OTHER_CONTEXTS += ("instruction", "instructions")
OTHER_OPTIONS = ("answer_choices", "candidates", "endings", "distractors")
STEMS = ("", "op", "option_", "choice_")
OPTION_COLUMNS = [f"{stem}{letter}" for stem in STEMS for letter in "abcd"]
OTHER_THOUGHTS, OTHER_SOLUTIONS = ("thinking_trace", "scratchpad"), ("explanation", "rationale")
ON_REQUEST = ("system_message", "system_instruction", "functions", "metadata.tools", "long_answer")
ON_REQUEST += (*OTHER_CONTEXTS, *OTHER_OPTIONS, *OTHER_THOUGHTS, *OTHER_SOLUTIONS)
NAMED = ("messages", "question", "answer")  # keys of env.columns for the columns of a shape
# Part of a row (a key of env.columns) -> names of its columns in lower case.
PROMPT = {
    "context": (
        *("input", "context", "contexts", "passage", "passages", "paragraph", "paragraphs"),
        *("document", "documents", "article", "background", *OTHER_CONTEXTS),
    ),
    "history": ("history", "chat_history", "conversation_history"),
    "system": ("system", "system_prompt", "system_message", "system_instruction"),
    "options": (*OPTIONS, *OTHER_OPTIONS, *OPTION_COLUMNS),
    "tools": ("tools", "functions", "metadata.tools"),
}
RESPONSE = {
    "thoughts": (
        *("reasoning", "reasoning_content", "thinking", "thought", "thoughts"),
        *("chain_of_thought", "cot", "complex_cot", *OTHER_THOUGHTS),
    ),
    "solution": ("solution", *OTHER_SOLUTIONS, "long_answer"),
}
PARTS = {**PROMPT, **RESPONSE, "chat_template_kwargs": ("chat_template_kwargs",)}
OF_CHATS = ("system", "tools", "chat_template_kwargs")  # parts that whole chats may have too
SEVERAL = ("context", "system")  # parts that may have several columns
SWITCHES = ("", "on", "off", "yes", "no", "true", "false")  # cells without a text to read
NOT_TEXTS = ("role", "from", "type", "id", "title")  # keys of nested cells


class UnreadColumn(ValueError):
    """A column of the prompt or the response is not read."""


@dataclass(frozen=True)
class Parts:
    """Columns of a table: `read`, by part, and `unread`, with the remedy."""

    read: dict[str, list[str]] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)

    def refuse_unread(self, table: Table, row: Row, chat: str) -> None:
        """Raise UnreadColumn for a cell with texts that are neither read nor in `chat`."""
        for column, remedy in self.unread.items():
            if not all(text in chat for text in texts_of(cell_of(row, column))):
                raise UnreadColumn(
                    f"{table.name}: expected all columns of prompt and response to be read, got "
                    f"{column!r} beside them; set {remedy}"
                )


def find_parts(
    table: Table, columns: Mapping[str, str | None], shape: Shape, *, pairs: bool
) -> Parts:
    """Return the parts of a table in other columns than those of its `shape` (envs/shapes.py).

    `columns`: env.columns; null ignores a column. Responses of `pairs` have no parts; other
    responses have a solution only if the answer column is a bare answer.
    """
    expects, takes = {*PROMPT, "chat_template_kwargs"}, {*OF_CHATS}
    if shape.prompt:
        takes |= expects
    if shape.response and shape.learnt and not pairs:
        takes |= {*RESPONSE} if shape.prompt else set()
        expects |= {*RESPONSE} if "answer" in shape.response.lower() else {"thoughts"}
    beside = [*shape.needs(), "rejected" if pairs else "", *columns.values()]
    beside += [name.partition(".")[0] for name in beside if name]
    free = [name for name in table.columns if name not in beside]
    lower = {name.lower() for name in free}
    lettered = [stem for stem in STEMS if {f"{stem}a", f"{stem}b"} <= lower]  # not c alone
    single = {f"{stem}{letter}" for stem in lettered for letter in "abcd"}
    parts = Parts()
    for part, names in PARTS.items():
        named = columns.get(part)
        if named and part not in takes:
            raise ValueError(
                f"env.columns.{part}={named}: the rows of {table.name} have no place for it; leave "
                "it out, or name the columns env.columns.question and env.columns.answer"
            )
        present = [column for column in free if column.lower() in names]
        present = [c for c in present if c.lower() in single or c.lower() not in OPTION_COLUMNS]
        present += [n for n in names if "." in n and n.partition(".")[0] in free and n != named]
        present.sort(key=lambda column: names.index(column.lower()))
        if named:
            parts.read[part] = [table.require(part, named)]
        for column in present if part in expects else ():
            more = part not in parts.read or (part in SEVERAL and not named)
            alone = column.lower() in single
            if part in takes and more and not alone and column.lower() not in ON_REQUEST:
                parts.read.setdefault(part, []).append(column)
                continue
            remedy = f"env.columns.{part}={column} to read it, or " if part in takes else ""
            remedy = "env.columns.options=<one column with a list of all>, or " if alone else remedy
            remedy += f"env.columns.{column.partition('.')[0]}=null to leave it out"
            parts.unread[column] = remedy
    return parts


def texts_of(cell: Any) -> Iterator[str]:
    """Yield the texts of a cell, also nested ones, without numbers and SWITCHES.

    >>> list(texts_of([{"id": "7", "text": " It rains. "}, "off", 3, None]))
    ['It rains.']
    """
    if isinstance(cell, str) and cell.strip().lower() not in SWITCHES:
        yield cell.strip()
    elif isinstance(cell, Mapping | list):
        keyed = cell.items() if isinstance(cell, Mapping) else enumerate(cell)
        for key, value in keyed:
            if key not in NOT_TEXTS:
                yield from texts_of(value)
