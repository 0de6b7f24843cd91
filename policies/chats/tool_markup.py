"""Calls and results of tools inside a content: <tool_call>{json}</tool_call>, <tool_response>."""

import json
import re
from collections.abc import Iterator
from typing import Any

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)


def _calls(content: str) -> Iterator[dict[str, Any]]:
    """Yield the calls in a content; what is no JSON object is left out."""
    for text in _CALL.findall(content):
        try:
            call = json.loads(text)
        except ValueError:
            continue
        if isinstance(call, dict):
            yield call


def readings(role: str, content: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the messages that a turn may stand for, the one with least markup in it first.

    The last one is the plain content.
    """
    message = {"role": role, "content": content}
    calls = list(_calls(content)) if role == "assistant" else []
    results = _RESULT.findall(content)
    if calls:
        before, _, _ = content.partition("<tool_call>")
        if not _CALL.sub("", content[len(before) :]).strip():
            yield [{**message, "content": before.removesuffix("\n"), "tool_calls": calls}]
        yield [{**message, "tool_calls": calls}]
    if results:
        if not _RESULT.sub("", content).strip():
            each = ({"content": r, "tool_responses": [r]} for r in results)
            yield [{**message, "role": "tool", **part} for part in each]
        yield [{**message, "tool_responses": results}]
    yield [message]
