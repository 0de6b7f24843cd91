"""The cells of a row that choose its teacher or fill a hint. Torch-free."""

from collections.abc import Collection, Mapping, Sequence
from itertools import islice

from envs.data import cell_of
from envs.rows import Row


def check_cells(
    rows: Sequence[Row], hints: Mapping[str, str], column: str | None, teachers: Collection[str]
) -> None:
    """Raise ValueError if the first row lacks a cell of a hint, or a row a teacher in `column`.

    `hints`: texts by key. If rows are made on access (large files), only the first is read.
    """
    for key, text in hints.items():
        try:
            hinted(rows[0], text)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
    for row in rows if isinstance(rows, list) else islice(rows, 1):
        if column is not None:
            teacher_of(row, column, teachers)


def teacher_of(row: Row, column: str, teachers: Collection[str]) -> str:
    """Return the name of a row's teacher, the cell of `column`."""
    value = cell_of({**(row.get("columns") or {}), **row}, column)
    if str(value) not in teachers:
        place = f", row {row['index']}" if "index" in row else ""
        known = f"expected the name of a teacher, {' or '.join(teachers)}, got {value!r:.80}"
        remedy = "correct the row, add the name to teacher.reference, or name another column"
        raise ValueError(f"teacher.column={column}{place}: {known}; {remedy}")
    return str(value)


def hinted(row: Row, text: str) -> Row:
    """Return a row whose last user message ends with a hint, a template over the row's cells."""
    cells = {**(row.get("columns") or {}), **row}  # "columns": the data set's other columns
    try:
        text = text.format(**cells)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        known = f"expected a hint of the cells {', '.join(cells)} of a row"
        raise ValueError(f"{known}, got {text!r} ({error})") from error
    messages = list(row["messages"])
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    last = users[-1] if users else len(messages) - 1
    messages[last] = {**messages[last], "content": f"{messages[last]['content']}\n{text}"}
    return {**row, "messages": messages}
