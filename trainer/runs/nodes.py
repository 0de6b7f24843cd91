"""The nodes of a configuration, looked at before anything of them is made. Torch-free.

What loads torch is not imported: the arguments of leash's own classes are read in their files.
"""

import ast
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from trainer.runs.targets import arguments_of, find_target, takes_any, unknown_argument

ROOT = Path(__file__).parents[2]
PACKAGES = ("policies", "envs", "trainer")  # of leash
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


def arguments_in_source(target: str) -> list[str] | None:
    """Return the arguments of a class or function of leash, as its file has them.

    None if they cannot be known so: it takes any, or it is not of leash.

    >>> arguments_in_source("trainer.Rollouts"), arguments_in_source("collections.Counter")
    (['task', 'env', 'generator', 'runtime', 'size', 'after_rollout'], None)
    """
    module, _, name = target.rpartition(".")
    for node in _statements(module):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return arguments_in_source(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOME":
            if home := ast.literal_eval(node.value).get(name):
                return arguments_in_source(f"{module}{home}.{name}")
        elif isinstance(node, ast.FunctionDef) and node.name == name:
            return None if node.args.kwarg else _named(node)
        elif isinstance(node, ast.ClassDef) and node.name == name:
            return _arguments_of_class(node, module)
    return None


@cache
def _statements(module: str) -> list[ast.stmt]:
    if not is_ours(module):
        return []
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text()).body


def _arguments_of_class(node: ast.ClassDef, module: str) -> list[str] | None:
    """Return the arguments of a constructor; None of one that is inherited from elsewhere."""
    made = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    own = _named(made[0])[1:] if made else []
    if made and not made[0].args.kwarg:
        return own
    if not made and node.decorator_list:  # a dataclass
        fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
        return [n.target.id for n in fields if "ClassVar" not in ast.unparse(n.annotation)]
    if not node.bases:
        return None if made else []
    if made and not module.startswith(("envs.tasks.", "trainer.")):
        return None  # what it hands on goes elsewhere than to its bases
    base = arguments_in_source(f"{module}.{ast.unparse(node.bases[0])}")
    return None if base is None or (made and not base) else [*own, *base]


def _named(node: ast.FunctionDef) -> list[str]:
    return [each.arg for each in [*node.args.args, *node.args.kwonlyargs]]


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
    """Return whether a value of a configuration has an annotated type, if YAML has values of it.

    >>> fits(3, float), fits("3", int | None), fits([1], list[int]), fits("/tmp", Path)
    (True, False, True, True)
    """
    origin = typing.get_origin(hint) or hint
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in typing.get_args(hint))
    judged = origin in JUDGED or getattr(origin, "__module__", "") == "collections.abc"
    if not (isinstance(origin, type) and judged) or is_node(value):
        return True
    if origin in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if origin is float else origin)
