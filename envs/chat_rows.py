"""Chats of a data set: the prompt of each row, its right reply, and what is held out."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from envs.data import READERS, Table, is_file, load_table

COLUMNS = ("messages", "question", "answer")
EVAL_SHARE, EVAL_ROWS = 0.1, 200  # what is split off where there is no eval data, at most


def load_chats(
    dataset: str | None,
    *,
    eval_dataset: str | None = None,
    columns: Mapping[str, str | None] | None = None,
    split: str = "train",
    eval_split: str | None = None,
    seed: int = 0,
    answers: bool = True,
) -> dict[str, list[dict[str, Any]]]:
    """Return the checked "train" and "eval" rows of a data set.

    A row has "messages" (the prompt), "answer" (the last reply), "index", and "columns": all its
    cells by column name, None where the file has none.

    A column `messages` is used where there is one, else `question` and `answer`, each a text or
    messages (then "question" has the cell as it is); `columns` renames any of the three. Without
    `answers` an answer is read only if `columns` names it. Eval rows: `eval_dataset`, else
    `eval_split` of a hub data set, else a seeded tenth of the data (`split_off`); a file has no
    splits.
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
    train = _chats(load_table(dataset, split=split), names, answers)
    if eval_dataset or (eval_split and not is_file(dataset)):
        table = load_table(eval_dataset or dataset, split=eval_split or split)
        return {"train": train, "eval": _chats(table, names, answers)}
    kept, held_out = split_off([json.dumps(row["messages"]) for row in train], seed=seed)
    return {"train": [train[i] for i in kept], "eval": [train[i] for i in held_out]}


def _chats(table: Table, names: Mapping[str, str], answers: bool) -> list[dict[str, Any]]:
    """Return prompt and answer of each row of a table."""
    column = names.get("messages", "messages")
    by_question = "question" in names or "answer" in names
    if "messages" in names or (column in table.columns and not by_question):
        table.require("messages", column)
        remedy = f"if these are prompts alone, give env.columns.question={column} in its place"
        return table.each(lambda index: _chat(table, index, column), remedy)
    question = table.require("question", names.get("question", "question"))
    there = f"=<column>, of {', '.join(table.columns)}"
    remedy = f"name a column of prompts: env.columns.question{there}"
    prompts = table.each(lambda index: table.turns(index, question, "user"), remedy)
    rows = [
        {"index": i, "messages": prompt, "columns": table.cells(i), "question": row[question]}
        for i, (prompt, row) in enumerate(zip(prompts, table.rows, strict=True))
    ]
    if not answers and "answer" not in names:
        return rows
    answer = table.require("answer", names.get("answer", "answer"))
    remedy = f"name a column of texts: env.columns.answer{there}"
    replies = table.each(lambda index: table.turns(index, answer, "assistant"), remedy)
    for row, reply in zip(rows, replies, strict=True):
        row |= {"messages": row["messages"] + reply[:-1], "answer": reply[-1]["content"]}
    return rows


def _chat(table: Table, index: int, column: str) -> dict[str, Any]:
    """Return prompt and answer of a row that holds a whole chat."""
    messages = table.messages(index, column)
    last = messages[-1]
    if last["role"] != "assistant" or not last["content"].strip() or len(messages) < 2:
        expected = "a prompt and then a reply of the assistant as the last message"
        raise table.error(index, column, expected, [m["role"] for m in messages])
    return {
        "index": index,
        "messages": messages[:-1],
        "answer": last["content"],
        "columns": table.cells(index),
    }


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
