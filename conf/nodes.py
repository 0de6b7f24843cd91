"""The nodes of a configuration, what has a `_target_`: their names, and their arguments.

Constructors are read from leash's source, not imported: most import torch, and the parent does not.
"""

import ast
import difflib
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("policies", "envs", "trainer")
# Parts of a run that nodes of algorithm.* are handed: never two of them, one leash above all.
MADE = {"leash", "policy", "generator", "runtime", "task", "env", "size"}


def findings(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield each argument of a node that what its _target_ names does not take."""
    for name, node in cfg["env"]["transforms"].items():
        if node is not None and not (isinstance(node, dict) and "_target_" in node):
            yield f"expected env.transforms.{name}._target_, got {node!r:.80}; name its class"
    for path, node in walk(cfg["algorithm"], "algorithm"):
        for key in MADE & set(node):
            yield f"{path}.{key} is made by the run, for all parts alike; leave it out"
    for path, node in walk(cfg):
        known = takes(node["_target_"])
        for key in node:
            if known is not None and key not in known and not str(key).startswith("_"):
                yield no_argument(f"{path}.{key}", node["_target_"], known)


def unnamed(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield each _target_ that is no dotted name; all other findings take them for such."""
    for path, node in walk(cfg):
        target = node["_target_"]
        if not isinstance(target, str) or not re.fullmatch(r"\w+(\.\w+)+", target):
            got = "null" if target is None else f"{target!r:.80}"
            yield f"expected {path}._target_ to be <module>.<name>, as envs.tasks.Facts; got {got}"


def no_argument(path: str, target: str, known: list[str]) -> str:
    """Return the line on an argument that a target does not take."""
    close = difflib.get_close_matches(path.rpartition(".")[2], known, n=1)
    meant = f"; did you mean {close[0]}?" if close else ""
    return f"{path}: {target} takes {', '.join(known) or 'no arguments'}{meant}"


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


@cache
def takes(target: str) -> list[str] | None:
    """Return the arguments of a class or function of leash by their names.

    None: it takes any, or it is not leash's. What **keywords are handed on to counts.

    >>> takes("envs.transforms.MCPServer")
    ['command', 'timeout', 'start_timeout', 'env']
    >>> takes("envs.transforms.PythonTool") == takes("envs.sandbox.Sandbox"), takes("os.path.join")
    (True, None)
    """
    module, _, name = target.rpartition(".")
    tree = _source(module)
    if tree is None:
        package = import_module(module) if _source(f"{module}.__init__") else None
        home = getattr(package, "_HOME", {}).get(name)  # a lazy package: no torch yet
        return takes(f"{resolve_name(home, module)}.{name}") if home else None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return _arguments(node, module, [])
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _of_class(node, module)
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return takes(f"{node.module}.{alias.name}")
    return None


@cache
def _source(module: str) -> ast.Module | None:
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    return ast.parse(path.read_text()) if path.is_file() else None


def _of_class(node: ast.ClassDef, module: str) -> list[str] | None:
    bases = [f"{module}.{base.id}" for base in node.bases if isinstance(base, ast.Name)]
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            return _arguments(part, module, bases)
    fields = [p.target.id for p in node.body if isinstance(p, ast.AnnAssign)]  # pyright: ignore
    if any("dataclass" in ast.unparse(mark) for mark in node.decorator_list):
        inherited = _all_of(bases)
        return None if inherited is None else [*inherited, *fields]
    return _all_of(bases) if len(bases) == len(node.bases) else None


def _arguments(node: ast.FunctionDef, module: str, bases: list[str]) -> list[str] | None:
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    own = [a.arg for a in [*plain[node.name == "__init__" :], *given.kwonlyargs]]
    if given.kwarg is None:
        return own
    handed_on = []
    for call in (part for part in ast.walk(node) if isinstance(part, ast.Call)):
        for keyword in call.keywords:
            if keyword.arg is None and ast.unparse(keyword.value) == given.kwarg.arg:
                called = ast.unparse(call.func)
                base = called == "super().__init__"
                handed_on += bases if base else [f"{module}.{called}"]
    more = _all_of(handed_on) if handed_on else None
    return None if more is None else list(dict.fromkeys([*own, *more]))


def _all_of(targets: list[str]) -> list[str] | None:
    found = [takes(target) for target in targets]
    return None if None in found else [name for names in found for name in names or ()]
