"""Read the tool calls of a response in the format of the model's chat template.

To find the format, leash renders a chat with made-up calls and tries response templates until one
reads the calls back: first the tokenizer's, then formats.yaml. Not supported: formats that write
calls as Python code, because response templates cannot parse it.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, reduce
from pathlib import Path
from typing import Any

import yaml

from policies.chats.jinja_template import bounded
from policies.chats.renderer import Renderer
from policies.chats.tool_calls import make_call

# Errors for responses that are not well formed.
ERRORS = (ValueError, KeyError, TypeError, RecursionError, TimeoutError)
ARGUMENTS = {"text": 'say "7"\nor so', "number": 7}
SCHEMA = {
    "type": "function",
    "function": {
        "name": "try_it",
        "description": "Try it.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "a text"},
                "number": {"type": "integer", "description": "a number"},
            },
            "required": ["text", "number"],
        },
    },
}


@dataclass(frozen=True)
class Call:
    """A call of a response. `fault`: why it cannot be read. `id`: the id in the response, or ""."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    fault: str = ""


class CallReader:
    """Read the calls of responses by the chat template of a renderer.

    `template` is the response template. `single`: the chat template writes at most one call of a
    response, and so one result. Raise ValueError if the chat template writes no tools, or writes
    calls that no response template reads.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        question = {"role": "user", "content": "Go.", "tools": [SCHEMA]}
        before, remedy = renderer.text([question]), renderer.remedy_for_tools
        if SCHEMA["function"]["name"] not in before:
            raise ValueError(f"env.tools: {renderer.name} writes no tools; {remedy}")
        prompt = renderer.text([question], add_generation_prompt=True)
        self._start = prompt.removeprefix(before)  # the generation prompt; it may open thoughts
        ends = [renderer.tokenizer.decode(end) for end in renderer.stop_ids]

        def written(count: int) -> str:
            text = renderer.text([question, _called(count)]).removeprefix(before).rstrip()
            return reduce(str.removesuffix, ends, text)

        one = written(1)
        if SCHEMA["function"]["name"] not in one:
            raise ValueError(f"env.tools: {renderer.name} writes no calls; {remedy}")
        templates = [getattr(renderer.tokenizer, "response_template", None), *formats().values()]
        for template in filter(None, templates):
            self.template = template
            if self._reads_back(1, one):
                break
        else:
            raise ValueError(
                f"env.tools: leash cannot read the calls that {renderer.name} writes, "
                f"{one!r:.200}; set policy.chat_template=<a template with calls of "
                f"{', '.join(formats())}>, or response_template in tokenizer_config.json"
            )
        self.single = True
        with suppress(ValueError):  # some templates take one call per response
            self.single = not self._reads_back(2, written(2))

    def _reads_back(self, count: int, text: str) -> bool:
        """Return whether the response template reads `count` made-up calls back from `text`."""
        calls = [(call.name, call.arguments) for call in self._read(text, "", [SCHEMA])]
        return calls == [("try_it", ARGUMENTS)] * count

    def __call__(self, response: str, tools: Sequence[dict[str, Any]]) -> list[Call]:
        """Return the calls of a response in order, or only the unreadable ones if there are any.

        The schemas of `tools` decide the types of arguments that a format writes as plain text.
        """
        return self._read(response, self._start, tools)

    def _read(self, response: str, start: str, tools: Sequence[dict[str, Any]]) -> list[Call]:
        try:
            with bounded():  # some patterns take quadratic time
                message = self._renderer.tokenizer.parse_response(
                    response, self.template, prefix=start, tools=list(tools)
                )
        except ERRORS as error:
            return [Call(fault=f"{type(error).__name__}: {error}")]
        broken = [Call(fault=f"got {text!r:.200}") for text in message.get("broken", [])]
        # Results are in the order of the calls, and the place of unreadable calls is unknown.
        return broken or list(map(_call, _flat(message.get("tool_calls", []))))


@cache
def formats() -> dict[str, dict[str, Any]]:
    """Return the response templates of formats.yaml by name."""
    return yaml.safe_load(Path(__file__).with_name("formats.yaml").read_text(encoding="utf-8"))


def _called(count: int) -> dict[str, Any]:
    """Return a message with made-up calls."""
    calls = [make_call("try_it", ARGUMENTS) | {"id": f"call{i:05}"} for i in range(count)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _flat(calls: Any) -> Iterator[Any]:
    for call in calls if isinstance(calls, list) else [calls]:
        yield from _flat(call) if isinstance(call, list) else [call]


def _call(item: Any) -> Call:
    """Return a parsed call; models write arguments as an object, as its JSON, or as parameters."""
    function = item.get("function", item) if isinstance(item, dict) else item
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return Call(fault=f"expected an object with a name and arguments, got {function!r:.200}")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        with suppress(*ERRORS):
            arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        fault = f"expected the arguments as an object, got {arguments!r:.200}"
        return Call(function["name"], fault=fault)
    return Call(function["name"], arguments, id=str(item.get("id", "")))
