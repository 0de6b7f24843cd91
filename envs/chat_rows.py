"""Chats of a data set: the prompt of each row, its right reply, and what is held out."""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from envs.data import READERS, Made, Table, is_file, load_table, made

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
            f"env.dataset: expected a file ({', '.join(READERS)}) or a hub id, got none; give one "
            "with env.dataset=/path/to/it"
        )
    unknown = sorted(set(columns or {}) - set(COLUMNS))
    if unknown:
        raise ValueError(f"env.columns: expected keys among {sorted(COLUMNS)}, got {unknown}")
    names = {name: column for name, column in (columns or {}).items() if column is not None}
    tables = {"train": load_table(dataset, split=split)}
    if eval_dataset or (eval_split and not is_file(dataset)):
        tables["eval"] = load_table(eval_dataset or dataset, split=eval_split or split)
    if not all(isinstance(table.rows, list) for table in tables.values()):
        return _on_disk(tables, names, answers, seed)
    found = {name: _chats(table, names, answers) for name, table in tables.items()}
    if "eval" in found:
        return found
    train = found["train"]
    parts = split_off((json.dumps(row["messages"]) for row in train), seed=seed)
    return {n: [train[i] for i in p] for n, p in zip(("train", "eval"), parts, strict=True)}


def _on_disk(
    tables: Mapping[str, Table], names: Mapping[str, str], answers: bool, seed: int
) -> dict[str, Sequence[dict[str, Any]]]:
    """Return the rows of tables on disk, which are checked and split once for a content."""
    from envs.mapped_rows import place_for, shown
    from policies.cache import build_once

    def look(folder: Path) -> None:
        train, *_ = [_chats(table, names, answers) for table in tables.values()]
        if "eval" not in tables:
            prompts = (json.dumps(row["messages"]) for row in shown(train, "holding rows out"))
            for name, part in zip(("train", "eval"), split_off(prompts, seed=seed), strict=True):
                part.tofile(folder / name)

    origins = {name: getattr(table.rows, "origin", None) for name, table in tables.items()}
    folder = place_for("checked", origins, dict(names), answers, seed)
    build_once(folder, look)
    found = {name: _chats(table, names, answers, checked=True) for name, table in tables.items()}
    if "eval" not in tables:
        train, parts = found["train"], ("train", "eval")
        places = {name: np.memmap(folder / name, np.int32, mode="r") for name in parts}
        found = {name: Made(train.__getitem__, part) for name, part in places.items()}
    for name, rows in found.items():
        if isinstance(rows, Made):
            rows.origin = [folder.name, name]
    return found


def _chats(
    table: Table, names: Mapping[str, str], answers: bool, *, checked: bool = False
) -> Sequence[dict[str, Any]]:
    """Return prompt and answer of each row of a table."""
    column = names.get("messages", "messages")
    by_question, asked = "question" in names or "answer" in names, "answer" in names
    if "messages" in names or (column in table.columns and not by_question):
        table.require("messages", column)
        remedy = f"if these are prompts alone, give env.columns.question={column} in its place"
        return table.each(lambda index: _chat(table, index, column), remedy, checked=checked)
    names = {**_of_trl(table), **names}
    question = table.require(
        "question", names.get("question", "question"), BARE * (table.columns == ["text"])
    )
    there = f"=<column>, of {', '.join(table.columns)}"
    remedy = f"name a column of prompts: env.columns.question{there}"
    prompts = table.each(
        lambda index: table.turns(index, question, "user"), remedy, checked=checked
    )
    replies = None
    if answers or asked:
        alone = f"; without answers: env=prompts env.columns.question={question}, with a reward"
        answer = table.require("answer", names.get("answer", "answer"), alone)
        remedy = f"name a column of texts: env.columns.answer{there}"
        replies = table.each(
            lambda index: table.turns(index, answer, "assistant"), remedy, checked=checked
        )

    def row(i: int) -> dict[str, Any]:
        out = {"index": i, "messages": prompts[i], "columns": table.cells(i)}
        out["question"] = table.rows[i][question]
        if replies is None:
            return out
        *more, last = replies[i]
        return out | {"messages": out["messages"] + more, "answer": last["content"]}

    return made(row, table.places)


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


def split_off(prompts: Iterable[str], *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the train and of the eval rows, where no eval data is given.

    A tenth of the distinct prompts, at most 200, goes to eval; equal prompts stay together.

    >>> train, held_out = split_off(["a", "b", "a", "c"])
    >>> len({"abac"[i] for i in held_out}), sorted([*train.tolist(), *held_out.tolist()])
    (1, [0, 1, 2, 3])
    """
    digests = bytearray()  # 8 bytes a prompt, no object for each
    for prompt in prompts:
        digests += blake2b(prompt.encode(), digest_size=8).digest()
    hashes, count = np.frombuffer(digests, np.uint64), len(digests) // 8
    lowest = np.frombuffer(digests, np.uint8)[::8]
    first = np.zeros(count, bool)  # whether a row is the first with its prompt
    for part in range(16):  # sorting takes many times the memory of the hashes
        here = np.flatnonzero(lowest % 16 == part)
        first[here[np.unique(hashes[here], return_index=True)[1]]] = True
    if (distinct := int(np.count_nonzero(first))) < 2:
        raise ValueError(
            f"expected at least 2 different prompts to split eval rows off, got {distinct}; "
            "give env.eval_dataset"
        )
    some = min(max(1, int(distinct * EVAL_SHARE)), EVAL_ROWS)
    drawn = np.array(random.Random(seed).sample(range(distinct), some), np.int32)
    places = np.searchsorted(np.cumsum(first, dtype=np.int32), drawn + 1)  # of the n-th first ones
    chosen = hashes[places]
    held_out = np.concatenate([np.isin(part, chosen) for part in np.array_split(hashes, 16)])
    del hashes, lowest, digests, first
    rows = np.arange(count, dtype=np.int32)
    return rows[~held_out], rows[held_out]
