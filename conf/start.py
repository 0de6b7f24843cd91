"""What a command line asks to be trained: a new run, the jobs of a sweep, or a run that goes on.

A sweep goes on by the command of before with hydra.sweep.dir=<its folder>: jobs that are finished
stay as they are, others go on at their last checkpoint, as by resume=, or are begun. A job that is
not the one in its folder is refused before the first starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf import names
from conf.command_line import SWEEP, check_flags, check_single, flags_and_overrides, list_jobs
from conf.compose import compose_checked, compose_raw, settle
from conf.schema import register
from trainer.runs.folders import (
    find_jobs,
    holds_run,
    make_writable,
    no_run,
    nothing_left,
    unique_folder,
)
from trainer.runs.job_names import job_names
from trainer.runs.lock import held
from trainer.runs.run_files import read_status
from trainer.runs.saved_configs import as_today, holds_same

RESUMABLE = ("trainer.num_iterations", "tracker", "launch", "checkpoint", "eval")


@dataclass(frozen=True)
class Job:
    """A run to start (`composed` by Hydra), or to go on with unless it is `done`."""

    folder: Path
    config: dict[str, Any]
    done: str | None = None
    composed: DictConfig | None = None


@dataclass(frozen=True)
class Sweep:
    """The folder of a sweep, its words, and the words and the folder of each of its jobs."""

    folder: Path
    words: list[str]
    jobs: list[list[str]]
    folders: list[str]

    def job(self, number: int) -> Job:
        """Return what is to be done of a job: all, the rest, or nothing."""
        config, place = compose_checked(self.jobs[number]), self.folder / self.folders[number]
        composed = compose_raw(self.jobs[number], with_hydra=True)
        if not holds_same(place, config):
            return Job(place, config, composed=composed)
        if read_status(place).get("state") == "finished":
            return Job(place, config, "finished already")
        return Job(place, load_for_resume(str(place), []))


def set_up() -> None:
    """Register the schema and the names that conf/config.yaml uses for folders."""
    register()
    for name, parent in ("run_dir", "outputs"), ("sweep_dir", "multirun"):

        def folder(plain: str | None, name: str, parent: str = parent) -> str:
            return str(Path(plain).expanduser()) if plain else unique_folder(f"{parent}/{name}")

        OmegaConf.register_new_resolver(name, folder, replace=True)


def run_folder(words: Sequence[str], *, sweep: bool = False) -> Path:
    """Return the folder of a run, or of a sweep, made and open to writing."""
    hydra = compose_raw(words, with_hydra=True).hydra
    try:
        place = hydra.sweep.dir if sweep else hydra.run.dir
        return make_writable(place, "hydra.sweep.dir" if sweep else "output_dir")
    except OmegaConfBaseException as error:  # from run_dir or sweep_dir
        raise ValueError(str(error).splitlines()[0].rpartition("interpolation: ")[2]) from error


def read_command(words: Sequence[str]) -> Job | Sweep | None:
    """Check a command line, every job of a sweep too, and return what it asks for.

    None: a flag that only shows something (--cfg, --help ...), which is left to Hydra.
    """
    check_flags(words)
    flags, overrides = flags_and_overrides(words)
    folder = next((w.removeprefix("resume=") for w in overrides if w.startswith("resume=")), None)
    if folder == "":
        raise ValueError("expected resume=<run folder>, got none; leave it out to start a new run")
    if folder and flags:
        raise ValueError(f"resume={folder} goes with no flag, got {' '.join(sorted(flags))}")
    if folder:
        config = load_for_resume(folder, [word for word in overrides if word != f"resume={folder}"])
        left = nothing_left(Path(folder), config["trainer"]["num_iterations"])
        return Job(Path(folder), config, left)
    if flags:
        return _read_sweep(overrides) if flags <= SWEEP else None
    check_single(overrides)
    config, composed = compose_checked(overrides), compose_raw(overrides, with_hydra=True)
    if holds_run(there := run_folder(overrides)):
        raise ValueError(f"{there} already holds a run; go on with it by resume={there}")
    return Job(there, config, composed=composed)


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
        raise ValueError(f"resume={folder}: {no_run(Path(folder))}")
    changed = [word.partition("=")[0].lstrip("+~") for word in words]
    for key in changed:
        if not any(key == name or key.startswith(f"{name}.") for name in may):
            when, allowed = "on resume" if mode == "train" else f"in mode={mode}", ", ".join(may)
            raise ValueError(f"{key} cannot change {when}, only {allowed}; start a new run for it")
    saved = OmegaConf.create(as_today(OmegaConf.to_container(OmegaConf.load(path))))
    if "tracker" not in changed:  # its keys are those of the saved one
        kind = saved.tracker._target_.rpartition(".")[2].removesuffix("Tracker").lower()
        known = (names.FOLDER / "tracker" / f"{kind}.yaml").is_file()
        words = [f"tracker={kind if known else 'jsonl'}", *words]
    fresh = compose_raw(words)
    for key in changed:
        OmegaConf.update(saved, key, OmegaConf.select(fresh, key), merge=False)
    saved.update({"resume": str(folder), "mode": mode, "preflight": False, **instead})
    return settle(saved)


def begin(job: Job) -> Path:
    """Leave in a new run's folder what it was composed of (.hydra/*.yaml); return the folder.

    defaults.yaml is for the report: what the configuration would be with the same choice of policy,
    env, algorithm ... but no other override, as the `experiment` has it and as `leash` has it.
    """
    if (cfg := job.composed) is None:
        return job.folder
    task, choices = list(cfg.hydra.overrides.task), cfg.hydra.runtime.choices
    groups = [g for g in choices if g != "experiment" and (names.FOLDER / g).is_dir()]
    held = {
        "experiment": compose_raw(task, files_only=True),
        "leash": compose_raw(["~experiment", *(f"{group}={choices[group]}" for group in groups)]),
    }
    files = {
        "config": OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"]),
        "hydra": OmegaConf.masked_copy(cfg, ["hydra"]),
        "overrides": OmegaConf.create(task),
        "defaults": OmegaConf.create({name: OmegaConf.to_container(held[name]) for name in held}),
    }
    (job.folder / ".hydra").mkdir(parents=True, exist_ok=True)
    for name, node in files.items():
        (job.folder / ".hydra" / f"{name}.yaml").write_text(OmegaConf.to_yaml(node))
    return job.folder


def _read_sweep(words: list[str]) -> Sweep:
    """Check the jobs of a sweep, and those that lie in its folder already."""
    jobs = list_jobs(words)
    for job in jobs:
        check_single(job)
        if compose_checked(job)["output_dir"]:
            raise ValueError("output_dir is one folder; a sweep takes hydra.sweep.dir=")
    folder = run_folder(jobs[0], sweep=True)
    sweep = Sweep(folder, words, jobs, _job_folders(jobs))
    for other in (there := find_jobs(folder)):
        if str(other.relative_to(folder)) not in sweep.folders:
            raise ValueError(
                f"{folder} holds {other.name}, which is none of these jobs; give the words of that "
                "sweep (more values of a key may follow), or another hydra.sweep.dir"
            )
    if there:
        with held(folder):  # else another process goes on with it
            for number, name in enumerate(sweep.folders):
                if holds_run(folder / name):
                    sweep.job(number)
    return sweep


def _job_folders(jobs: Sequence[Sequence[str]]) -> list[str]:
    """Return the names of the jobs' folders, also where hydra.sweep.subdir= gives others."""
    if not any(word.startswith("hydra.sweep.subdir=") for word in jobs[0]):
        return job_names(jobs)
    numbered = ([*job, f"hydra.job.num={number}"] for number, job in enumerate(jobs))
    return [str(compose_raw(job, with_hydra=True).hydra.sweep.subdir) for job in numbered]
