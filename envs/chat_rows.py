"""Chats of a data set: the prompt of each row, its right reply, and what is held out."""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from envs.data import KINDS, LazyRows, Table, is_file, load_table

COLUMNS = ("messages", "question", "answer")
ELSEWHERE = {"question": ("prompt",), "answer": ("completion", "chosen")}  # what TRL calls them
BARE = (  # what is said of rows of which nothing is to be learnt or asked
    "; bare texts are not supported: SFT takes chats, messages or question and answer; texts as "
    "prompts are env=prompts env.columns.question=text, with a reward"
)
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
    messages (then "question" has the cell as it is); `columns` renames any of the three, and where
    there is no such column TRL's prompt and completion (or chosen) are taken. Without `answers` an
    answer is read only if `columns` names it. Eval rows: `eval_dataset`, else `eval_split` of a hub
    data set, else a seeded tenth of the data (`split_off`); a file has no splits.
    """
    if not dataset:
        raise ValueError(
            f"env.dataset: expected a file ({', '.join(KINDS)}) or a hub id, got none; give one "
            "with env.dataset=/path/to/it"
        )
    unknown = sorted(set(columns or {}) - set(COLUMNS))
    if unknown:
        raise ValueError(f"env.columns: expected keys among {sorted(COLUMNS)}, got {unknown}")
    names = {name: column for name, column in (columns or {}).items() if column is not None}
    tables = {"train": load_table(dataset, split=split)}
    if eval_dataset or (eval_split and not is_file(dataset)):
        tables["eval"] = load_table(eval_dataset or dataset, split=eval_split or split)
    found = {name: _chats(table, names, answers) for name, table in tables.items()}
    if "eval" in found:
        return found
    rows = found["train"]
    parts = split_off((json.dumps(row["messages"]) for row in rows), seed=seed)
    splits = [
        [rows[i] for i in part] if isinstance(rows, list) else LazyRows(rows.__getitem__, part)
        for part in parts
    ]
    return dict(zip(("train", "eval"), splits, strict=True))


def _chats(table: Table, names: Mapping[str, str], answers: bool) -> Sequence[dict[str, Any]]:
    """Return prompt and answer of each row of a table."""
    column = names.get("messages", "messages")
    by_question, asked = "question" in names or "answer" in names, "answer" in names
    if "messages" in names or (column in table.columns and not by_question):
        table.require("messages", column)
        remedy = f"if these are prompts alone, give env.columns.question={column} in its place"
        return table.each(lambda index: _chat(table, index, column), {column: remedy})
    names = {**_of_trl(table), **names}
    question = table.require(
        "question", names.get("question", "question"), BARE * (table.columns == ["text"])
    )
    answer = None
    there = f"=<column>, of {', '.join(table.columns)}"
    remedies = {question: f"name a column of prompts: env.columns.question{there}"}
    if answers or asked:
        alone = f"; without answers: env=prompts env.columns.question={question}, with a reward"
        answer = table.require("answer", names.get("answer", "answer"), alone)
        remedies.setdefault(answer, f"name a column of texts: env.columns.answer{there}")

    def read(index: int) -> dict[str, Any]:
        out = {"index": index, "messages": table.turns(index, question, "user")}
        out |= {"columns": table.cells(index), "question": table.rows[index][question]}
        if answer is None:
            return out
        *more, last = table.turns(index, answer, "assistant")
        return out | {"messages": out["messages"] + more, "answer": last["content"]}

    return table.each(read, remedies)


def _of_trl(table: Table) -> dict[str, str]:
    """Return the columns of a table that TRL calls otherwise, by what they are called here."""
    there = {
        name: next((other for other in others if other in table.columns), None)
        for name, others in ELSEWHERE.items()
        if name not in table.columns
    }
    return {name: column for name, column in there.items() if column is not None}


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


def split_off(prompts: Iterable[str], *, seed: int = 0) -> tuple[list[int], list[int]]:
    """Return the indices of the train and of the eval rows, where no eval data is given.

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
    chosen = {distinct[i] for i in random.Random(seed).sample(range(len(distinct)), count)}
    places = range(len(hashes))
    return [i for i in places if hashes[i] not in chosen], [
        i for i in places if hashes[i] in chosen
    ]
