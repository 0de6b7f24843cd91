"""What a command line asks to be trained: a new run, the jobs of a sweep, or a run that goes on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf import names
from conf.command_line import (
    OUTPUTS,
    SWEEP,
    check_flags,
    check_overrides,
    check_single,
    flags_and_overrides,
    without_flags,
)
from conf.compose import compose_checked, compose_raw
from conf.interpolations import bounded, secrets_named_in
from conf.schema import register
from policies.cache import write_text
from trainer.runs.folders import holds_run, make_writable, unique_folder


@dataclass(frozen=True)
class Job:
    """A run to start (`composed` by Hydra), or to go on with unless it is `done`."""

    folder: Path
    config: dict[str, Any]
    done: str | None = None
    composed: DictConfig | None = None


def set_up() -> None:
    """Register the schema and the names that conf/config.yaml uses for folders."""
    register()
    for name, parent in ("run_dir", OUTPUTS), ("sweep_dir", "multirun"):

        def folder(plain: str | None, name: str, parent: str = parent) -> str:
            return str(Path(plain).expanduser()) if plain else unique_folder(f"{parent}/{name}")

        OmegaConf.register_new_resolver(name, folder, replace=True)


@bounded()
def run_folder(words: Sequence[str], *, sweep: bool = False) -> Path:
    """Return the folder of a run, or of a sweep, made and open to writing."""
    hydra = compose_raw(words, with_hydra=True).hydra
    try:
        with secrets_named_in(words):
            place = hydra.sweep.dir if sweep else hydra.run.dir
        return make_writable(place, "hydra.sweep.dir" if sweep else "output_dir")
    except OmegaConfBaseException as error:  # from run_dir or sweep_dir
        raise ValueError(str(error).splitlines()[0].rpartition("interpolation: ")[2]) from error


def read_command(words: Sequence[str]) -> Any:
    """Check a command line, every job of a sweep too, and return the Job or the Sweep it asks for.

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
        from conf.resume import load_for_resume  # here: most starts do not need it
        from trainer.runs.find import nothing_left

        config = load_for_resume(folder, [word for word in overrides if word != f"resume={folder}"])
        asked = config["trainer"]
        rule = {key: asked[key] for key in ("stop_at", "patience")}
        left = nothing_left(Path(folder), asked["num_iterations"], **rule)
        return Job(Path(folder), config, left)
    if flags:
        if not flags <= SWEEP:
            check_overrides(without_flags(words))
            return None
        from conf.sweep import read_sweep  # here: a single run needs none

        return read_sweep(overrides)
    check_single(overrides)
    config, composed = compose_checked(overrides), compose_raw(overrides, with_hydra=True)
    if holds_run(there := run_folder(overrides)):
        raise ValueError(f"{there} already holds a run; go on with it by resume={there}")
    return Job(there, config, composed=composed)


def begin(job: Job) -> Path:
    """Leave in a new run's folder what it was composed of (.hydra/*.yaml); return the folder.

    defaults.yaml is for the report: what the configuration would be with the same choice of policy,
    env, algorithm ... but no other override, as the `experiment` has it and as `leash` has it.
    """
    if (cfg := job.composed) is None:
        return job.folder
    task: Any = OmegaConf.to_container(cfg.hydra.overrides.task)  # ${oc.env:KEY} as it is written
    choices = cfg.hydra.runtime.choices
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
        write_text(job.folder / ".hydra" / f"{name}.yaml", OmegaConf.to_yaml(node))
    return job.folder
