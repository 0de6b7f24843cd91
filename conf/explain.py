"""What is wrong with a configuration, in one line with the nearest known key. Torch-free."""

import difflib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.schema import register

FOLDER = Path(__file__).parent
EITHER = (("algorithm=grpo",), ("algorithm=sft",))
NARROWING = ("top_k", "top_p", "min_p", "repetition_penalty", "min_new_tokens")
FEW = 5  # so many names are listed, of more the nearest is


def compose_raw(words: Sequence[str], *, hydra: bool = False) -> DictConfig:
    """Compose without any check; Hydra's own errors."""
    register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        return compose("config", overrides=list(words), return_hydra_config=hydra)


def explain(error: Exception, words: Sequence[str] = ()) -> str:
    """Return a complaint of Hydra or OmegaConf in one line."""
    text = "\n".join(str(e) for e in (error, error.__cause__) if e is not None)
    swept = re.search(r"Ambiguous value for argument '(.*)'", text)
    if swept:
        value = swept[1].partition("=")[2]
        return f"{swept[1]} is several values; to sweep: -m {swept[1]}; for one: '[{value}]'"
    group = re.search(r"Could not find '(\w+)/([^'/]*)'", text)
    if group:
        names = sorted(path.stem for path in (FOLDER / group[1]).glob("*.yaml"))
        return f"no {group[1]} {group[2]!r}; there are {', '.join(names)}"
    if "Config group override must be" in text:
        word = next(w for w in words if (FOLDER / w.partition("=")[0]).is_dir())
        folder = word.partition("=")[0]
        files = ", ".join(sorted(path.stem for path in (FOLDER / folder).glob("*.yaml")))
        keys = ", ".join(n for n in _known_keys(((),)) if n.startswith(f"{folder}."))
        return f"{word}: expected a file of conf/{folder} ({files}); its keys are {keys}"
    unknown = re.search(r"Could not override '([^']+)'", text)
    key = re.search(r"full_key: (\S+)", text)
    if unknown or re.search(r"Key '.*' (is )?not in", text):
        name = key[1] if key else unknown[1] if unknown else text.splitlines()[0]
        where = re.search(r"In '([^']+)'", text)
        place = f" (conf/{where[1]}.yaml)" if where else ""
        return f"there is no key {name}{place}{nearest(name, words)}"
    scalar = re.search(r"(\w+) is not a subclass of \w+Config. value: (.*)", text)
    if scalar and key:
        names = ", ".join(n for n in _known_keys(((),)) if n.startswith(f"{key[1]}."))
        return f"expected keys in {key[1]} ({names}), got {scalar[2]!r}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0].removeprefix("Error merging override ")
    if re.search(r"viable ?alt|mismatched input|extraneous input|token recognition", first, re.I):
        word = next((word for word in words if word in text), " ".join(words))
        name, _, value = word.partition("=")
        quoted = f"""'{name}="{value}"'"""
        return f"cannot read {word}: {first}; quote values with special characters: {quoted}"
    details = [key[1]] if key and "=" not in first else []
    if error.__cause__ is not None:
        cause = str(error.__cause__).splitlines()[0].strip()
        details += [] if cause in first else [cause]
    return ": ".join([first, *details])


def nearest(key: str, words: Sequence[str] = ()) -> str:
    """Return a hint at known keys that look like an unknown one."""
    chosen = [word for word in words if re.fullmatch(r"[a-z]+=\w+", word)]
    known = _known_keys((tuple(chosen),))
    if key not in known and key in _known_keys(EITHER):
        return " here; it belongs to another algorithm"
    parent, _, leaf = key.rpartition(".")
    if leaf in NARROWING:
        return (
            ": training samples from the whole distribution, since its log-probs and its KL could "
            "not follow a part of it; use policy.temperature"
        )
    beside = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == parent]
    same = [name for name in known if name.rpartition(".")[2] == leaf]
    close = same or difflib.get_close_matches(key, [*known, "experiment"], n=2, cutoff=0.6)
    if parent and beside and (len(beside) <= FEW or not close):
        return f"; {parent} has {', '.join(beside)}"
    return f"; did you mean {' or '.join(close)}?" if close else ""


def is_known(name: str) -> bool:
    """Return whether a name is that of a key or of a folder of files to choose from."""
    return name == "experiment" or name in _known_keys(EITHER)


@cache
def _known_keys(choices: tuple[tuple[str, ...], ...]) -> list[str]:
    names: set[str] = set()
    for words in choices:
        try:
            cfg = compose_raw(words)
        except (HydraException, OmegaConfBaseException):  # the file at fault is among the words
            return _known_keys(EITHER)
        names.update(_names(OmegaConf.to_container(cfg, resolve=False), ""))
    return sorted(names)


def _names(node: dict[str, Any], prefix: str) -> list[str]:
    out = []
    for key, value in node.items():
        out.append(f"{prefix}{key}")
        if isinstance(value, dict):
            out += _names(value, f"{prefix}{key}.")
    return out
