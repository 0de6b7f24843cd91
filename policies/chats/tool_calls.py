"""Tool calls, schemas of tools and thoughts in the messages of a chat."""

import json
from typing import Any

from policies.chats.messages import Message

CALL_ID = "call00000"  # nine letters or digits, as Mistral expects
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
WRITTEN = ("tools", "tool_calls", *THOUGHTS)  # if a message has one, it must be written


def make_call(name: str, arguments: Any) -> Message:
    """Return a tool call in OpenAI's form."""
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": CALL_ID, "function": function}


def make_schema(name: str) -> Message:
    """Return the schema of a tool without parameters."""
    parameters = {"type": "object", "properties": {}}
    function = {"name": name, "description": name, "parameters": parameters}
    return {"type": "function", "function": function}


def with_arguments(message: Message, *, as_text: bool) -> Message:
    """Return a message whose calls have their arguments as a JSON text, or as a dict.

    >>> call = make_call("add", '{"a": 1}')
    >>> done = with_arguments({"role": "assistant", "tool_calls": [call]}, as_text=False)
    >>> done["tool_calls"][0]["function"]["arguments"]
    {'a': 1}
    """
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            arguments = function.get("arguments")
            if as_text and not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            elif not as_text and isinstance(arguments, str):
                arguments = json.loads(arguments)
            call = {**call, "function": {**function, "arguments": arguments}}
        calls.append(call)
    return {**message, "tool_calls": calls}
