"""What somebody may have meant: the nearest key or file, or what another library calls so.

Torch-free; loaded where there is a fault. conf/other_names.yaml holds the names of TRL, verl,
OpenRLHF, NeMo-RL and of older leash, each below the file of the peer that says it.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from operator import add, mul, sub, truediv
from pathlib import Path
from typing import Any

from conf import names
from conf.names import all_keys
from conf.schema import keys
from trainer.runs.run_files import read_yaml

SIGNS: dict[str, Callable[[float, float], float]] = {"*": mul, "/": truediv, "-": sub, "+": add}
NARROWING = ("repetition_penalty", "min_new_tokens", "presence_penalty", "frequency_penalty")
FEW = 5  # so many names are listed, of more the nearest is
LookUp = Callable[[str], Any]  # the value of a key of ours, None if it has none


class Several(ValueError):
    """Several faults of one command line, a line each."""

    def __init__(self, faults: Sequence[ValueError]) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = faults


@cache
def other_names() -> dict[str, dict[str, Any]]:
    return read_yaml(Path(__file__).with_name("other_names.yaml"))


def known_elsewhere(key: str, value: Any = None, *, look_up: LookUp = lambda key: None) -> str:
    """Return a hint at what takes the place of another library's key; "" if none is known.

    >>> known_elsewhere("--learning-rate")
    '; learning_rate is optimizer.lr here (docs/coming_from_trl.md)'
    >>> ours = {"trainer.prompts_per_iteration": 64}
    >>> known_elsewhere("ppo_mini_batch_size", 16, look_up=ours.get)[:56]
    '; ppo_mini_batch_size=16 is algorithm.minibatches=4 here'
    >>> known_elsewhere("actor_rollout_ref.rollout.n"), known_elsewhere("kl.ceoff")
    ('; rollout.n is algorithm.group_size here (docs/coming_from_verl.md)', '')
    """
    parts = key.lstrip("-+").replace("-", "_").split(".")
    for wanted in ([".".join(parts[-2:])], parts[-1:], parts[:-1]):
        hints: dict[str, str] = {}  # by what is ours: the same key of two libraries is told once
        whole = wanted != parts[:-1]  # else what is given is a part of it: shaping.overlong.buffer
        for name, means, library, page in _entries(wanted):
            ours, text = _hint(name, means, value if whole else None, look_up)
            told = re.sub(r"\)?$", f"{'; ' if text.endswith(')') else ' ('}{page})", text, count=1)
            hints.setdefault(ours, f"{library}'s {told}" if hints else told)
        if hints:
            return f"; {'; '.join(hints.values())}"
    return ""


def _entries(wanted: list[str]) -> Iterator[tuple[str, Any, str, str]]:
    """Yield each entry of a name: the name, what it means, whose it is, and their page."""
    for library, read in other_names().items():
        for file in read.keys() - {"page"}:
            for name in wanted:
                if name in read[file]:
                    yield name, read[file][name], library.partition(" ")[0], read["page"]


def _hint(name: str, means: Any, value: Any, look_up: LookUp) -> tuple[str, str]:
    """Return what takes the place of a key, and that in words, with its value if it has one."""
    plain = not isinstance(value, dict | list | None) and " " not in str(value)
    given = f"{name}={_short(value)}" if plain else name
    if isinstance(means, dict):
        choices = {_short(choice): here for choice, here in means.items()}
        keys = dict.fromkeys(here.partition("=")[0] for here in choices.values() if here)
        if not plain or _short(value) not in choices:
            known = ", ".join(choices)
            return next(iter(keys)), f"{name} is {' or '.join(keys)} here (its values: {known})"
        here = choices[_short(value)]
        return str(here), f"{given} is {here} here" if here else f"{given} is missing here"
    here, _, note = means.partition("; ")
    if not here:
        return note, f"{name}: {note}"
    ours, _, formula = here.partition(" = ")
    if not formula:
        text = f"{name} is {' and '.join(ours.split())} here"
        if plain and not note:
            text = f"{given} is {' '.join(f'{key}={_short(value)}' for key in ours.split())} here"
        return ours, f"{text} ({note})" if note else text
    words = [_number(word, name, value, look_up) for word in formula.split()]
    result = _computed(words)
    shown = f"{formula} = {' '.join(map(_short, words))}" if result is not None else formula
    if result is not None and result == round(result, 9) and (result % 1 == 0 or "decay" in ours):
        return ours, f"{given} is {ours}={result:g} here ({shown})"
    return ours, f"{name} is {ours} here ({'; '.join(filter(None, [shown, note]))})"


def _number(word: str, name: str, value: Any, look_up: LookUp) -> Any:
    """Return the number that a word of a formula stands for, or the word."""
    if word == name.rpartition(".")[2]:
        word = str(value)
    found = look_up(word) if "." in word else None
    try:
        return word if word in SIGNS else float(word if found is None else found)
    except (TypeError, ValueError):
        return word


def _computed(words: list[Any]) -> float | None:
    """Return what a formula comes to, from left to right; None if a number is missing."""
    total, rest = words[0], words[1:]
    if any(isinstance(word, str) for word in words[::2]):
        return None
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        if sign == "/" and not number:
            return None
        total = SIGNS[sign](total, number)
    return total


def _short(value: Any) -> str:
    """Return a value as it is written on a command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def nearest(key: str, value: Any = None, *, look_up: Callable[[str], Any] = str) -> str:
    """Return a hint at known keys that look like an unknown one, given with `value`."""
    elsewhere = known_elsewhere(key, value, look_up=look_up)
    parent, _, leaf = key.rpartition(".")
    if re.fullmatch("rewards?(_fn|_func|_funcs|_function)?", key) and "." in str(value):
        return reward_of(str(value))
    if key in all_keys():
        return f" here; it belongs to {all_keys()[key]}"
    if leaf in NARROWING:
        why = "it only changes samples, and ratio and KL would be of another distribution"
        return f": {why}; policy.temperature, top_k, top_p and min_p are scored as well"
    if key.startswith(("algorithm.shaping", "algorithm.mismatch")):  # of before, with what is in it
        return elsewhere
    usual = [k for k, choice in all_keys().items() if "=" not in choice or choice.endswith("grpo")]
    close = _topmost([name for name in usual if name.rpartition(".")[2] == leaf])
    if elsewhere and not any(name in elsewhere for name in close):  # the same name, another thing
        return f"; did you mean {close[0]}? Elsewhere {elsewhere[2:]}" if close else elsewhere
    close = close or _topmost([name for name in all_keys() if name.rpartition(".")[2] == leaf])
    close = close or difflib.get_close_matches(key, [*all_keys(), "experiment"], n=2, cutoff=0.6)
    if close and difflib.SequenceMatcher(None, key, close[0]).ratio() > 0.9:
        close = close[:1]  # a letter is wrong
    beside = [name.rpartition(".")[2] for name in usual if name.rpartition(".")[0] == parent]
    if parent and beside and (len(beside) <= FEW or not close):
        return f"; {parent} has {', '.join(beside)}"
    return f"; did you mean {' or '.join(close)}?" if close else "; --cfg job prints all keys"


def reward_of(function: str) -> str:
    """Return a hint at the override that takes a reward function, <module>.<name>."""
    name = function.rpartition(".")[2]
    node = (
        f"{{_target_: envs.rewards.Function, function: {{_target_: {function}, _partial_: true}}}}"
    )
    write = f"'env.rewards.{name}={node}' allow_targets=true"
    return f"; write {write} (TRLFunction in place of Function for one written for TRL)"


def _topmost(keys: Sequence[str]) -> list[str]:
    """Return the keys with the fewest parts."""
    fewest = min((key.count(".") for key in keys), default=0)
    return [key for key in keys if key.count(".") == fewest]


def no_file(group: str, got: Any) -> str:
    """Return the line on a choice that is no file of a group of conf/."""
    files = sorted(path.stem for path in (names.FOLDER / group).glob("*.yaml"))
    theirs = str(got).lower().partition("_")[0] if group == "experiment" else str(got).lower()
    if group in ("algorithm", "experiment") and (told := known_elsewhere(f"algorithm={theirs}")):
        return f"{group}={got}: {told.partition(': ')[2]}"
    if isinstance(got, int | float):  # kl=0.1
        meant = [k for k in keys() if k.startswith(f"{group}.") and _takes(k, got)][:1]
        hint = f"; did you mean {meant[0]}={got}?" if meant else ""
    else:
        word = str(got).lower()
        meant = [word] if word in files else difflib.get_close_matches(word, files, n=2)
        hint = (
            f"; did you mean {' or '.join(f'{group}={name}' for name in meant)}?" if meant else ""
        )
        files = [] if meant and len(files) > FEW else files
    known = f" ({', '.join(files)})" if files else ""
    return f"{group}={got}: expected a file of conf/{group}{known}{hint}"


def no_leash(experiment: str, algorithm: str) -> str:
    """Return the line on an algorithm that samples replies where an experiment has no KL."""
    like = f"{algorithm}_{experiment.partition('_')[2]}"
    there = (names.FOLDER / "experiment" / f"{like}.yaml").exists()
    return (
        f"experiment={experiment} samples no replies and switches the KL off (kl.measure=false), "
        f"algorithm={algorithm} samples some; {f'take experiment={like}, or ' if there else ''}"
        "give kl.measure=true kl.coeff=0.02 (0 only measures), or kl.measure=false for no KL"
    )


def _takes(key: str, number: float) -> bool:
    """Return whether a number is a value for a key, so that it may have been meant."""
    kinds = {declared.type.partition(" |")[0] for declared in keys()[key].values()}
    return type(number).__name__ in kinds or (type(number) is int and "float" in kinds)
