"""From command-line words to checked configurations, without running anything.

Every fault is a ValueError of one line; conf/explain.py words those that Hydra finds.
"""

import atexit
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.checks import check
from conf.explain import compose_raw, explain, nearest
from conf.files import holds_run, make_writable
from conf.help import list_experiments
from conf.schema import register
from conf.sweeps import check_single, with_swept
from conf.words import check_flags, check_overrides, spell_out, split
from trainer.runs.job_names import job_names
from trainer.runs.run_files import find_jobs, is_sweep, read_status, remove_unused

RESUMABLE = ("trainer.num_iterations", "tracker", "launch", "checkpoint", "eval")


@cache
def _stamp() -> str:
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S")


@cache
def unique_folder(parent: str) -> str:
    """Reserve and return a dated folder that no other run has; the same one on every call."""
    make_writable(parent, "output_dir")
    for number in itertools.count(1):
        folder = Path(parent) / (_stamp() if number == 1 else f"{_stamp()}_{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        atexit.register(remove_unused, folder.absolute())
        return str(folder)
    raise AssertionError("unreachable")


def set_up() -> None:
    """Register the schema and the names that conf/config.yaml uses for folders."""
    first: list[str] = []  # one folder a sweep, also if it is the experiment that is swept

    def sweep_dir(name: str) -> str:
        first.append(first[0] if first else unique_folder(f"multirun/{name}"))
        return first[0]

    def run_dir(plain: str | None, name: str) -> str:
        return str(Path(plain).expanduser()) if plain else unique_folder(f"outputs/{name}")

    @cache
    def names() -> list[str]:
        return job_names(expand(split(sys.argv[1:])[1]))

    def job_dir(number: int) -> str:
        return names()[number]

    register()
    for resolver in (run_dir, sweep_dir):
        OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)
    OmegaConf.register_new_resolver("job_dir", job_dir, replace=True)
    OmegaConf.register_new_resolver("experiments", list_experiments, replace=True)


def compose_checked(words: Sequence[str]) -> dict[str, Any]:
    """Return the checked configuration of one job, to be saved; see `settle`."""
    return settle(_compose(words))


def compose_experiment(name: str) -> dict[str, Any]:
    """Return the checked configuration of an experiment as its file has it."""
    return compose_checked([f"experiment={name}"])


def settle(cfg: DictConfig) -> dict[str, Any]:
    """Check a composed configuration and return it resolved; any fault is a ValueError.

    Texts that come from the environment (`${oc.env:NAME}`) stay as they are written: they may be
    secrets, and whoever reads the saved file looks them up again.
    """
    for key in _strangers(cfg, ""):
        raise ValueError(f"there is no key {key}{nearest(key)}")
    try:
        missing = OmegaConf.missing_keys(cfg)
        plain = {} if missing else OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(explain(error)) from error
    if missing:
        raise ValueError(f"expected a value for {(key := min(missing))}, got none; give {key}=...")
    check(plain)
    raw = OmegaConf.to_container(cfg, resolve=False)
    return _keep_environment(raw, plain, set(_from_environment(raw, plain)))


def run_folder(words: Sequence[str], *, sweep: bool = False) -> Path:
    """Return the folder that Hydra would use for these words, made and open to writing."""
    folders = compose_raw(words, hydra=True).hydra
    try:
        if sweep:
            return make_writable(folders.sweep.dir, "hydra.sweep.dir")
        return make_writable(folders.run.dir, "output_dir")
    except OmegaConfBaseException as error:  # from run_dir or sweep_dir
        raise ValueError(str(error).splitlines()[0].rpartition("interpolation: ")[2]) from error


def _compose(words: Sequence[str]) -> DictConfig:
    words = spell_out(words)
    check_overrides(words)
    try:
        return compose_raw(words)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ValueError(explain(error, words)) from error


def _strangers(cfg: Any, prefix: str) -> list[str]:
    """Return the keys that the schema does not have; `+key=value` adds them unasked."""
    kind = OmegaConf.get_type(cfg)
    if not (isinstance(cfg, DictConfig) and dataclasses.is_dataclass(kind)):
        return []
    known = {field.name for field in dataclasses.fields(kind)}
    out = [f"{prefix}{key}" for key in cfg if key not in known]
    for key in known & set(cfg):
        child = None if OmegaConf.is_missing(cfg, key) else cfg._get_node(key)
        out += _strangers(child, f"{prefix}{key}.")
    return out


def _items(raw: Any) -> Any:
    return raw.items() if isinstance(raw, dict) else enumerate(raw)


def _from_environment(raw: Any, plain: Any) -> list[str]:
    if isinstance(raw, (dict, list)):
        return [text for key, item in _items(raw) for text in _from_environment(item, plain[key])]
    return [plain] if isinstance(plain, str) and "oc.env:" in str(raw) else []


def _keep_environment(raw: Any, plain: Any, secrets: set[str]) -> Any:
    if isinstance(raw, dict):
        return {key: _keep_environment(raw[key], plain[key], secrets) for key in raw}
    if isinstance(raw, list):
        return [_keep_environment(*pair, secrets) for pair in zip(raw, plain, strict=True)]
    if not isinstance(plain, str):
        return plain
    return raw if plain in secrets and "${" in str(raw) else plain.replace("${", "\\${")


def expand(words: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each job of a sweep, as Hydra's basic sweeper makes them.

    What the experiment itself sweeps (hydra.sweeper.params) is among them.

    >>> expand(["kl.coeff=0,0.1", "seed=1"])
    [['kl.coeff=0', 'seed=1'], ['kl.coeff=0.1', 'seed=1']]
    """
    check_overrides(words)
    choices = []
    for word in with_swept(words):
        try:
            (item,) = OverridesParser.create().parse_overrides([word])
            key = item.get_key_element()
            swept = item.is_sweep_override()
            values = list(item.sweep_string_iterator()) if swept else []
        except HydraException as error:
            raise ValueError(_explain_sweep(word, error)) from error
        choices.append([f"{key}={value}" for value in values] if swept else [word])
    return [list(job) for job in itertools.product(*choices)]


def _explain_sweep(word: str, error: Exception) -> str:
    key = word.partition("=")[0]
    if "glob(" in word or "interval(" in word:
        return f"{word}: a sweep takes values, {key}=a,b,c or {key}=range(0,3); glob does not work"
    return explain(error, [word])


@dataclasses.dataclass(frozen=True)
class Resumed:
    """A run to go on with; `done` says so if nothing is left to do."""

    folder: Path
    config: dict[str, Any]
    done: str | None


def check_words(words: Sequence[str]) -> Resumed | None:
    """Check a command line, every job of a sweep too; return the run that it resumes, if any.

    With a flag that only shows something (--cfg, --help ...) the words are left to Hydra.
    """
    check_flags(words)
    flags, overrides = split(words)
    folder = next((w.removeprefix("resume=") for w in overrides if w.startswith("resume=")), None)
    if folder == "":
        raise ValueError("expected resume=<run folder>, got none; leave it out to start a new run")
    if folder:
        if flags:
            raise ValueError(f"resume={folder} goes with no flag, got {' '.join(sorted(flags))}")
        others = [word for word in overrides if word != f"resume={folder}"]
        config = load_for_resume(folder, others)
        return Resumed(Path(folder), config, nothing_left(Path(folder), config))
    if not flags - {"-m", "--multirun"}:
        jobs = expand(overrides) if flags else [overrides]
        for job in jobs:
            check_single(job)
            if compose_checked(job)["output_dir"] and flags:
                raise ValueError("output_dir is one folder; a sweep takes hydra.sweep.dir=")
        there = run_folder(jobs[0], sweep=bool(flags))
        if not flags and holds_run(there):
            raise ValueError(f"{there} already holds a run; go on with it by resume={there}")
    return None


def compose_joined(words: Sequence[str], *, ranks: int) -> dict[str, Any]:
    """Return the configuration of one rank of `ranks` that an outside launcher started."""
    if any(word.startswith(("-", "resume=", "mode=", "preflight=")) for word in words):
        raise ValueError(
            f"{' '.join(words)}: torchrun and accelerate launch start one new run; use python "
            f"train.py -m or python train.py resume=..., with launch.num_processes={ranks}"
        )
    check_single(words)
    return compose_checked([*words, f"launch.num_processes={ranks}"])


def load_for_resume(
    folder: str, words: Sequence[str], *, mode: str = "train", may=RESUMABLE, **instead: Any
) -> dict[str, Any]:
    """Return a run's saved configuration, `instead` in it, with overrides that `may` change."""
    path = Path(folder) / "config.yaml"
    if not path.is_file():
        raise ValueError(f"resume={folder}: {_no_run(Path(folder))}")
    keys = [word.partition("=")[0].lstrip("+~") for word in words]
    for key in keys:
        if not any(key == name or key.startswith(f"{name}.") for name in may):
            when, names = "on resume" if mode == "train" else f"in mode={mode}", ", ".join(may)
            raise ValueError(f"{key} cannot change {when}, only {names}; start a new run for it")
    saved = OmegaConf.load(path)
    if "tracker" not in keys:  # its keys are those of the saved one
        kind = saved.tracker._target_.rpartition(".")[2].removesuffix("Tracker").lower()
        known = (Path(__file__).parent / "tracker" / f"{kind}.yaml").is_file()
        words = [f"tracker={kind if known else 'jsonl'}", *words]
    fresh = _compose(words)
    for key in keys:
        OmegaConf.update(saved, key, OmegaConf.select(fresh, key), merge=False)
    saved.update({"resume": str(folder), "mode": mode, "preflight": False, **instead})
    return settle(saved)


def _no_run(folder: Path) -> str:
    if folder.is_file():
        return f"expected the folder of a run, got a file; give resume={folder.parent}"
    jobs = find_jobs(folder) if is_sweep(folder) else []
    if jobs:
        return f"expected one run, got a sweep; give one of its jobs, resume='{jobs[0]}'"
    return "expected a run folder with a config.yaml, got none"


def nothing_left(folder: Path, config: dict[str, Any]) -> str | None:
    """Return a line if a run already did all iterations asked for, else None.

    More than were asked for, or more to do with no checkpoint to begin at, is a ValueError.
    """
    status, asked = read_status(folder), config["trainer"]["num_iterations"]
    done, finished = status.get("iteration", 0), status.get("state") == "finished"
    if done > asked:
        raise ValueError(
            f"{folder} has {done} iterations already, more than {asked}; give a larger "
            "trainer.num_iterations, or leave it out"
        )
    saved = any((folder / "checkpoints").glob("iteration_*"))
    if finished and done < asked and not saved:
        raise ValueError(
            f"{folder} is finished with {done} iterations and without a checkpoint; start a new "
            f"run with trainer.num_iterations={asked}, and checkpoint.every=10 to prolong that one"
        )
    if not finished or done < asked:
        return None
    more = "; a larger trainer.num_iterations goes on" if saved else ""
    return f"{folder} is finished: {done} of {asked} iterations{more}"
