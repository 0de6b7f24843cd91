"""Load the chats of a data set: prompts, right replies, and the held-out rows."""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from envs.data import KINDS, LazyRows, Table, is_file, load_table

ELSEWHERE = {"question": ("prompt",), "answer": ("completion", "chosen")}  # TRL's names
BARE = "; bare texts are prompts: env=prompts env.columns.question=text, with a reward"
EVAL_SHARE, EVAL_ROWS = 0.1, 200  # size of the split without eval data, at most


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

    Uses the column `messages` if it exists, else `question` and `answer`, each a text or messages
    ("question" then has the unchanged cell), else TRL's prompt and completion (or chosen);
    `columns` renames the first three. Without `answers` an answer is read only if `columns` names
    it. Eval rows: `eval_dataset`, else `eval_split` of a hub
    data set, else a seeded tenth of the data (`split_off`); a file has no splits.
    """
    if not dataset:
        raise ValueError(
            f"env.dataset: expected a file ({', '.join(KINDS)}) or a hub id, got none; give one "
            "with env.dataset=/path/to/it"
        )
    names = {name: column for name, column in (columns or {}).items() if column is not None}
    tables = {"train": load_table(dataset, split=split)}
    if eval_dataset or (eval_split and not is_file(dataset)):
        tables["eval"] = load_table(eval_dataset or dataset, split=eval_split or split)
    chats = {name: _chats(table, names, answers) for name, table in tables.items()}
    if "eval" in chats:
        return chats
    rows = chats["train"]
    parts = split_off((json.dumps(row["messages"]) for row in rows), seed=seed)
    listed = isinstance(rows, list)
    splits = ([rows[i] for i in p] if listed else LazyRows(rows.__getitem__, p) for p in parts)
    return dict(zip(("train", "eval"), splits, strict=True))


def _chats(table: Table, names: Mapping[str, str], answers: bool) -> Sequence[dict[str, Any]]:
    """Return prompt and answer of each row of a table."""
    column, wants_answer = names.get("messages", "messages"), "answer" in names
    by_question = "question" in names or wants_answer
    if "messages" in names or (column in table.columns and not by_question):
        table.require("messages", column)
        return table.each(lambda index: _chat(table, index, column))
    names = {**_of_trl(table), **names}
    question = table.require(
        "question", names.get("question", "question"), BARE * (table.columns == ["text"])
    )
    answer = None
    if answers or wants_answer:
        alone = f"; without answers: env=prompts env.columns.question={question}, with a reward"
        answer = table.require("answer", names.get("answer", "answer"), alone)

    def read(index: int) -> dict[str, Any]:
        out = {"index": index, "messages": table.turns(index, question, "user")}
        out |= {"columns": table.rows[index], "question": table.rows[index][question]}
        if answer is None:
            return out
        *more, last = table.turns(index, answer, "assistant")
        return out | {"messages": out["messages"] + more, "answer": last["content"]}

    return table.each(read)


def _of_trl(table: Table) -> dict[str, str]:
    """Return TRL's columns of a table, by leash's names."""
    return {
        name: next(other for other in others if other in table.columns)
        for name, others in ELSEWHERE.items()
        if name not in table.columns and not set(others).isdisjoint(table.columns)
    }


def _chat(table: Table, index: int, column: str) -> dict[str, Any]:
    """Return prompt and answer of a row that holds a full chat."""
    messages = table.messages(index, column)
    last = messages[-1]
    if last["role"] != "assistant" or not last["content"].strip() or len(messages) < 2:
        expected = "a prompt and then a reply of the assistant as the last message"
        if last["role"] == "user":
            expected += f", or for prompts alone env.columns.question={column}"
        raise table.error(index, column, expected, [m["role"] for m in messages])
    return {
        "index": index,
        "messages": messages[:-1],
        "answer": last["content"],
        "columns": table.rows[index],
    }


def split_off(prompts: Iterable[str], *, seed: int = 0) -> tuple[list[int], list[int]]:
    """Return the indices of train and eval rows for data without an eval split.

    A tenth of the distinct prompts, at most 200, goes to eval; equal prompts stay together.

    >>> train, held_out = split_off(["a", "b", "a", "c"])
    >>> len({"abac"[i] for i in held_out}), sorted([*train, *held_out])
    (1, [0, 1, 2, 3])
    """
    hashes = [blake2b(prompt.encode(), digest_size=8).digest() for prompt in prompts]
    distinct = list(dict.fromkeys(hashes))
    if len(distinct) < 2:
        raise ValueError(
            f"expected at least 2 different prompts to split eval rows off, got {len(distinct)}; "
            "give env.eval_dataset"
        )
    count = min(max(1, int(len(distinct) * EVAL_SHARE)), EVAL_ROWS)
    chosen = set(random.Random(seed).sample(distinct, count))
    train, held_out = list[int](), list[int]()
    for index, key in enumerate(hashes):
        (held_out if key in chosen else train).append(index)
    return train, held_out
