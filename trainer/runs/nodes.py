"""The nodes of a configuration, looked at before anything of them is made. Torch-free.

What loads torch is not imported: the arguments of leash's own classes are read in their files.
"""

import ast
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from trainer.runs.redact import environment_secrets, redact_text, secrets_of
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
    """Yield path and value of every text; those of a list have its path."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from walk_texts(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list):
        for value in tree:
            yield from walk_texts(value, path)
    elif isinstance(tree, str):
        yield path, tree


def typed_secrets(tree: Any) -> Iterator[str]:
    """Yield the place of each secret that a configuration spells out instead of looking it up.

    >>> list(typed_secrets({"a": {"api_key": "sk-12345678", "token": "${oc.env:T}", "key": "C"}}))
    ['a.api_key']
    """
    for place, value in walk_texts(tree):
        name = place.rpartition(".")[2]
        last = re.split(r"[^A-Za-z0-9]+(?!keys$)", name)[-1]  # key_file=/a/place is none
        named = secrets_of({name: value}) and secrets_of({f"of_{last}": value})
        in_url = re.fullmatch(r"\w+:/\S+", value) and redact_text(value) != value
        looked_up = value in environment_secrets()
        if "${" not in value and len(value) >= 8 and (named or in_url or looked_up):
            yield place


def sent_keys(tree: Any) -> Iterator[tuple[str, str]]:
    """Yield place and text of each secret of this machine that a server, its URL or a prompt gets.

    >>> dict(sent_keys({"env": {"j": {"key_variable": "MY_KEY", "url": "http://h"}}}))
    {'env.j.key_variable': 'MY_KEY'}
    """
    for place, text in walk_texts(tree):
        last, looked_up = place.rpartition(".")[2], re.findall(r"oc\.env:\s*(\w+)", text)
        secret = secrets_of(dict.fromkeys(looked_up, "a value"))
        spoken = last.endswith("prompt") and secret
        if last == "key_variable" or (last.endswith("url") and looked_up) or spoken:
            yield place, text


def belongs(target: str, path: str) -> bool:
    """Return whether a public name of leash is a part for a place of a configuration.

    >>> belongs("trainer.DynamicRollouts", "algorithm.source"), belongs("envs.tasks.Mix", "tracker")
    (True, False)
    """
    package, _, name = target.rpartition(".")
    kinds = kinds_at(path)
    if package not in {kind.rpartition(".")[0] for kind in kinds}:
        return False
    if name not in import_module(package).__all__:
        return False
    homes = [definition(kind)[0] for kind in kinds]
    return f"{package}.*" in kinds or not set(homes).isdisjoint(derived_from(target))


def parts_at(path: str) -> list[str]:
    """Return all parts for a place of a configuration, by their public names."""
    packages = sorted({kind.rpartition(".")[0] for kind in kinds_at(path)})
    names = (f"{package}.{name}" for package in packages for name in import_module(package).__all__)
    return [name for name in names if belongs(name, path)]


def kinds_at(path: str) -> list[str]:
    """Return what conf/parts.yaml lets a place of a configuration name.

    >>> kinds_at("env.task"), kinds_at("env.task.tasks.a")[0], kinds_at("kl")
    (['envs.tasks.Task'], 'envs.tasks.*', [])
    """
    for place, kinds in parts().items():
        pattern = re.escape(place).replace(r"\*\*", ".+").replace(r"\*", r"[^.\[]+")
        if re.fullmatch(pattern, path):
            return kinds
    return []


@cache
def parts() -> dict[str, list[str]]:
    """Return conf/parts.yaml."""
    return yaml.safe_load((ROOT / "conf" / "parts.yaml").read_text())


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
    (['task', 'env', 'generator', 'runtime', 'size', 'mask', 'after_rollout'], None)
    """
    home, node = definition(target)
    if isinstance(node, ast.FunctionDef):
        return None if node.args.kwarg else _named(node)
    return None if node is None else _arguments_of_class(node, home.rpartition(".")[0])


def derived_from(target: str) -> list[str]:
    """Return where a class or function of leash is at home, and where its bases are.

    >>> derived_from("envs.tasks.Facts"), derived_from("os.system")
    (['envs.tasks.facts.Facts', 'envs.tasks.task.Task'], [])
    """
    home, node = definition(target)
    bases = map(ast.unparse, node.bases) if isinstance(node, ast.ClassDef) else ()
    module = home.rpartition(".")[0]
    above = [name for base in bases for name in derived_from(f"{module}.{base}")]
    return [] if node is None else [home, *above]


@cache
def definition(target: str) -> tuple[str, ast.FunctionDef | ast.ClassDef | None]:
    """Return where a class or function of leash is at home, and what defines it there, or None."""
    module, _, name = target.rpartition(".")
    for node in _statements(module):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return definition(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return target, node
    return target, None


@cache
def _statements(module: str) -> list[ast.stmt]:
    if not is_ours(module):
        return []
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    body = ast.parse(file.read_text()).body
    typed = [node for block in body if isinstance(block, ast.If) for node in block.body]
    return [*body, *typed]  # of a lazy package, see policies/lazy.py


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
