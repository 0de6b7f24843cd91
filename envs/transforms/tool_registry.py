"""Tools by name: what they are called, what they take, and calling them. Torch-free."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Args = dict[str, Any]
NUMBERS = {float: (int, float), int: (int,)}  # what JSON may write for them


@dataclass(frozen=True)
class Tool:
    """A function with a name and what it takes: {argument: type}, all of them or the ones known."""

    name: str
    function: Callable[..., Any]
    schema_in: dict[str, Any] = field(default_factory=dict)
    schema_out: dict[str, Any] = field(default_factory=dict)
    description: str = ""

    @classmethod
    def of(cls, service: Any, name: str | None = None, schema: dict | None = None) -> Tool:
        """Return a tool of a function, or of an object with name, schema_in, schema_out."""
        known = getattr(service, "schema_in", None) if schema is None else schema
        if known is None:
            wanted = inspect.signature(service, eval_str=True).parameters.values()
            plain = (p for p in wanted if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
            known = {p.name: p.annotation for p in plain if p.name != "_state"}
        found = name or getattr(service, "name", None) or service.__name__
        text = inspect.getdoc(service) if inspect.isroutine(service) else service.__doc__
        out = getattr(service, "schema_out", {})
        return cls(found, service, known, out, (text or "").strip().split("\n")[0])

    def __call__(
        self, args: Args | None = None, state: dict[str, Any] | None = None, /, **named: Any
    ) -> Any:
        """Return what the function makes of arguments, in a dict or by name; or TypeError."""
        args = {**(args or {}), **named}
        parameters = inspect.signature(self.function).parameters
        names = {p.name for p in parameters.values()}
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        unknown = set() if open_ended else set(args) - names - set(self.schema_in)
        if wrong := sorted(unknown | set(args) & {"_state"}):
            raise TypeError(f"no arguments {wrong}; it takes {sorted(self.schema_in)}")
        for key, kind in self.schema_in.items():
            if key in args and not _fits(args[key], kind):
                got = type(args[key]).__name__
                raise TypeError(f"expected {key} to be {_kind(kind)}, got {got}")
        extra = {"_state": state} if state is not None and (open_ended or "_state" in names) else {}
        return self.function(**args, **extra)


class ToolRegistry:
    """Tools by name: functions, or objects with `name` and `schema_in` that can be called.

    An object with `tools` brings these along (`MCPServer`). `services` may be a dict, whose keys
    are only for the one who configures it.

    >>> def add(a: int, b: int) -> int:
    ...     "Add two numbers."
    ...     return a + b
    >>> registry = ToolRegistry([add])
    >>> registry.get("add")({"a": 1, "b": 2}), registry.get("add")(a=1, b=2)
    (3, 3)
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
        """Add a tool, in place of another one of the same name."""
        for one in getattr(service, "tools", [service]):
            if not isinstance(one, Tool) and not callable(one):
                raise ValueError(
                    f"expected a tool, a function or callable object, got {one!r}; "
                    "is its name misspelt, or its _target_ missing?"
                )
            tool = one if isinstance(one, Tool) else Tool.of(one, name, schema)
            self._tools[tool.name] = tool

    def get(self, name: str) -> Tool:
        """Return the tool of a name; a KeyError lists the names there are."""
        if name not in self._tools:
            raise KeyError(f"Unknown tool: {name}; there are {sorted(self._tools)}")
        return self._tools[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tools

    def describe(self) -> str:
        """Return one line a tool, for a system prompt."""
        lines = []
        for tool in self._tools.values():
            args = ", ".join(f"{k}: {_kind(v)}" for k, v in tool.schema_in.items())
            lines.append(f"{tool.name}({args}): {tool.description}")
        return "\n".join(lines)


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value has a type; what is no class is not checked."""
    if not isinstance(kind, type) or kind is inspect.Parameter.empty:
        return True
    return type(value) in NUMBERS[kind] if kind in NUMBERS else isinstance(value, kind)


def _kind(kind: Any) -> str:
    if kind is inspect.Parameter.empty:
        return "any"
    return kind.__name__ if isinstance(kind, type) else str(kind)
