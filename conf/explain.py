"""What is wrong with a configuration, in one line with the nearest known key. Torch-free."""

import difflib
import re
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.foreign import known_elsewhere
from conf.schema import register

FOLDER = Path(__file__).parent
FILES = (  # which together have every key
    *("algorithm=grpo", "algorithm=ppo", "algorithm=sft", "algorithm=minor_sft"),
    *("tracker=wandb", "tracker=tensorboard"),
)
NARROWING = ("top_k", "top_p", "min_p", "repetition_penalty", "min_new_tokens")
KINDS = {  # what Hydra and OmegaConf say of a value, and what a key wants then
    "converted to Integer": "a whole number",
    "converted to Float": "a number",
    "is not a valid bool": "true or false",
    "to string": "a text",
    "is not a ListConfig|object_type=list": "a list, [a, b]",
    r"to Dict\[|DictConfig with ListConfig": "keys with values, {a: 1}",
    "is not Optional|Incompatible value 'None'": "a value, not null",
}
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
    if found := _ill_formed(text, words) or _mistyped(text):
        return found
    group = re.search(r"Could not find '(\w+)/([^'/]*)'", text)
    if group:
        names = sorted(path.stem for path in (FOLDER / group[1]).glob("*.yaml"))
        return f"no {group[1]} {group[2]!r}; there are {', '.join(names)}"
    if "Config group override must be" in text:
        word = next(word for word in words if (FOLDER / word.partition("=")[0]).is_dir())
        folder = word.partition("=")[0]
        files = ", ".join(sorted(path.stem for path in (FOLDER / folder).glob("*.yaml")))
        keys = ", ".join(n for n in _known_keys() if n.startswith(f"{folder}."))
        return f"{word}: expected a file of conf/{folder} ({files}); its keys are {keys}"
    unknown = re.search(r"Could not override '([^']+)'", text)
    key = re.search(r"full_key: (\S+)", text)
    if unknown or re.search(r"Key '.*' (is )?not in", text):
        name = unknown[1] if unknown else key[1] if key else text.splitlines()[0]
        where = re.search(r"In '([^']+)'", text)
        if where and name in _all_keys() and (chosen := _chosen(words)):
            return (
                f"conf/{where[1]}.yaml sets {name}, which goes with another part than "
                f"{' '.join(chosen)}; take another experiment, or leave {' '.join(chosen)} out"
            )
        place = f" (conf/{where[1]}.yaml)" if where else ""
        return f"there is no key {name}{place}{nearest(name, words)}"
    scalar = re.search(r"(\w+) is not a subclass of \w+Config. value: (.*)", text)
    if scalar and key:
        names = ", ".join(n for n in _known_keys() if n.startswith(f"{key[1]}."))
        return f"expected keys in {key[1]} ({names}), got {scalar[2]!r}"
    first = text.strip().splitlines()[0].removeprefix("Error merging override ")
    details = [key[1]] if key and "=" not in first else []
    if error.__cause__ is not None:
        cause = str(error.__cause__).splitlines()[0].strip()
        details += [] if cause in first else [cause]
    return ": ".join([first, *details])


def _ill_formed(text: str, words: Sequence[str]) -> str | None:
    """Return the line on a word that Hydra cannot read or carry out, if a complaint is one."""
    if swept := re.search(r"Ambiguous value for argument '(.*)'", text):
        value = swept[1].partition("=")[2]
        return f"{swept[1]} is several values; to sweep: -m {swept[1]}; for one: '[{value}]'"
    first = text.partition("\n")[0]
    if re.search(r"parsing override|viable ?alt|mismatched|extraneous|token recog", first, re.I):
        word = next((word for word in words if word in text), " ".join(words))
        name, _, value = word.partition("=")
        value = value.replace('"', r"\"")
        quoted = shlex.quote(f'{name}="{value}"')
        return f"cannot read {word}; quote values with special characters: {quoted}"
    if there := re.search(r"already at '(\S+)'", text):
        return f"there is a key {there[1]}; leave the + out: {there[1]}=..."
    if gone := re.search(r"Could not delete from config. '(\S+)' does not", text):
        return f"there is no key {gone[1]}; leave ~{gone[1]} out"
    if looked_up := re.search(r"Interpolation key '(\S+)' not found", text):
        name, key = looked_up[1], re.search(r"full_key: (\S+)", text)
        where = f"{key[1]}: " if key else ""
        return f"{where}there is no key {name}; what the environment has is ${{oc.env:{name}}}"
    return None


def _mistyped(text: str) -> str | None:
    """Return the line on a value of another type than its key's, if a complaint is about one."""
    wants = next((kind for said, kind in KINDS.items() if re.search(said, text)), None)
    key = re.search(r"full_key: (\S+)", text) or re.search(r"field '(\S+)' is not", text)
    word = re.search(r"override [+]*([\w.]+)=(.*)", text)
    if wants is None or not (key or word):
        return None
    name = key[1] if key else word[1]
    if word and word[1].startswith(f"{name}."):
        return f"there is no key {word[1]}; {name} is {wants}"
    value = word or re.search(r"()Value '(.*?)' (?:of type|is not)", text)
    got = repr(value[2]) if value else "null"
    where = re.search(r"In '([^']+)'", text)
    place = f" (conf/{where[1]}.yaml)" if where else ""
    return f"expected {name} to be {wants}, got {got}{place}"


def nearest(key: str, words: Sequence[str] = ()) -> str:
    """Return a hint at known keys that look like an unknown one."""
    known = _known_keys(*(w for w in words if _is_choice(w)))
    parent, _, leaf = key.rpartition(".")
    if key not in known and (file := next((f for f in FILES if key in _known_keys(f)), "")):
        return f" here; it belongs to {file}"
    if leaf in NARROWING:
        return (
            ": training samples from the whole distribution, since its log-probs and its KL could "
            "not follow a part of it; use policy.temperature"
        )
    beside = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == parent]
    same = _topmost([name for name in known if name.rpartition(".")[2] == leaf])
    if not same and (hint := known_elsewhere(key)):
        return hint
    same = same or _topmost([name for name in _all_keys() if name.rpartition(".")[2] == leaf])
    close = same or difflib.get_close_matches(key, [*known, "experiment"], n=2, cutoff=0.6)
    if parent and beside and (len(beside) <= FEW or not close):
        return f"; {parent} has {', '.join(beside)}"
    return f"; did you mean {' or '.join(close)}?" if close else "; --cfg job prints all keys"


def _is_choice(word: str) -> bool:
    """Return whether a word chooses a file of conf/, as algorithm=grpo does."""
    return bool(re.fullmatch(r"[a-z]+=\w+", word)) and (FOLDER / word.partition("=")[0]).is_dir()


def _chosen(words: Sequence[str]) -> list[str]:
    return [w for w in words if _is_choice(w) and not w.startswith("experiment=")]


def _topmost(keys: Sequence[str]) -> list[str]:
    """Return the keys with the fewest parts: others only hand them on."""
    fewest = min((key.count(".") for key in keys), default=0)
    return [key for key in keys if key.count(".") == fewest]


def is_known(name: str) -> bool:
    """Return whether a name is that of a key or of a folder of files to choose from."""
    return name == "experiment" or name in _all_keys()


@cache
def _known_keys(*words: str) -> list[str]:
    try:
        cfg = compose_raw(words)
    except (HydraException, OmegaConfBaseException):  # the file at fault is among the words
        return _all_keys()
    return sorted(_names(OmegaConf.to_container(cfg, resolve=False), ""))


def _all_keys() -> list[str]:
    return sorted({name for file in FILES for name in _known_keys(file)})


def _names(node: dict[str, Any], prefix: str) -> list[str]:
    out = []
    for key, value in node.items():
        out.append(f"{prefix}{key}")
        if isinstance(value, dict):
            out += _names(value, f"{prefix}{key}.")
    return out
