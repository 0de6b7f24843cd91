"""Hashes of what a result was made of: files, code and the rest of a configuration. Torch-free.

`content_key` names a cached result. `sha256_of_inputs` is saved with a run: a resume and the other
modes compare it. Models and data of the hub count by name. Not hashed: installed packages, and
modules that code imports by a text (`importlib.import_module(name)`).
"""

import ast
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from glob import glob
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from policies.files import sha256_of_path, sha256_of_texts

TEXTS = (".json", ".jinja", ".txt", ".model")  # files of a model folder other than weights
# Keys that name files and folders.
INPUTS = (
    "dataset",
    "eval_dataset",
    "retain",
    "chat_template",
    "model",
    "reference",
    "reward_model",
)
WEIGHED = ("policy.model", "kl.reference", "teacher.reference")  # their weights have a hash
VARIABLE = re.compile(r"\$\{oc\.env:(\w+)\}")  # not resolved in a configuration to be saved
ADAPTER = "adapter_config.json"
CODE = ("envs", "policies", "trainer")  # leash's packages; conf/ is in each configuration


def content_key(*sources: Any) -> str:
    """Return 12 hex digits of what a cached result depends on.

    A Path counts by the content of its file or folder, all else as JSON.
    """
    texts = [
        sha256_of_path(source) if isinstance(source, Path) else json.dumps(source, sort_keys=True)
        for source in sources
    ]
    return sha256_of_texts(texts)[:12]


@cache
def sha256_of_leash() -> str:
    """Return the sha256 of leash's own code: a clone changes without a new version."""
    folders, suffixes = Path(__file__).parents[1], (".py", ".yaml", ".jinja")
    return sha256_of_texts([sha256_of_path(folders / name, suffixes) for name in CODE])


def sha256_of_inputs(node: Any, path: str = "", *, weights: bool = False) -> dict[str, str]:
    """Return the sha256 of the files that a configuration names, by their keys.

    Covers files and folders of data, templates and models, files under other keys, and the code of
    each `_target_` outside of leash. `weights=False` leaves out weights of the policy and of the
    references, because a run hashes them when it loads them.
    """
    out: dict[str, str] = {}
    children = node.items() if isinstance(node, dict) else enumerate(node)
    for name, value in children:
        key, files = f"{path}.{name}" if path else str(name), list[Path]()
        if (name in INPUTS or path in WEIGHED) and not isinstance(value, dict):
            files = files_of(value)
        elif isinstance(value, dict | list):
            out |= sha256_of_inputs(value, key, weights=weights)
        elif name == "_target_":
            files = code_files(value)
        elif isinstance(value, str):  # an argument of the user's code
            place = os.path.expanduser(value)
            is_folder = key.startswith("env.") and os.sep in value and os.path.isdir(place)
            files = [Path(place)] if is_folder or os.path.isfile(place) else []
        texts = TEXTS if {key, path} & {*WEIGHED} and not weights else None
        if each := [sha256_of_path(file, texts) for file in files]:
            out[key] = each[0] if len(each) == 1 else sha256_of_texts(each)
    return out


def changed_inputs(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Describe what differs between two results of `sha256_of_inputs`, by its key.

    Keys that only one of them has do not count, except keys of rows (a file against the hub).
    """
    out = {}
    for key in {**before, **now}:
        comparable = key.endswith("dataset") or (key in before and key in now)
        if comparable and before.get(key) != now.get(key):
            out[key] = f"the {'code' if key.endswith('_target_') else 'files'} of {key}"
    return out


def files_of(value: Any) -> list[Path]:
    """Return the files and folders that a value names: a path, a pattern with *, or several.

    An adapter of peft is followed by the folder of its base.
    """
    files: list[Path] = []
    for name in value if isinstance(value, list) else [value]:
        path = os.path.expanduser(VARIABLE.sub(lambda m: os.environ.get(m[1], ""), str(name)))
        is_pattern = "*" in path and not os.path.exists(path)
        files += map(Path, sorted(glob(path, recursive=True)) if is_pattern else [path])
    files = [file for file in files if os.path.exists(file)]
    for file in files:  # also those that are added here
        with suppress(OSError, ValueError, KeyError, TypeError):  # find_model reports the fault
            base = json.loads((file / ADAPTER).read_text())["base_model_name_or_path"]
            base = Path(base).expanduser()
            if base.exists() and base not in files:
                files.append(base)
    return files


def code_files(target: str) -> list[Path]:
    """Return the files of a dotted name's module and of all that it imports, by their text.

    Files of leash, of Python and of installed packages are left out.
    """
    files = [*_files_of_import(target)]
    for file in files:
        files += [new for new in dict.fromkeys(_imported(file)) if new not in files]
    return sorted({*files})


def _imported(file: Path) -> Iterator[Path]:
    """Yield the files that the imports in a Python file name."""
    with suppress(SyntaxError, ValueError):  # a library in C; the import itself reports a fault
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from _files_of_import(alias.name)
            elif isinstance(node, ast.ImportFrom):
                folders = [str(file.parents[node.level - 1])] if node.level else None
                for alias in node.names:  # a module, or a name in one
                    name = f"{node.module}.{alias.name}" if node.module else alias.name
                    yield from _files_of_import(name, folders)


def _files_of_import(name: str, folders: list[str] | None = None) -> Iterator[Path]:
    """Yield the files that the import of a name runs; `folders`: where a relative one begins.

    Nothing is imported: `find_spec` of a name with dots would import its packages.
    """
    for part in name.split("."):
        if folders is None and part in ("conf", *CODE, *sys.stdlib_module_names):
            return
        spec = None
        with suppress(ValueError, ImportError):  # __main__
            spec = PathFinder.find_spec(part, folders) if folders else find_spec(part)
        if spec is None or {"site-packages", "dist-packages"} & {*Path(spec.origin or "").parts}:
            return
        if spec.origin and spec.has_location:
            yield Path(spec.origin)
        folders = list(spec.submodule_search_locations or [])
        if not folders:
            return
