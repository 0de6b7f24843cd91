"""Chats of a data set: the prompt of each row, its right reply, and what is held out."""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from envs.data import READERS, Table, is_file, load_table, made

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
) -> dict[str, Sequence[dict[str, Any]]]:
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
    parts = split_off((json.dumps(row["messages"]) for row in train), seed=seed)
    if isinstance(train, list):
        parts = [part.tolist() for part in parts]
    return {
        name: made(train.__getitem__, p) for name, p in zip(("train", "eval"), parts, strict=True)
    }


def _chats(table: Table, names: Mapping[str, str], answers: bool) -> Sequence[dict[str, Any]]:
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
    replies = None
    if answers or "answer" in names:
        answer = table.require("answer", names.get("answer", "answer"))
        remedy = f"name a column of texts: env.columns.answer{there}"
        replies = table.each(lambda index: table.turns(index, answer, "assistant"), remedy)

    def row(i: int) -> dict[str, Any]:
        out = {"index": i, "messages": prompts[i], "columns": table.cells(i)}
        out["question"] = table.rows[i][question]
        if replies is None:
            return out
        *more, last = replies[i]
        return out | {"messages": out["messages"] + more, "answer": last["content"]}

    return made(row, table.places)


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


def split_off(prompts: Iterable[str], *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the train and of the eval rows, where no eval data is given.

    A tenth of the distinct prompts, at most 200, goes to eval; equal prompts stay together.

    >>> train, held_out = split_off(["a", "b", "a", "c"])
    >>> len({"abac"[i] for i in held_out}), sorted([*train.tolist(), *held_out.tolist()])
    (1, [0, 1, 2, 3])
    """
    hashes = (int.from_bytes(blake2b(p.encode(), digest_size=8).digest()) for p in prompts)
    _, first, which = np.unique(
        np.fromiter(hashes, np.uint64), return_index=True, return_inverse=True
    )
    if len(first) < 2:
        raise ValueError(
            f"expected at least 2 different prompts to split eval rows off, got {len(first)}; "
            "give env.eval_dataset"
        )
    count = min(max(1, int(len(first) * EVAL_SHARE)), EVAL_ROWS)
    chosen = random.Random(seed).sample(range(len(first)), count)  # of the order they come in
    held_out = np.isin(which, np.argsort(first)[chosen])
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)
