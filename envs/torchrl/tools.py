"""Execute the tool calls that a parser finds in a response: TorchRL's tools.

`env.tools` (envs/tools/) reads calls in the model's own format instead. On an error of a tool the
policy gets the error as the result, and the run continues.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from envs.rewards.functions import SetupError
from envs.tools.parsers import Parser, PatternParser, ToolCall
from envs.tools.process import as_text
from envs.tools.results import ToolTransformBase


@dataclass(frozen=True)
class Tool:
    """A function with a name and known arguments, {argument: type}."""

    name: str
    function: Callable[..., Any]
    schema_in: dict[str, Any] = field(default_factory=dict)
    description: str = ""

    @classmethod
    def of(cls, service: Any, name: str | None = None, schema: dict | None = None) -> Tool:
        """Return the tool for a function, or for an object with `name` and `schema_in`."""
        known = getattr(service, "schema_in", None) if schema is None else schema
        if known is None:
            wanted = inspect.signature(service, eval_str=True).parameters.values()
            plain = (p for p in wanted if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
            known = {p.name: p.annotation for p in plain if p.name != "_state"}
        text = inspect.getdoc(service) if inspect.isroutine(service) else service.__doc__
        name = name or getattr(service, "name", None) or service.__name__
        return cls(name, service, known, (text or "").strip().split("\n")[0])

    def __call__(self, args: dict[str, Any], state: dict[str, Any] | None = None) -> Any:
        """Call the function with the arguments, and with `_state` if it has this argument."""
        if "_state" in args:
            raise TypeError("_state is no argument of a call")
        parameters = inspect.signature(self.function).parameters.values()
        takes = any(p.name == "_state" or p.kind is p.VAR_KEYWORD for p in parameters)
        return self.function(**args, **({"_state": state} if state is not None and takes else {}))


class ToolRegistry:
    """Tools by name: functions, or objects with `name` and `schema_in`, in a list or a dict.

    >>> def add(a: int, b: int) -> int:
    ...     "Add two numbers."
    ...     return a + b
    >>> registry = ToolRegistry([add])
    >>> registry.get("add")({"a": 1, "b": 2})
    3
    >>> registry.describe()
    'add(a: int, b: int): Add two numbers.'
    """

    def __init__(self, services: Sequence[Any] | Mapping[str, Any] = ()) -> None:
        self._tools: dict[str, Tool] = {}
        for service in services.values() if isinstance(services, Mapping) else services:
            self.register(service)

    def register(
        self, service: Any, *, name: str | None = None, schema: dict[str, Any] | None = None
    ) -> None:
        """Add a tool; replace a tool of the same name."""
        if not callable(service):
            raise ValueError(f"expected a tool, got {service!r}; is its _target_ missing?")
        tool = service if isinstance(service, Tool) else Tool.of(service, name, schema)
        self._tools[tool.name] = tool

    def get(self, name: str) -> Tool:
        """Return the tool with this name; raise KeyError with the known names."""
        if name not in self._tools:
            raise KeyError(f"Unknown tool: {name}; there are {sorted(self._tools)}")
        return self._tools[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tools

    def describe(self) -> str:
        """Return one line per tool, for a system prompt."""
        lines = []
        for tool in self._tools.values():
            args = ", ".join(f"{k}: {_type_name(v)}" for k, v in tool.schema_in.items())
            lines.append(f"{tool.name}({args}): {tool.description}")
        return "\n".join(lines)


def _type_name(kind: Any) -> str:
    if kind is inspect.Parameter.empty:
        return "any"
    return kind.__name__ if isinstance(kind, type) else str(kind)


class ExecuteToolsInOrder(ToolTransformBase):
    """Execute the calls that `parser` finds, in order, by the tools of `registry`.

    All results of a response are one message. `stop_on_error` skips calls after a failed one.
    `pass_state_to_tools` passes tools that take `_state` a dict: "messages" (the chat) and "index"
    (its row). A tool that takes longer than `timeout` (seconds) has failed but is not stopped.
    """

    def __init__(
        self,
        registry: ToolRegistry,
        parser: Parser,
        stop_on_error: bool = False,
        pass_state_to_tools: bool = True,
        *,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        self.registry, self.parser, self.timeout = registry, parser, timeout
        self.stop_on_error, self.pass_state_to_tools = stop_on_error, pass_state_to_tools

    def _process_batch_item(self, content: str, index: int) -> list[str] | None:
        lines = []
        calls = self.parser(content)["calls"]
        for number, call in enumerate(calls, 1):
            ok, text = self._execute(call, index)
            label = f" [{call.tag}]" if call.tag else ""
            lines.append(f"{number}. {call.tool}{label} {'gave' if ok else 'failed'}: {text}")
            if self.stop_on_error and not ok:
                break
        return ["\n".join(lines)] if lines else None

    def _execute(self, call: ToolCall, index: int) -> tuple[bool, str]:
        state = None
        if self.pass_state_to_tools:
            state = {"messages": self.chats[index], "index": index}
        try:
            tool = self.registry.get(call.tool)
            return True, as_text(_within(self.timeout, partial(tool, call.args, state)))
        except SetupError as error:  # a fault of the set-up
            raise ValueError(str(error)) from error
        except (Exception, SystemExit) as error:  # any other error is a result for the policy
            text = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
            return False, f"{type(error).__name__}: {text}"


class SimpleToolTransform(ExecuteToolsInOrder):
    """Execute calls of plain functions, {name: function}.

    Calls are found by `parser`, or by `tool_call_pattern` with two groups, the name and the JSON
    arguments (default: <tool>, the name, a new line, the arguments, </tool>). `tool_schemas` may
    list arguments, {name: {argument: type}}; results have the role `tool_name`.
    """

    def __init__(
        self,
        tools: dict[str, Callable[..., Any]],
        tool_schemas: dict[str, dict[str, Any]] | None = None,
        parser: Parser | None = None,
        tool_call_pattern: str | None = None,
        tool_name: str = "tool",
        timeout: float = 10.0,
    ) -> None:
        registry = ToolRegistry()
        for name, function in tools.items():
            registry.register(function, name=name, schema=(tool_schemas or {}).get(name))
        if parser is None:
            parser = PatternParser(*([tool_call_pattern] if tool_call_pattern else []))
        super().__init__(registry, parser, timeout=timeout)
        self.tool_role = tool_name


def _within(timeout: float | None, work: Callable[[], Any]) -> Any:
    """Return the result of a call, or raise TimeoutError; then its thread keeps running."""
    if timeout is None:
        return work()
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # an executor would wait for it at the end
    if not wait([result], timeout).done:
        raise TimeoutError(f"no result within {timeout} s")
    return result.result()
