"""Parse tool calls that no chat template writes: XML blocks, or one JSON object.

envs/tools/reading.py reads calls that a chat template writes. TorchRL's tools and the adapter of
verifiers use these parsers, under TorchRL's names.
A parser is any function of a response that returns {"text", "calls", "meta"}: the response without
its calls, `ToolCall`s in order, and their count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict


@dataclass(frozen=True)
class ToolCall:
    """The tool's name, its arguments, and an optional label of the caller."""

    tool: str
    args: dict[str, Any]
    tag: str | None = None


class ParseResult(TypedDict):
    """The result of a parser."""

    text: str
    calls: list[ToolCall]
    meta: dict[str, Any]


Parser = Callable[[str], ParseResult]


class PatternParser:
    r"""Read calls by a pattern of two groups, the name and the JSON arguments.

    Arguments that are not a JSON object become the argument "raw".

    >>> PatternParser(r"CALL\[(.*?)\]\((.*?)\)")('CALL[add]({"a": 1})')["calls"][0].args
    {'a': 1}
    """

    def __init__(self, pattern: str = r"<tool>(.*?)\n(.*?)</tool>") -> None:
        self.pattern = re.compile(pattern, re.DOTALL)

    def __call__(self, response: str) -> ParseResult:
        """Return the calls of a response."""
        calls = [self._call(match) for match in self.pattern.finditer(response)]
        return _result(self.pattern.sub("", response), calls)

    def _call(self, match: re.Match[str]) -> ToolCall:
        return ToolCall(match[1].strip(), _arguments(match[2]))


class XMLBlockParser(PatternParser):
    """Read blocks <tool name="..." tag="...">{"argument": value}</tool>; the tag is optional.

    >>> parsed = XMLBlockParser()('<tool name="add" tag="A">{"a": 1}</tool> Done.')
    >>> parsed["calls"], parsed["text"]
    ([ToolCall(tool='add', args={'a': 1}, tag='A')], 'Done.')
    """

    def __init__(self) -> None:
        super().__init__(r'<tool\s+name="([^"]+)"(?:\s+tag="([^"]*)")?\s*>(.*?)</tool>')

    def _call(self, match: re.Match[str]) -> ToolCall:
        return ToolCall(match[1], _arguments(match[3]), match[2])


class JSONCallParser:
    """Read {"message": "...", "tools": [{"tool": "...", "args": {...}, "tag": "..."}]}.

    The response is this object, possibly in a ```json block, or a dict; any other text has no
    calls.

    >>> response = '{"message": "Hm.", "tools": [{"tool": "add", "args": {"a": 1}}]}'
    >>> parsed = JSONCallParser()(response)
    >>> parsed["text"], parsed["calls"][0].tool
    ('Hm.', 'add')
    """

    FENCE = re.compile(r"\A\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*\Z", re.DOTALL)

    def __call__(self, response: str | dict[str, Any]) -> ParseResult:
        """Return the calls of a response."""
        data: Any = response
        if isinstance(response, str):
            fenced = self.FENCE.match(response)
            data = _json(fenced[1] if fenced else response)
            if not isinstance(data, dict):
                return _result(response, [])
        tools = data.get("tools") or []
        calls = [_call(tool) for tool in (tools if isinstance(tools, list) else [tools])]
        return _result(str(data.get("message", "")), calls)


def _call(tool: Any) -> ToolCall:
    if not isinstance(tool, dict):
        return ToolCall(str(tool), {})
    args = tool.get("args") or {}
    args = args if isinstance(args, dict) else {"raw": args}
    return ToolCall(str(tool.get("tool", "")), args, tool.get("tag"))


def _result(text: str, calls: list[ToolCall]) -> ParseResult:
    return {"text": text.strip(), "calls": calls, "meta": {"count": len(calls)}}


def _arguments(body: str) -> dict[str, Any]:
    body = body.strip()
    args = _json(body) if body else {}
    return args if isinstance(args, dict) else {"raw": body}


def _json(text: str) -> Any:
    """Parse a JSON text; None for any other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
