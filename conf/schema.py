"""The typed schema of conf/keys.yaml, against which Hydra checks files and words. Torch-free."""

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, make_dataclass, replace
from datetime import date
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from trainer.baselines import BASELINES
from trainer.kl.controllers import CONTROLLERS
from trainer.kl.estimators import ESTIMATORS
from trainer.surrogates import SURROGATES

TYPES: dict[str, tuple[Any, str]] = {  # name in keys.yaml -> type, its name in messages
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "bool": (bool, "true or false"),
    "str": (str, "a text"),
    "list of str": (list[str], "a list, [a, b]"),
    "list of int": (list[int], "a list, [1, 2]"),
    "list of float": (list[float], "a list, [a, b]"),
    "dict": (dict[str, Any], "keys with values, {a: 1}"),
    "any": (Any, "anything"),  # a typed dict that is null would not accept {...}
    "part": (Any, "a name, or {_target_: <class>} of your own"),
    "node": (Any, "{_target_: <class>}"),
}
TYPES |= {f"{name} | null": (t | None, f"{kind} or null") for name, (t, kind) in TYPES.items()}
TABLES: dict[str, Collection[str]] = {  # limit in keys.yaml -> names; a part is a name or a node
    "baselines": BASELINES,
    "KL estimators": ESTIMATORS,
    "KL controllers": CONTROLLERS,
    "surrogates": SURROGATES,
}


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


RANGES: dict[str, Callable[[Any], bool]] = {
    ">= 0": lambda x: 0 <= x < math.inf,
    ">= 1": lambda x: 1 <= x < math.inf,
    "> 0": lambda x: 0 < x < math.inf,
    "> 1": lambda x: 1 < x < math.inf,
    "from 0 to 1": lambda x: 0 <= x <= 1,
    "from 0 to below 1": lambda x: 0 <= x < 1,
    "above 0 and below 1": lambda x: 0 < x < 1,
    "to be 0": lambda x: x == 0,
    "to be true": lambda x: x is True,
    "to be YYYY-MM-DD": _is_date,
    "to be a 64-bit integer": lambda x: -(2**63) <= x < 2**63,
    "to be two numbers from 0 to below 1": lambda x: len(x) == 2 and all(0 <= b < 1 for b in x),
    "to be a text or a list of texts": lambda x: (
        isinstance(x, str) or (isinstance(x, list) and all(isinstance(each, str) for each in x))
    ),
    "to be a text, or texts by name": lambda x: (
        isinstance(x, str)
        or (isinstance(x, dict) and bool(x) and all(isinstance(each, str) for each in x.values()))
    ),
    "to be all or a whole number": lambda x: bool(re.fullmatch(r"all|\d+", x)),
    "to be http://<host>:<port>": lambda x: bool(re.fullmatch(r"https?://\S+", x)),
}
FOLDER = Path(__file__).parent
# Sections that take any key. conf/check.py refuses keys of algorithm and optimizer that leash does
# not declare, unless a class of the user's own may take them.
OPEN = ("env.task", "env.rewards", "env.tools", "env.transforms", "policy.chat_template_kwargs")
OPEN += ("env.columns", "observers", "algorithm", "optimizer")


@dataclass(frozen=True)
class Key:
    """A declared key. `limit`: its allowed values, or a name of RANGES, which null need not meet.

    A "part" is a name in the list or a node with a `_target_`.
    """

    type: str
    default: Any
    about: str
    limit: list[Any] | str | None = None


@cache
def declared() -> dict[str, dict[str, Any]]:
    """Return the tree of keys of "root", of each group, and of each file with additional keys."""
    read = yaml.safe_load(Path(__file__).with_name("keys.yaml").read_text())
    out = {name: _tree(node) for name, node in read.items() if "=" not in name}
    for name, node in read.items():
        group, _, files = name.partition("=")
        for file in filter(None, files.split("|")):
            part = f"{group}={file}"
            out[part] = out.get(part, out[group]) | _tree(node)
    return out


def _tree(node: Any) -> Any:
    if isinstance(node, dict):
        return {name: _tree(value) for name, value in node.items()}
    key = Key(*node)
    return replace(key, limit=[*TABLES[key.limit]]) if key.limit in [*TABLES] else key


def leaves(part: str) -> Iterator[tuple[str, Key]]:
    """Yield every key of a part of `declared` by its full name."""
    group = part.partition("=")[0]
    return _leaves(declared()[part], "" if group == "root" else f"{group}.")


def _leaves(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Key]]:
    for name, node in tree.items():
        if isinstance(node, Key):
            yield f"{prefix}{name}", node
        else:
            yield from _leaves(node, f"{prefix}{name}.")


@cache
def all_keys() -> dict[str, tuple[str, Key | None]]:
    """Return every key, and every section as None, with the first part that declares it."""
    out: dict[str, tuple[str, Key | None]] = {}
    for part in declared():
        for name, key in leaves(part):
            out.setdefault(name, (part, key))
            for end in range(1, name.count(".") + 1):
                out.setdefault(".".join(name.split(".")[:end]), (part, None))
    return out


def sections() -> list[str]:
    """Return the names of the sections of a configuration."""
    return [part for part in declared() if "=" not in part and part != "root"]


def part_of(group: str, node: dict[str, Any]) -> str:
    """Return the part of `declared` whose keys are closest to a section's keys."""
    parts = [part for part in declared() if part.partition("=")[0] == group]
    return min(parts, key=lambda part: len(declared()[part].keys() ^ node.keys()))


def changed(config: dict[str, Any], sections: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield each key of the sections that differs from its default, or is not declared."""
    for group in sections:
        part = part_of(group, config[group])
        for name, key in leaves(part):
            value = reduce(dict.__getitem__, name.split("."), config)
            if value != key.default and not name.endswith("._target_"):
                yield name, value
        for name in config[group].keys() - declared()[part].keys():
            yield f"{group}.{name}", config[group][name]


def word(value: Any) -> str:
    """Return a value as a command line has it: true, null, [1, 2]."""
    return value if isinstance(value, str) else json.dumps(value)


def faults(config: dict[str, Any]) -> Iterator[str]:
    """Yield the faults of single values of a resolved configuration."""
    for group in ("root", *sections()):
        node = config if group == "root" else config[group]
        for name, key in leaves(part_of(group, node)):
            value = reduce(dict.__getitem__, name.split("."), config)
            is_node = isinstance(value, dict) and "_target_" in value
            if key.type == "part" and is_node:
                continue
            if isinstance(key.limit, list):
                if value not in key.limit:
                    known = ", ".join("null" if c is None else c for c in key.limit)
                    more = " or {_target_: <class>}" if key.type == "part" else ""
                    yield f"expected {name} to be one of {known}{more}, got {value!r}"
            elif key.limit and value is not None and not RANGES[key.limit](value):
                yield f"expected {name} {key.limit}, got {value}"
            elif key.type.startswith("node") and value is not None and not is_node:
                file = name.replace(".", "/")
                text = f"expected {name} to be {TYPES[key.type][1]}, got {value!r}"
                yield f"{text}; choose a file of conf/{file}: {file}={value}"


def _typed(name: str, tree: dict[str, Any], *bases: type) -> type:
    """Return a tree as a dataclass of this module, since launchers pickle Hydra's store."""
    fields: list[Any] = []
    for key, node in tree.items():
        if isinstance(node, Key):
            hint, make = TYPES[node.type][0], partial(deepcopy, node.default)
        else:
            hint = make = _typed(f"{name}.{key}", node)
        fields.append((key, hint, field(default_factory=make)))
    kind = make_dataclass(re.sub(r"\W", "_", f"keys of {name}"), fields, bases=bases)
    kind.__module__ = __name__
    return globals().setdefault(kind.__name__, kind)


class _Unlisted(dict):
    """Nodes of Hydra's store; --help and shell completion do not offer those that begin with _."""

    def keys(self) -> Any:
        return [name for name in self if name[0] != "_"]

    def __deepcopy__(self, memo: dict) -> "_Unlisted":
        return self  # Hydra copies the store for each group and only reads it: saves 1 s of --help


def register() -> None:
    """Store the schema in Hydra: the root, each group, and each file with additional keys."""
    store, groups = ConfigStore.instance(), {}
    store.repo = _Unlisted(store.repo)
    for part, tree in declared().items():
        group, _, file = part.partition("=")
        if group == "root":
            continue
        more = {k: node for k, node in tree.items() if node is not declared()[group].get(k)}
        kind = _typed(part, more, groups[group]) if file else _typed(part, tree)
        groups.setdefault(group, kind)
        node = OmegaConf.structured(kind)
        for name in (key for key in OPEN if key.startswith(f"{group}.")):
            OmegaConf.set_struct(node[name.partition(".")[2]], False)
        if group in OPEN:
            OmegaConf.set_struct(node, False)
        store.repo.setdefault(group, _Unlisted())
        store.store(group=group, name=f"_{file}_schema" if file else "_schema", node=node)
    root = _typed("root", declared()["root"])
    fields = [(group, kind, field(default=MISSING)) for group, kind in groups.items()]
    kind = make_dataclass("keys_of_all", fields, bases=(root,))
    kind.__module__ = __name__
    node = OmegaConf.structured(globals().setdefault(kind.__name__, kind))
    OmegaConf.set_struct(node.observers, False)
    store.store(name="_schema", node=node)


register()  # a launcher's process imports only this module
