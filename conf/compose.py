"""From command-line words to checked configurations, without running anything.

Errors are one line: what was expected, what was got, the nearest known key.
"""

import difflib
import hashlib
import itertools
import re
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.checks import check
from conf.schema import register
from trainer.launch import read_status

FOLDER = Path(__file__).parent
RESUMABLE = ("trainer.num_iterations", "tracker", "launch", "checkpoint", "eval")


@cache
def _stamp() -> str:
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S")


@cache
def unique_folder(parent: str) -> str:
    """Reserve and return a dated folder that no other run has; the same one on every call."""
    for number in itertools.count(1):
        folder = Path(parent) / (_stamp() if number == 1 else f"{_stamp()}_{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return str(folder)
    raise AssertionError("unreachable")


def set_up() -> None:
    """Register the schema and the names that conf/config.yaml uses for folders."""
    register()
    OmegaConf.register_new_resolver(
        "run_dir", lambda plain, name: plain or unique_folder(f"outputs/{name}"), replace=True
    )
    OmegaConf.register_new_resolver("sweep_dir", sweep_folder, replace=True)
    OmegaConf.register_new_resolver("job_dir", job_name, replace=True)


@cache
def _first_sweep() -> list[str]:
    return []


def sweep_folder(experiment: str) -> str:
    """Reserve and return the folder of this process's sweep, also where it sweeps experiments."""
    if not _first_sweep():
        _first_sweep().append(unique_folder(f"multirun/{experiment}"))
    return _first_sweep()[0]


def job_name(overrides: str) -> str:
    """Return a folder name for a job: its overrides, shortened where a file system would refuse.

    >>> job_name("kl.coeff=0.1,policy.model=a/b"), job_name("")
    ('kl.coeff=0.1,policy.model=a_b', 'job')
    """
    name = overrides.replace("/", "_") or "job"
    if len(name.encode()) <= 200:
        return name
    return f"{name[:40]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def compose_checked(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the resolved, checked configuration of one job; any fault is a one-line ValueError."""
    cfg = _compose(overrides)
    missing = OmegaConf.missing_keys(cfg)
    if missing:
        raise ValueError(f"expected a value for {', '.join(sorted(missing))}, got none")
    plain = OmegaConf.to_container(cfg, resolve=True)
    check(plain)
    return plain


def _compose(overrides: Sequence[str]) -> DictConfig:
    set_up()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(FOLDER), version_base="1.3"):
            return compose("config", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_explain(error)) from error


def expand(words: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each job of a sweep, as Hydra's basic sweeper makes them.

    >>> expand(["kl.coeff=0,0.1", "seed=1"])
    [['kl.coeff=0', 'seed=1'], ['kl.coeff=0.1', 'seed=1']]
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(words))
    except HydraException as error:
        raise ValueError(str(error).splitlines()[0]) from error
    choices = []
    for item in parsed:
        if item.is_sweep_override():
            key = item.get_key_element()
            choices.append([f"{key}={value}" for value in item.sweep_string_iterator()])
        else:
            choices.append([item.input_line])
    return [list(job) for job in itertools.product(*choices)]


def load_for_resume(folder: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the saved configuration of a run with the few overrides that may change on resume."""
    path = Path(folder) / "config.yaml"
    if not path.is_file():
        raise ValueError(f"resume={folder}: expected a run folder with a config.yaml, got none")
    saved = OmegaConf.load(path)
    kind = "wandb" if saved.tracker._target_.endswith("WandbTracker") else "jsonl"
    fresh = _compose([f"tracker={kind}", *words] if _keeps_tracker(words) else words)
    for word in words:
        key = word.partition("=")[0].lstrip("+~")
        if not any(key == name or key.startswith(f"{name}.") for name in RESUMABLE):
            names = ", ".join(RESUMABLE)
            raise ValueError(f"{key} cannot change on resume, only {names}; start a new run for it")
        OmegaConf.update(saved, key, OmegaConf.select(fresh, key), merge=False)
    saved.resume = str(folder)
    plain = OmegaConf.to_container(saved, resolve=True)
    check(plain)
    return plain


def _keeps_tracker(words: Sequence[str]) -> bool:
    """Return whether no word swaps the tracker: its keys are then those of the saved one."""
    return not any(word.startswith("tracker=") for word in words)


def experiment_of(words: Sequence[str]) -> str:
    """Return the name of the experiment that command-line words choose."""
    for word in words:
        if word.startswith("experiment="):
            return word.removeprefix("experiment=")
    return "grpo_smollm"


def nothing_left(folder: Path, config: dict[str, Any]) -> str | None:
    """Return a line if a run already did all iterations asked for, else None."""
    done, asked = read_status(folder), config["trainer"]["num_iterations"]
    if done.get("state") != "finished" or done.get("iteration", 0) < asked:
        return None
    return (
        f"{folder} is finished: {done['iteration']} of {asked} iterations are done; "
        "trainer.num_iterations=<more> goes on"
    )


def _explain(error: Exception) -> str:
    """Return Hydra's complaint in one line, with the nearest known key where one is unknown."""
    text = "\n".join(str(e) for e in (error, error.__cause__) if e is not None)
    first = text.splitlines()[0].strip()
    group = re.search(r"Could not find '(\w+)/([^']+)'", text)
    if group:
        names = sorted(path.stem for path in (FOLDER / group[1]).glob("*.yaml"))
        return f"no {group[1]} {group[2]!r}; there are {', '.join(names)}"
    unknown = re.search(r"Could not override '([\w.]+)'", text)
    key = re.search(r"full_key: (\S+)", text)
    if unknown or re.search(r"Key '.*' (is )?not in", text):
        name = unknown[1] if unknown else key[1] if key else first
        where = re.search(r"In '([^']+)'", text)
        place = f" in {where[1]}" if where else ""
        return f"there is no key {name}{place}{_nearest(name)}"
    if error.__cause__ is not None:
        cause = str(error.__cause__).splitlines()[0].strip()
        return f"{first}: {cause}"
    return first


def _nearest(key: str) -> str:
    """Return a hint at known keys that look like an unknown one."""
    known = _known_keys()
    if key in known:
        return " here; it belongs to another algorithm"
    leaf = key.rpartition(".")[2]
    same = [name for name in known if name.rpartition(".")[2] == leaf]
    close = same or difflib.get_close_matches(key, known, n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _known_keys() -> list[str]:
    names = []
    for algorithm in ("grpo", "sft"):
        plain = OmegaConf.to_container(_compose([f"algorithm={algorithm}"]), resolve=False)
        names += _names(plain, "")
    return sorted(set(names))


def _names(node: dict[str, Any], prefix: str) -> list[str]:
    out = []
    for key, value in node.items():
        name = f"{prefix}{key}"
        out.append(name)
        if isinstance(value, dict):
            out += _names(value, f"{name}.")
    return out
