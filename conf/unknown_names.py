"""Hints for unknown names: the nearest key or file, or a name in other_names.yaml."""

import difflib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from conf.schema import FOLDER, OPEN, all_keys
from trainer.runs.run_files import read_yaml

ALGORITHMS = "docs/algorithms.md"


@cache
def other_names() -> dict[str, dict[str, Any]]:
    """Read the names of other libraries, by page of docs/, each with leash's name."""
    read = read_yaml(Path(__file__).with_name("other_names.yaml"))
    return {
        page: {name: means for names, means in rows.items() for name in names.split(", ")}
        for page, rows in read.items()
    }


def known_elsewhere(key: str, value: Any = None) -> str:
    """Return a hint with leash's key for a key of another library; "" if unknown."""
    parts = key.split(".")
    for name in (".".join(parts[-2:]), parts[-1]):
        for page, names in other_names().items():
            if name in names and page != ALGORITHMS:
                return f"; {_hint(name, names[name], value, page)}"
    return ""


def _hint(name: str, means: Any, value: Any, page: str) -> str:
    """Render an entry of other_names.yaml; only the page if the entry lacks the value."""
    if isinstance(means, dict):
        ours = {str(theirs).lower(): words for theirs, words in means.items()}
        means = ours.get(str(value).lower())
        name = f"{name}={value}" if means else name
    return f"{name} is {means} here ({page})" if means else f"for {name} see {page}"


def nearest(key: str, value: Any = None) -> str:
    """Return a hint with known keys that resemble an unknown one."""
    if key in all_keys():
        return f" here; it belongs to {all_keys()[key][0]}"
    if key.startswith("tracker."):  # few keys, which each service names differently
        known = [name.partition(".")[2] for name in all_keys() if name.startswith("tracker.")]
        return f"; tracker has {', '.join(known)} (docs/configuration.md)"
    elsewhere, leaf = known_elsewhere(key, value), key.rpartition(".")[2]
    if elsewhere:
        return elsewhere
    close = [name for name in all_keys() if name.rpartition(".")[2] == leaf][:2]
    section = key.rpartition(".")[0]
    beside = [name for name in all_keys() if name.rpartition(".")[0] == section]
    leaves = difflib.get_close_matches(leaf, [name.rpartition(".")[2] for name in beside], 1, 0.7)
    close = close or [f"{section}.{each}" for each in leaves if section]
    close = close or difflib.get_close_matches(key, ["experiment", *all_keys()], 1, 0.85)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    if section in OPEN:
        return f"; only a class of your own, a _target_ of {section}, may have it ({ALGORITHMS})"
    return "; see --cfg job"


def missing_file(file: str, files: Sequence[str]) -> str:
    """Return the message for a missing file <group>/<name>; `files`: the existing ones."""
    group, _, name = file.removesuffix(".yaml").rpartition("/")
    if not group:
        return f"--config-name={name}: there is no file {name}.yaml in conf/ or --config-dir"
    top, _, path = file.partition("/")
    if top != "hydra" and "/" in path and not (FOLDER / group).is_dir():
        remedy = f"--config-dir=<folder> {top}={name} for <folder>/{top}/{name}.yaml"
        return f"{top}={path}: expected the name of a file, got a path; give {remedy}"
    if group == "algorithm" and (nearest_words := other_names()[ALGORITHMS].get(name)):
        return f"algorithm={name}: leash has none; nearest is {nearest_words} ({ALGORITHMS})"
    close = difflib.get_close_matches(name, files, n=2)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(files)}"
    return f"{group}={name}: there is no file {group}/{name}.yaml; {hint}"
