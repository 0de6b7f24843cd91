"""What nodes of a configuration name by `_target_`: where it is, the arguments that it takes.

Plain inspection, without Hydra. Torch-free, as long as what is named is.
"""

import difflib
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("policies", "envs", "trainer")  # of leash
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
JUDGED = (bool, int, float, str, list, dict, types.NoneType)  # and those of collections.abc


def walk(tree: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield path and node of every node, within lists and other nodes too.

    >>> [path for path, _ in walk({"a": {"_target_": "x.y", "b": [{"_target_": "x.z"}]}})]
    ['a', 'a.b[0]']
    """
    if isinstance(tree, dict):
        if "_target_" in tree:
            yield path, tree
        for key, value in tree.items():
            yield from walk(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list):
        for place, value in enumerate(tree):
            yield from walk(value, f"{path}[{place}]")


def is_node(value: Any) -> bool:
    """Return whether a value of a configuration is to be made."""
    return isinstance(value, dict) and "_target_" in value


def walk_texts(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield path and value of every text."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from walk_texts(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, str):
        yield path, tree


def is_ours(module: str) -> bool:
    """Return whether a dotted name is a module of leash, not something that one imports.

    >>> is_ours("envs.tasks"), is_ours("policies.cache.os"), is_ours("os")
    (True, False, False)
    """
    path = ROOT.joinpath(*module.split("."))
    there = path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
    return module.split(".")[0] in PACKAGES and there


def find_target(target: str) -> Any:
    """Return what a `_target_` names; a module without that name is a ValueError."""
    module, _, name = target.rpartition(".")
    if not module:
        raise ValueError(f"expected <module>.<name>, got {target!r}")
    home = import_module(module)
    if not hasattr(home, name):
        names = getattr(home, "__all__", [n for n in vars(home) if not n.startswith("_")])
        close = difflib.get_close_matches(name, names, n=1)
        raise ValueError(f"{module} has no {name}{f'; did you mean {close[0]}?' if close else ''}")
    return getattr(home, name)


def takes_any(thing: Any) -> bool:
    """Return whether a class or function takes arguments by any name (**kwargs).

    A task, or a part of an algorithm, hands them on to its base.
    """
    any_name = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(thing).parameters.values())
    bases = bases_of(thing) if thing.__module__.startswith(("envs.tasks.", "trainer.")) else []
    return takes_any(bases[0]) if any_name and bases else any_name


def arguments_of(thing: Any) -> list[str]:
    """Return the arguments that a class or function names.

    Of a class that hands on others by **kwargs, also those that its bases name.

    >>> sorted(arguments_of(find_target("envs.tasks.SortDigits")))
    ['max_digits', 'min_digits', 'num_rows', 'seed']
    """
    open_ = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(thing).parameters.values())
    made_by = [thing, *bases_of(thing)] if open_ else [thing]
    parameters = [p for made in made_by for p in inspect.signature(made).parameters.values()]
    return list(dict.fromkeys(p.name for p in parameters if p.kind in NAMED))


def bases_of(thing: Any) -> list[type]:
    """Return the bases of a class that have a constructor of their own, written in Python."""
    bases = getattr(thing, "__mro__", ())[1:-1]
    return [base for base in bases if inspect.isfunction(vars(base).get("__init__"))]


def unknown_argument(path: str, target: str, known: list[str]) -> str:
    """Return the line on an argument that a target does not take."""
    close = difflib.get_close_matches(path.rpartition(".")[2], known, n=1)
    meant = f"; did you mean {close[0]}?" if close else ""
    return f"{path}: {target} takes {', '.join(known) or 'no arguments'}{meant}"


def argument_faults(node: dict[str, Any], path: str) -> Iterator[str]:
    """Yield each argument in a node, and in those within it, that there is not or is of no type."""
    for where, inner in walk(node, path):
        name, thing = inner["_target_"], find_target(inner["_target_"])
        known, parameters = arguments_of(thing), inspect.signature(thing).parameters
        for key, value in inner.items():
            place = f"{where}.{key}"
            if str(key).startswith("_"):
                continue
            if key not in known and not takes_any(thing):
                yield unknown_argument(place, name, known)
            if key in parameters and not fits(value, hint := parameters[key].annotation):
                wanted, remedy = inspect.formatannotation(hint), ""
                if isinstance(value, str) and typing.get_origin(hint) is Callable:
                    wanted = "a function"
                    remedy = f"; write {place}='{{_target_: {value}, _partial_: true}}'"
                yield f"expected {place} to be {wanted} ({name}), got {value!r}{remedy}"


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value of a configuration has an annotated type.

    True for types that YAML has no values of: what a constructor makes of those is its affair.

    >>> fits(3, float), fits("3", int | None), fits([1], list[int]), fits("/tmp", Path)
    (True, False, True, True)
    """
    origin = typing.get_origin(hint) or hint
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in typing.get_args(hint))
    if not isinstance(origin, type):
        return True
    if origin not in JUDGED and origin.__module__ != "collections.abc":
        return True
    if is_node(value):
        return True
    if origin in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if origin is float else origin)
