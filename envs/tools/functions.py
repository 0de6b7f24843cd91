"""Typed Python functions as tools: their schemas, and the check of a call's arguments."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from envs.rewards.functions import is_async
from envs.rewards.workers import LazyFunction

AT_ONCE = 32  # concurrent calls of an async function
TYPES: dict[str, tuple[type, ...]] = {  # JSON type -> Python types
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


@dataclass(frozen=True)
class TypedTool:
    """A function, or an object with a typed `__call__`, under a name, with its JSON schema.

    The template shows the schema to the model. `fixed` are arguments that the configuration sets
    and the model does not see. `maker` builds the object in another process.
    """

    name: str
    function: Callable[..., Any]
    schema: dict[str, Any]
    fixed: Mapping[str, Any]
    maker: Callable[[], Callable[..., Any]] | None = None

    @classmethod
    def of(cls, name: str, function: Callable[..., Any], **fixed: Any) -> "TypedTool":
        r"""Return the tool of a function; raise ValueError if it lacks a type or a description.

        >>> from envs.tasks import multiply
        >>> tool = TypedTool.of("multiply", multiply, b=2)
        >>> tool.schema["function"]["parameters"]["required"]
        ['a']
        >>> tool.fault({"a": 3}), tool.fault({"a": "x"})
        ('', 'expected a to be {"type": "integer"}, got \'x\'')
        """
        typed = function if inspect.isroutine(function) else function.__call__
        try:
            schema = get_json_schema(typed)
        except Exception as error:  # annotations are a user's expressions
            raise ValueError(
                f"env.tools.{name}: {' '.join(str(error).split())}; a tool needs a docstring, and "
                "a type and a line under Args: for each argument"
            ) from None
        schema["function"]["name"] = name
        parameters = schema["function"]["parameters"]
        if unknown := [argument for argument in fixed if argument not in parameters["properties"]]:
            takes = ", ".join(parameters["properties"]) or "no arguments"
            raise ValueError(f"env.tools.{name}.{unknown[0]}: the function takes {takes}")
        for argument in fixed:
            del parameters["properties"][argument]
        required = parameters.get("required", [])
        parameters["required"] = [argument for argument in required if argument not in fixed]
        return cls(name, function, schema, fixed)

    @property
    def at_once(self) -> int:
        """Return how many calls run at a time; 0: no other call runs at the same time."""
        return getattr(self.function, "at_once", AT_ONCE if is_async(self.function) else 0)

    @property
    def portable(self) -> Any:
        """Return a picklable maker of the function with its `fixed` arguments."""
        function = LazyFunction(self.maker) if self.maker else self.function
        return partial(function, **self.fixed) if self.fixed else function

    def fault(self, arguments: Mapping[str, Any]) -> str:
        """Return why these arguments are wrong, or ""."""
        parameters = self.schema["function"]["parameters"]
        properties = parameters["properties"]
        missing = [name for name in parameters["required"] if name not in arguments]
        unknown = [name for name in arguments if name not in properties]
        for kind, names in ("missing", missing), ("unknown", unknown):
            if names:
                return f"{kind} arguments {', '.join(names)}; expected {', '.join(properties)}"
        for name, value in arguments.items():
            if not fits(value, properties[name]):
                schema = {k: v for k, v in properties[name].items() if k != "description"}
                return f"expected {name} to be {json.dumps(schema)}, got {value!r:.80}"
        return ""


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a JSON value has the type of a schema.

    >>> fits([1, 2], {"type": "array", "items": {"type": "integer"}})
    True
    """
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, list) and not all(fits(item, schema.get("items", {})) for item in value):
        return False
    names = schema.get("type", [])
    names = [names] if isinstance(names, str) else names
    kinds = [kind for name in names for kind in TYPES.get(name, ())]
    return not kinds or type(value) in kinds  # isinstance would take True as an int
