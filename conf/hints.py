"""What an unknown name may stand for: the nearest key or file, or a key of another library.

conf/other_names.yaml has the names of TRL, verl, OpenRLHF and NeMo-RL.
"""

import difflib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from conf.schema import FOLDER, all_keys
from trainer.runs.run_files import read_yaml


@cache
def other_names() -> dict[str, dict[str, Any]]:
    return read_yaml(Path(__file__).with_name("other_names.yaml"))


def known_elsewhere(key: str, value: Any = None) -> str:
    """Return a hint at what another library's key is called here; "" if none is known.

    >>> known_elsewhere("learning_rate")
    '; learning_rate is optimizer.lr here (docs/coming_from_trl.md)'
    >>> known_elsewhere("loss_type", "dr_grpo")
    '; loss_type=dr_grpo is algorithm.aggregation=constant here (docs/coming_from_trl.md)'
    >>> known_elsewhere("actor_rollout_ref.rollout.n"), known_elsewhere("kl.ceoff")
    ('; rollout.n is algorithm.group_size here (docs/coming_from_verl.md)', '')
    """
    parts = key.split(".")
    for name in (".".join(parts[-2:]), parts[-1]):
        for means, page in _entries(name):
            if isinstance(means, dict):
                by_value = {_short(each): ours for each, ours in means.items()}
                given = by_value.get(_short(value))
                name, means = (
                    (f"{name}={value}", given) if given else (name, next(iter(means.values())))
                )
                means = means if given else str(means).partition("=")[0]
            ours, _, note = str(means).partition("; ")
            ours = ours.partition(" = ")[0]
            what = f"{' and '.join(ours.split())} here" if ours else note
            return f"; {name} is {what} ({page})" if ours else f"; {name}: {what} ({page})"
    return ""


def _entries(name: str) -> Iterator[tuple[Any, str]]:
    for library in other_names().values():
        for file in library.keys() - {"page"}:
            if name in library[file]:
                yield library[file][name], library["page"]


def _short(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def nearest(key: str, value: Any = None) -> str:
    """Return a hint at known keys that look like an unknown one.

    >>> nearest("kl.coef"), nearest("learning_rate")
    ('; did you mean kl.coeff?', '; learning_rate is optimizer.lr here (docs/coming_from_trl.md)')
    """
    if key in all_keys():
        return f" here; it belongs to {all_keys()[key]}"
    leaf = key.rpartition(".")[2]
    same = [name for name in all_keys() if name.rpartition(".")[2] == leaf]
    close = same or difflib.get_close_matches(key, all_keys(), n=1, cutoff=0.75)
    elsewhere = known_elsewhere(key, value)
    if elsewhere and not close:
        return elsewhere
    close = close or difflib.get_close_matches(key, [*all_keys(), "experiment"], n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(close[:2])}?{elsewhere}" if close else "; see --cfg job"


def missing_file(group: str, name: str) -> str:
    """Return the line on a choice that is no file of a group of conf/."""
    files = sorted(path.stem for path in (FOLDER / group).glob("*.yaml"))
    close = difflib.get_close_matches(re.sub(r"\.yaml$", "", name), files, n=2)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(files)}"
    return f"{group}={name}: there is no file conf/{group}/{name}.yaml; {hint}"
