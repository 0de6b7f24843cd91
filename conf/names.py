"""The names of keys: all there are, the nearest to an unknown one, and what others call them.

Torch-free. conf/other_names.yaml holds the names of TRL, verl, OpenRLHF and of older leash.
"""

import difflib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from conf.schema import keys
from trainer.runs.run_files import read_yaml

FOLDER = Path(__file__).parent
NARROWING = ("repetition_penalty", "min_new_tokens", "presence_penalty", "frequency_penalty")
FEW = 5  # so many names are listed, of more the nearest is


@cache
def all_keys() -> dict[str, str]:
    """Return every key, and those of sections, with the first part of conf/ that declares it."""
    out: dict[str, str] = {}
    for key, parts in keys().items():
        steps = key.split(".")
        for end in range(1, len(steps) + 1):
            out.setdefault(".".join(steps[:end]), next(iter(parts)))
    return out


@cache
def other_names() -> dict[str, dict[str, Any]]:
    return read_yaml(Path(__file__).with_name("other_names.yaml"))


def known_elsewhere(key: str) -> str:
    """Return a hint at the key that takes the place of another library's; "" if none is known.

    >>> known_elsewhere("--learning-rate")
    '; learning_rate is optimizer.lr here (docs/coming_from_trl.md)'
    >>> known_elsewhere("actor_rollout_ref.rollout.n"), known_elsewhere("kl.ceoff")
    ('; rollout.n is algorithm.group_size here (docs/coming_from_verl.md)', '')
    """
    parts = key.lstrip("-+").replace("-", "_").split(".")
    units = other_names()["units"]
    pages = {"trl": "docs/coming_from_trl.md", "verl": "docs/coming_from_verl.md"}
    for library, page in (pages | {"leash": "CHANGELOG.md"}).items():
        sections = parts if library == "leash" else parts[-1:]  # shaping.overlong.buffer
        for name in (*sections, ".".join(parts[-2:])):
            if here := other_names()[library].get(name):
                return f"; {name} is {here} here{units.get(here, '')} ({page})"
    return ""


def nearest(key: str) -> str:
    """Return a hint at known keys that look like an unknown one."""
    parent, _, leaf = key.rpartition(".")
    if key in all_keys():
        return f" here; it belongs to {all_keys()[key]}"
    if leaf in NARROWING:
        why = "it only changes samples, and ratio and KL would be of another distribution"
        return f": {why}; policy.temperature, top_k, top_p and min_p are scored as well"
    if key.startswith(("algorithm.shaping", "algorithm.mismatch")):  # of before, with what is in it
        return known_elsewhere(key)
    usual = [k for k, choice in all_keys().items() if "=" not in choice or choice.endswith("grpo")]
    close = _topmost([name for name in usual if name.rpartition(".")[2] == leaf])
    if not close and (hint := known_elsewhere(key)):
        return hint
    close = close or _topmost([name for name in all_keys() if name.rpartition(".")[2] == leaf])
    close = close or difflib.get_close_matches(key, [*all_keys(), "experiment"], n=2, cutoff=0.6)
    beside = [name.rpartition(".")[2] for name in usual if name.rpartition(".")[0] == parent]
    if parent and beside and (len(beside) <= FEW or not close):
        return f"; {parent} has {', '.join(beside)}"
    return f"; did you mean {' or '.join(close)}?" if close else "; --cfg job prints all keys"


def _topmost(keys: Sequence[str]) -> list[str]:
    """Return the keys with the fewest parts."""
    fewest = min((key.count(".") for key in keys), default=0)
    return [key for key in keys if key.count(".") == fewest]
