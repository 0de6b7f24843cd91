"""Convert between messages as dicts and the columns of a History.

A record is a message with the fields of History, without those that are None.
"""

from collections.abc import Sequence
from typing import Any

from tensordict import NonTensorData, NonTensorStack, TensorDict

PADDING_ROLE = "<none>"
OPTIONAL = (
    "tool_calls",
    "tool_responses",
    "tool_call_id",
    "name",
    "reasoning_content",
    "thinking",
    "reasoning",
    "tools",  # tools of the whole chat, on its first message
    "chat_template_kwargs",  # on the first message too, in a list
)
OF_CHAT = ("tools", "chat_template_kwargs")
FIELDS = ("role", "content", "is_complete", *OPTIONAL)
Message = dict[str, Any]


def columns(records: Sequence[dict[str, Any]]) -> TensorDict:
    """Return the columns of a [T] history of records."""
    done = {}
    for name in FIELDS:
        values = [record.get(name) for record in records]
        if name not in OPTIONAL or any(v is not None for v in values):
            if name in OPTIONAL:  # a list is the value of one message
                done[name] = NonTensorStack(*[NonTensorData(v) for v in values])
            else:
                done[name] = NonTensorStack.from_list(values)
    return TensorDict(done, [len(records)])


def records_of(history: Any) -> list[dict[str, Any]]:
    """Return the fields of a history [], [T] or [1, T], message by message, without None."""
    while history.ndim > 1 and history.shape[0] == 1:
        history = history[0]
    rows = [history] if history.ndim == 0 else None
    size = 1 if rows else history.shape[0]
    records: list[dict[str, Any]] = [{} for _ in range(size)]
    for name in FIELDS:
        values = history.get(name, None)
        if values is not None and name in OPTIONAL:  # values are lists: read each message
            values = [m.get(name, None) for m in rows or history.unbind(0)]
            values = [v if v is None or isinstance(v, str) else list(v) for v in values]
        elif not isinstance(values, list):
            values = [values] * size
        for record, value in zip(records, values, strict=True):
            if value is not None:
                record[name] = value
    return records


def visible(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages for a template: no padding, no flags."""
    shown = (record for record in records if record["role"] != PADDING_ROLE)
    return [{k: v for k, v in record.items() if k != "is_complete"} for record in shown]


def checked(message: Any, index: int) -> dict[str, Any]:
    """Return a message as a record; raise ValueError if it is malformed."""
    if not isinstance(message, dict):
        raise ValueError(f"message {index}: expected a dict, got {type(message).__name__}")
    record = {k: v for k, v in message.items() if v is not None}
    if "tool_calls" in record:
        record.setdefault("content", "")
    for name in ("role", "content"):
        if not isinstance(record.get(name), str):
            got = type(message.get(name)).__name__
            raise ValueError(f"message {index}: expected {name!r} to be a str, got {got}")
    if unknown := sorted(set(record) - set(FIELDS)):
        raise ValueError(f"message {index}: got the fields {unknown}, expected {list(FIELDS)}")
    return {"is_complete": True, **record}


def check_messages(messages: Sequence[Message]) -> list[Message]:
    """Return the messages as a list; raise ValueError if there is none or one is malformed."""
    if not messages:
        raise ValueError("expected at least one message, got an empty chat")
    for i, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        silent = content is None and message.get("tool_calls")
        if not isinstance(role, str) or not (isinstance(content, str) or silent):
            raise ValueError(f"message {i}: expected a role and a content, got {message!r:.60}")
        if content and content.encode(errors="ignore").decode() != content:
            raise ValueError(f"message {i}: got lone surrogates in {content[:40]!a}")
    return [m if m.get("content") is not None else {**m, "content": ""} for m in messages]
