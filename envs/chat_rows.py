"""Load the chats of a data set: prompts, right replies, and the held-out rows.

Of a message the keys of `KEYS` are kept for the template; `weight` and `train` say whether an
assistant message is learnt. Columns and keys that nothing reads are in "unused" of a row.
"""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from envs.data import KINDS, ROLES, LazyRows, Message, Table, is_file, load_table

ELSEWHERE = {"question": ("prompt",), "answer": ("completion", "chosen")}  # TRL's names
BARE = "; bare texts are prompts: env=prompts env.columns.question=text, with a reward"
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
KEYS = ("tool_calls", "tool_call_id", "name", *THOUGHTS)
LEARNT = ("weight", "train")  # OpenAI's key, and axolotl's
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
    rejected: bool = False,
) -> dict[str, Sequence[dict[str, Any]]]:
    """Return the checked "train" and "eval" rows of a data set.

    A row has "messages" (the prompt), "answer" (the last reply), "index", "columns": all its
    cells by column name, None where the file has none, and "unused": the columns (and keys of
    messages) that are in neither prompt nor answer. If there are any: "tools", "reply" (what the
    last reply has beside its text), and "unlearnt": the indices of messages with a weight of 0.

    Uses the column `messages` if it exists, else `question` and `answer`, each a text or messages
    ("question" then has the unchanged cell), else TRL's prompt and completion (or chosen);
    `columns` renames the first three. Without `answers` an answer is read only if `columns` names
    it. `rejected`: rows also have the response of the column "rejected". Eval rows:
    `eval_dataset`, else `eval_split` of a hub data set, else a seeded tenth of the data
    (`split_off`); a file has no splits.
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
    if rejected:
        chats = {name: _with_rejected(tables[name], rows) for name, rows in chats.items()}
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
        cells = Cells(table, [table.require("messages", column)])
        return table.each(lambda index: _chat(cells, index, column))
    names = {**_of_trl(table), **names}
    question = table.require(
        "question", names.get("question", "question"), BARE * (table.columns == ["text"])
    )
    answer = None
    if answers or wants_answer:
        alone = f"; without answers: env=prompts env.columns.question={question}, with a reward"
        answer = table.require("answer", names.get("answer", "answer"), alone)
    cells = Cells(table, [question] if answer is None else [question, answer])

    def read(index: int) -> dict[str, Any]:
        prompt = cells.turns(index, question, "user", "tool")
        if answer is None:
            return cells.row(index, prompt) | {"question": table.rows[index][question]}
        turns = cells.turns(index, answer, "assistant")
        chat = cells.joined(index, answer, prompt, turns)
        out = cells.row(index, chat[:-1], reply=chat[-1])
        return out | {"question": table.rows[index][question]}

    return table.each(read)


@dataclass(frozen=True)
class Cells:
    """Read the chats in the cells of a table; `read` are the columns with chats."""

    table: Table
    read: list[str]
    unused: list[str] = field(default_factory=list)  # other columns, and unknown keys of messages

    def __post_init__(self) -> None:
        read = (*self.read, "tools")
        self.unused.extend(name for name in self.table.columns if name not in read)

    def row(
        self, index: int, prompt: list[Message], *, reply: Message | None = None
    ) -> dict[str, Any]:
        """Return a row of a prompt and its reply."""
        cells, chat = self.table.rows[index], prompt if reply is None else [*prompt, reply]
        off = [i for i, message in enumerate(chat) if not message.get("weight", 1)]
        chat = [{k: v for k, v in message.items() if k != "weight"} for message in chat]
        out: dict[str, Any] = {"index": index, "messages": chat[: len(prompt)]}
        out |= {"columns": cells, "unused": self.unused}
        if tools := self._tools(index, cells.get("tools")):
            out["tools"] = tools
        if off:
            out["unlearnt"] = off
        if reply is None:
            return out
        more = {k: v for k, v in chat[-1].items() if k not in ("role", "content")}
        return out | {"answer": reply["content"]} | ({"reply": more} if more else {})

    def messages(self, index: int, column: str) -> list[Message]:
        """Return the chat of a cell; ValueError if the cell is not a list of messages."""
        value = self.table.rows[index].get(column)
        if not isinstance(value, list) or not value:
            raise self.table.error(index, column, "a list of messages", value)
        return [self._message(index, f"{column}[{i}]", m) for i, m in enumerate(value)]

    def turns(self, index: int, column: str, role: str, *roles: str) -> list[Message]:
        """Return a cell as messages: a text gets `role`, a chat must end with one of the roles."""
        value = self.table.rows[index].get(column)
        if role == "assistant" and isinstance(value, (int, float)):  # an answer such as 42
            value = json.dumps(value)
        if not isinstance(value, list):
            if not isinstance(value, str) or not value.strip():
                raise self.table.error(index, column, "a text or a list of messages", value)
            return [{"role": role, "content": value}]
        messages = self.messages(index, column)
        if messages[-1]["role"] not in (role, *roles) or _is_empty(messages[-1]):
            got = [m["role"] for m in messages]
            raise self.table.error(index, column, f"a text of the {role} as the last message", got)
        return messages

    def joined(
        self, index: int, column: str, prompt: list[Message], turns: list[Message]
    ) -> list[Message]:
        """Return prompt and answer as a chat; an answer may be the whole chat, prompt included."""
        if turns[0]["role"] not in ("system", "user"):
            return [*prompt, *turns]
        texts = [_key(message) for message in turns[:-1]]
        if not all(_key(message) in texts for message in prompt):
            expected = "a response alone, or the chat of the prompt and a response"
            raise self.table.error(index, column, expected, [m["role"] for m in turns])
        return turns

    def _message(self, index: int, where: str, message: Any) -> Message:
        """Return a message with the keys that templates read, and its weight if that is 0."""
        if not isinstance(message, Mapping):
            raise self.table.error(index, where, "a dict with role and content", message)
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise self.table.error(index, f"{where}.role", " | ".join(ROLES), role)
        if content is None and message.get("tool_calls"):
            content = ""
        if not isinstance(content, str):
            raise self.table.error(index, f"{where}.content", "a text", content)
        more = {key: message[key] for key in KEYS if message.get(key)}
        if "tool_calls" in more:
            more["tool_calls"] = self._calls(index, where, more["tool_calls"])
        known = ("role", "content", *KEYS, *LEARNT)
        names = [f"{where.partition('[')[0]}[].{k}" for k in message if k not in known]
        self.unused.extend(name for name in names if name not in self.unused)
        weights = [message[key] for key in LEARNT if message.get(key) is not None]
        if any(weight not in (0, 1) for weight in weights):
            raise self.table.error(index, f"{where}.weight", "0 or 1", weights[0])
        off = role == "assistant" and not all(weights)
        return {"role": role, "content": content} | more | ({"weight": 0} if off else {})

    def _calls(self, index: int, where: str, calls: Any) -> list[Message]:
        """Return tool calls in OpenAI's form, their arguments as a dict or its JSON."""
        out = []
        for call in calls if isinstance(calls, list) else [calls]:
            function = call.get("function", call) if isinstance(call, Mapping) else None
            try:
                arguments = without_none(function["arguments"] or {})
                dict(json.loads(arguments) if isinstance(arguments, str) else arguments)
                name = {"name": function["name"], "arguments": arguments}
            except (TypeError, KeyError, ValueError):
                form = "calls as {function: {name, arguments (JSON)}}"
                raise self.table.error(index, f"{where}.tool_calls", form, calls) from None
            call_id = {"id": call["id"]} if call.get("id") else {}
            out.append({**call_id, "type": "function", "function": name})
        return out

    def _tools(self, index: int, value: Any) -> list[Message]:
        """Return the schemas of a row's tools: a list, or its JSON."""
        try:
            tools = json.loads(value) if isinstance(value, str) and value else value or []
        except ValueError:
            tools = None
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise self.table.error(index, "tools", "a list of schemas of functions", value)
        return without_none(tools)


def without_none(value: Any) -> Any:
    """Return a value without the keys that a table adds: each row has those of all rows, as None.

    >>> without_none([{"a": 1, "b": None, "c": {"d": None}}])
    [{'a': 1, 'c': {}}]
    """
    if isinstance(value, Mapping):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    return [without_none(v) for v in value] if isinstance(value, list) else value


def _key(message: Message) -> tuple[str, str]:
    return message["role"], message["content"].strip()


def _is_empty(message: Message) -> bool:
    return not message["content"].strip() and not message.get("tool_calls")


def _with_rejected(table: Table, rows: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return rows with the response of the column "rejected" to the same prompt."""
    cells = Cells(table, ["rejected"])

    def read(index: int) -> dict[str, Any]:
        row = rows[index]
        turns = cells.turns(index, "rejected", "assistant")
        chat = cells.joined(index, "rejected", row["messages"], turns)
        out = cells.row(index, chat[:-1], reply=chat[-1])
        if "reply" in row or "reply" in out or len(chat) != len(row["messages"]) + 1:
            raise table.error(index, "rejected", "two texts in reply to one prompt", turns)
        unused = [name for name in row["unused"] if name in cells.unused]
        return {**row, "rejected": out["answer"], "unused": unused}

    return table.each(read)


def _of_trl(table: Table) -> dict[str, str]:
    """Return TRL's columns of a table, by leash's names."""
    return {
        name: next(other for other in others if other in table.columns)
        for name, others in ELSEWHERE.items()
        if name not in table.columns and not set(others).isdisjoint(table.columns)
    }


def _chat(cells: Cells, index: int, column: str) -> dict[str, Any]:
    """Return prompt and answer of a row that holds a full chat."""
    messages = cells.messages(index, column)
    last = messages[-1]
    if last["role"] != "assistant" or _is_empty(last) or len(messages) < 2:
        expected = "a prompt and then a reply of the assistant as the last message"
        if last["role"] == "user":
            expected += f", or for prompts alone env.columns.question={column}"
        raise cells.table.error(index, column, expected, [m["role"] for m in messages])
    return cells.row(index, messages[:-1], reply=last)


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
