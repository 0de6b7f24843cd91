"""Read chats from the cells of a table: messages with the keys that templates read.

Messages are OpenAI's (role, content) or ShareGPT's (from, value). The keys in `KEYS` are kept for
the template. An assistant message whose `weight`, `train` or `loss` is 0 is not in the loss.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from math import isfinite
from typing import Any

from envs.data import Table
from envs.rows import Message

ROLES = {  # name in data -> role
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",  # the text is a call as JSON
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
}
TEXTS = ("text", "input_text", "output_text")  # types of content parts
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
KEYS = ("tool_calls", "tool_call_id", "name", *THOUGHTS)
PARAGRAPHS = ("text", "content", "contents", "sentences")  # keys of a document's text
LEARNT = ("weight", "train", "loss")  # keys of OpenAI, axolotl and MS-Swift
KNOWN = {"role", "content", "from", "value", "function_call", *KEYS, *LEARNT}
WRAPPED = re.compile(r"\s*<tool_response>\s*(.*?)\s*</tool_response>\s*", re.DOTALL)


@dataclass(frozen=True)
class Cells:
    """Read the cells of a table; errors name its file, `unused` collects unknown message keys.

    `pairs`: responses may be empty; such a pair is left out.
    """

    table: Table
    unused: dict[str, None]
    pairs: bool = False

    def messages(self, index: int, column: str, value: Any) -> list[Message]:
        """Return the chat of a cell; raise ValueError if the cell is not a list of messages."""
        if not isinstance(value, list) or not value:
            raise self.table.error(index, column, "a list of messages", value)
        return [self._message(index, column, i, message) for i, message in enumerate(value)]

    def chat(self, index: int, column: str, value: Any) -> list[Message]:
        """Return a chat up to its last assistant message; drop tool results after it."""
        messages = self.messages(index, column, value)
        while messages[1:] and messages[-1]["role"] == "tool":
            messages.pop()
        last = messages[-1]
        if not self._is_response(last) or len(messages) < 2:
            expected = "a prompt and then a response of the assistant as the last message"
            if last["role"] == "user":
                expected += f", or for prompts alone env=prompts env.columns.question={column}"
            raise self.table.error(index, column, expected, [m["role"] for m in messages])
        return messages

    def prompt(self, index: int, column: str, value: Any) -> list[Message]:
        """Return a prompt; a text is a message of the user."""
        messages = self._turns(index, column, value, "user")
        if messages[-1]["role"] not in ("user", "tool") or is_empty(messages[-1]):
            expected = "a prompt that ends with a message of the user or a tool"
            if messages[-1]["role"] == "assistant":
                expected += ", not with a response or its beginning"
            raise self.table.error(index, column, expected, [m["role"] for m in messages])
        return messages

    def response(
        self, index: int, column: str, value: Any, *, prompt: list[Message]
    ) -> list[Message]:
        """Return prompt and response; the response's cell may contain the prompt too."""
        turns = self._turns(index, column, value, "assistant")
        roles = [message["role"] for message in turns]
        if not self._is_response(turns[-1]):
            raise self.table.error(index, column, "the assistant's message at the end", roles)
        if roles[0] not in ("system", "user"):
            return [*prompt, *turns]
        texts = [role_and_text(message) for message in turns[:-1]]
        if not all(role_and_text(message) in texts for message in prompt):
            expected = "a response alone, or the chat of the prompt and a response"
            raise self.table.error(index, column, expected, roles)
        return turns

    def text(self, index: int, column: str, value: Any) -> str:
        """Return a text, or the paragraphs of a list of texts or of {title, text or sentences}."""
        if isinstance(value, Mapping) and isinstance(value.get("title"), list):  # HotpotQA
            if len({len(each) for each in value.values()}) > 1:
                raise self.table.error(index, column, "lists of one length", value)
            columns = zip(*value.values(), strict=True)
            value = [dict(zip(value, each, strict=True)) for each in columns]
        texts = []
        for each in value if isinstance(value, list) else [value]:
            parts = [each]
            if isinstance(each, Mapping):
                body = next((each[key] for key in PARAGRAPHS if each.get(key)), None)
                sentences = isinstance(body, list) and all(isinstance(s, str) for s in body)
                parts = [each.get("title") or "", "".join(body) if sentences else body]
            if not all(isinstance(part, str) for part in parts):
                expected = "a text, or a list of texts or of {title, text}"
                raise self.table.error(index, column, expected, value)
            texts.append("\n".join(filter(None, parts)))
        return "\n\n".join(texts)

    def history(self, index: int, column: str, value: Any) -> list[Message]:
        """Return the messages of earlier turns, from pairs of texts or a list of messages."""
        if isinstance(value, list) and all(isinstance(turn, Mapping) for turn in value):
            return self.messages(index, column, value)
        pairs = isinstance(value, list) and all(isinstance(turn, list) for turn in value)
        if not pairs or not all(len(turn) == 2 for turn in value):
            raise self.table.error(index, column, "pairs of a prompt and a response", value)
        pairs = [dict(zip(("user", "assistant"), turn, strict=True)) for turn in value]
        chat = [{"role": role, "content": text} for pair in pairs for role, text in pair.items()]
        return self.messages(index, column, chat)

    def right_answers(self, index: int, column: str, value: Any) -> list[str]:
        """Return the texts of a cell with right answers; [] for a response.

        Lists and objects have several right answers: [Lima, ...] (NQ), {text: [...]} (SQuAD),
        {target: [...]} (Search-R1), {value, aliases: [...]} (TriviaQA). For a bool yes or no is
        right too (BoolQ).
        """
        if isinstance(value, bool):
            return ["yes", "true"] if value else ["no", "false"]
        if isinstance(value, Mapping) and {"text", "target", "value"} & value.keys():
            if {"numbers", "role"} & value.keys():  # Countdown: its target is no answer
                raise self.table.error(index, column, "a text or a list of right answers", value)
            cells = (value.get(key) or [] for key in ("text", "target", "value", "aliases"))
            lists = (each if isinstance(each, list) else [each] for each in cells)
            value = list(chain.from_iterable(lists))
        if not isinstance(value, list) or any(isinstance(each, Mapping) for each in value):
            return []
        texts = [each if isinstance(each, str) else json.dumps(each) for each in value]
        texts = [text for text in texts if text != "null"]
        if not any(text.strip() for text in texts):
            raise self.table.error(index, column, "a right answer", value)
        return list(dict.fromkeys(filter(str.strip, texts)))

    def tools(self, index: int, value: Any) -> list[Message]:
        """Return the schemas of a row's tools in OpenAI's form, from a list or its JSON."""
        try:
            tools = json.loads(value) if isinstance(value, str) and value else value or []
        except ValueError:
            tools = None
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise self.table.error(index, "tools", "a list of schemas of functions", value)
        return list(map(_as_function, self._clean(tools, value)))

    def variables(self, index: int, column: str, value: Any) -> Message:
        """Return the non-empty variables of a row's chat template, from a dict or its JSON."""
        read = value
        if isinstance(value, str):
            with suppress(ValueError):
                read = json.loads(value)
        if not isinstance(read, Mapping):
            raise self.table.error(index, column, "variables of the chat template", value)
        return {k: v for k, v in as_json(read).items() if v not in (None, "", [], {})}

    def _clean(self, value: Any, cell: Any) -> Any:
        """Return a value of a cell without the None keys that an Arrow table adds."""
        return as_json(value) if self.table.arrow and not isinstance(cell, str) else value

    def _is_response(self, message: Message) -> bool:
        return message["role"] == "assistant" and (self.pairs or not is_empty(message))

    def _turns(self, index: int, column: str, value: Any, role: str) -> list[Message]:
        """Return a cell as messages; a text, or a number as an answer, gets the role."""
        if role == "assistant" and isinstance(value, (int, float)) and isfinite(value):
            value = json.dumps(value)
        if isinstance(value, str) and (value.strip() or (self.pairs and role == "assistant")):
            return [{"role": role, "content": value}]
        if isinstance(value, Mapping):  # one message
            value = [value]
        if not isinstance(value, list):
            raise self.table.error(index, column, "a text or a list of messages", value)
        return self.messages(index, column, value)

    def _message(self, index: int, column: str, place: int, message: Any) -> Message:
        """Return a message with the keys that templates read, and its weight if that is 0."""
        where = f"{column}[{place}]"
        if not isinstance(message, Mapping):
            raise self.table.error(index, where, "a dict with role and content", message)
        speaker = message.get("role") or message.get("from")
        role = ROLES.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise self.table.error(index, f"{where}.role", " | ".join(ROLES), speaker)
        content = message.get("content")
        content = message.get("value") if content is None else content
        if role == message.get("role") and isinstance(content, str) and len(message) == 2:
            return {"role": role, "content": content}
        more = {key: message[key] for key in KEYS if message.get(key)}
        if message.get("function_call"):  # OpenAI's deprecated key
            more["tool_calls"] = message["function_call"]
        if speaker == "function_call":
            more, content = {"tool_calls": content}, ""
        if "tool_calls" in more:
            more["tool_calls"] = self._calls(index, where, more["tool_calls"])
        content = self._text(index, where, content, optional="tool_calls" in more)
        for key in THOUGHTS:
            if not isinstance(more.get(key, ""), str):
                raise self.table.error(index, f"{where}.{key}", "a text", more[key])
        if role == "tool" and (wrapped := WRAPPED.fullmatch(content)):
            content = wrapped[1]  # without Hermes' tags, which templates write themselves
        self.unused.update((f"{column}[].{key}", None) for key in message if key not in KNOWN)
        weights = {key: message[key] for key in LEARNT if message.get(key) is not None}
        for key, weight in weights.items():
            if weight not in (0, 1):
                raise self.table.error(index, f"{where}.{key}", "0 or 1", weight)
        off = role == "assistant" and not all(weights.values())
        return {"role": role, "content": content} | more | ({"weight": 0} if off else {})

    def _text(self, index: int, where: str, content: Any, *, optional: bool) -> str:
        """Return the text of a content, which may be in parts; if `optional`, None gives ""."""
        if content is None and optional:
            return ""
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        texts = []
        for part in parts:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind not in TEXTS or not isinstance(part.get("text"), str):
                got = content if kind in TEXTS else kind or part
                raise self.table.error(index, f"{where}.content", "text alone", got)
            texts.append(part["text"])
        return "".join(texts)

    def _calls(self, index: int, where: str, calls: Any) -> list[Message]:
        """Return tool calls in OpenAI's form, their arguments as a dict or its JSON."""
        out = []
        try:
            read = json.loads(calls) if isinstance(calls, str) else calls
            for call in read if isinstance(read, list) else [read]:
                function = call.get("function", call)
                arguments = self._clean(function["arguments"] or {}, calls)
                dict(json.loads(arguments) if isinstance(arguments, str) else arguments)
                call_id = {"id": call["id"]} if call.get("id") else {}
                name = {"name": function["name"], "arguments": arguments}
                out.append({**call_id, "type": "function", "function": name})
        except (AttributeError, TypeError, KeyError, ValueError):
            form = "calls as {function: {name, arguments (JSON)}}"
            raise self.table.error(index, f"{where}.tool_calls", form, calls) from None
        return out


def _as_function(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool in OpenAI's form; xLAM has properties as parameters."""
    if "function" in tool or "name" not in tool:
        return tool
    parameters = tool.get("parameters") or {}
    if "properties" not in parameters:
        parameters = {"type": "object", "properties": parameters}
    return {"type": "function", "function": {**tool, "parameters": parameters}}


def as_json(value: Any) -> Any:
    """Return a value of an Arrow table as in JSON: times are texts, and no key has None.

    In such a table each row has the keys of all rows, with None for keys that it lacks.

    >>> from datetime import date
    >>> as_json([{"a": 1, "b": None, "c": {"d": None}, "e": date(2026, 1, 2)}])
    [{'a': 1, 'c': {}, 'e': '2026-01-02'}]
    """
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [as_json(item) for item in value]
    return value if isinstance(value, (str, int, float, type(None))) else str(value)


def role_and_text(message: Message) -> tuple[str, str]:
    """Return the values by which messages are compared."""
    return message["role"], message["content"].strip()


def is_empty(message: Message) -> bool:
    """Return whether a message has neither a text nor a call."""
    return not message["content"].strip() and not message.get("tool_calls")
