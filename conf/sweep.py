"""Hydra callback of runs and sweeps: checks, resume of jobs, sweep.html, stop signals."""

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from conf.compose import FAULTS, checked, explain, hide_secrets, is_temporary
from conf.modes import configure
from conf.resume import job_config, resumed
from policies.files import write_text
from trainer.runs.discover import nothing_left
from trainer.runs.failures import print_error, say
from trainer.runs.folders import PLAN, holds_run, is_main_rank, quoted
from trainer.runs.launch import Interrupted, check_parts
from trainer.runs.lock import lock_folder
from trainer.runs.redact import redact, redact_text
from trainer.runs.run_files import read_yaml
from trainer.runs.run_log import VERBOSE

MULTIRUN = ("-m", "--multirun")
AUTO = "resume=auto (also torchrun --max-restarts)"
OPEN: list[tuple[Path, Any]] = []  # folder and lock of the sweep of this process


class SweepCallback(Callback):
    """Check all jobs before Hydra starts one, and update the page of a sweep."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Refuse a run with a fault."""
        with _refused(config):
            folder = Path("." if is_temporary(config) else config.hydra.run.dir)
            read_job(config, folder, config.hydra.overrides.task, in_sweep=False)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Refuse a sweep with a faulty job; write its plan and fix its folder."""
        place = "hydra.sweep.dir="
        words = [w for w in sys.argv[1:] if w not in MULTIRUN and not w.startswith(place)]
        with _refused(config):
            folder = Path(os.path.abspath(str(config.hydra.sweep.dir)))
            plan = {"words": [*map(redact_text, words)], "jobs": _name_jobs(config, folder)}
            lock = lock_folder(folder)
            write_text(folder / PLAN, json.dumps({**plan, "ended": False}, indent=1))
            page = _write_page(folder)
        OPEN[:] = [(folder, lock)]
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _stop)
        say(f"sweep    {page}")

    def on_job_end(self, config: DictConfig, **_: Any) -> None:
        """Rewrite the page of the sweep."""
        if config.hydra.mode == RunMode.MULTIRUN:
            with suppress(OSError):  # a full disk
                _write_page(Path(config.hydra.sweep.dir))


def end_sweep() -> None:
    """Write the final page of the sweep of this process, if any, after any kind of end."""
    for folder, lock in OPEN:
        try:
            _note_end(folder)
            hide_secrets(folder)  # of multirun.yaml
            page = f"sweep    {_write_page(folder)}"
        except (*FAULTS, OSError) as error:  # a full disk
            print_error(ValueError(explain(error)))
            page = ""
        finally:
            lock.release()
        from trainer.pages.sweep_jobs import load_sweep, results

        for line in filter(None, [*results(load_sweep(folder)), page]):
            say(line)
    OPEN.clear()


def _write_page(folder: Path) -> Path:
    from trainer.pages.sweep_page import write_sweep  # one run has no such page

    return write_sweep(folder)


def _note_end(folder: Path) -> None:
    write_text(folder / PLAN, json.dumps(read_yaml(folder / PLAN) | {"ended": True}, indent=1))


@contextmanager
def _refused(config: DictConfig) -> Iterator[None]:
    """End the process on a fault: Hydra only warns of errors in callbacks."""
    HydraConfig.instance().set_config(config.copy())  # for `compose`; Hydra does so for a job
    if verbose := config.hydra.verbose:  # true, a logger's name, or several
        names = verbose if OmegaConf.is_list(verbose) else [str(verbose).replace("True", "true")]
        os.environ[VERBOSE] = ",".join(names)
    try:
        yield
    except (*FAULTS, ValueError, OSError) as error:
        if is_main_rank():
            print_error(ValueError(explain(error)))
        raise SystemExit(2) from None


def read_job(
    cfg: DictConfig, folder: Path, words: Sequence[str], *, in_sweep: bool
) -> dict[str, Any]:
    """Return the checked configuration of a run or of a job of a sweep."""
    cfg = OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])
    if in_sweep and cfg.preflight:
        raise ValueError("preflight=true checks one run; leave -m out")
    if cfg.preflight or cfg.mode != "train":
        return configure(cfg, words)
    if in_sweep and cfg.output_dir:
        place = f"hydra.sweep.dir={cfg.output_dir}"
        raise ValueError(f"output_dir={cfg.output_dir} is for one run; a sweep goes to {place}")
    auto = cfg.resume == "auto"
    if auto and not cfg.output_dir:
        raise ValueError(f"{AUTO} needs output_dir=<folder>, where a start finds its run")
    if cfg.resume and not auto:
        config = resumed(cfg.resume, cfg, words)
    else:
        config = checked(cfg) | {"resume": None}
        if auto:
            config = job_config(Path(cfg.output_dir).expanduser(), config, key="output_dir")
        elif in_sweep:
            config = job_config(folder, config)
        if not (in_sweep or config["resume"]) and is_main_rank() and holds_run(folder):
            raise ValueError(f"{folder} already holds a run; resume it by resume={folder}")
    nothing_left(config)  # ValueError for fewer iterations than the run has
    return config


def _name_jobs(config: DictConfig, folder: Path) -> list[str]:
    """Check each job of a basic sweep and return their folders; all get the same sweep.dir.

    Folders are named only by the swept keys, so that names stay short.
    """
    loader = GlobalHydra.instance().config_loader()
    params = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    parser = OverridesParser.create(config_loader=loader)
    items = parser.parse_overrides([*params, *config.hydra.overrides.task])
    swept = {item.key_or_group for item in items if item.is_sweep_override()}
    unnamed = {item.key_or_group for item in items} - swept if swept else set()
    unnamed |= {*config.hydra.job.config.override_dirname.exclude_keys}
    with read_write(config), open_dict(config):
        config.hydra.overrides.hydra += [
            f"hydra.sweep.dir={quoted(str(folder))}",
            f"hydra.job.config.override_dirname.exclude_keys=[{','.join(sorted(unnamed))}]",
        ]
        config.hydra.sweep.dir = str(folder)
    names, configs = [], []
    basic = config.hydra.sweeper._target_.endswith(".BasicSweeper")  # others choose jobs later
    for number, job in enumerate(BasicSweeper.split_arguments(items, None)[0] if basic else ()):
        cfg = loader.load_sweep_config(config, job)
        with read_write(cfg), open_dict(cfg):
            cfg.hydra.job.num, cfg.hydra.job.id = number, str(number)  # as its launcher will
        _refuse_secrets(cfg, [i for i in parser.parse_overrides(job) if i.key_or_group in swept])
        names.append(str(cfg.hydra.sweep.subdir))
        configs.append(read_job(cfg, folder / names[-1], job, in_sweep=True))
    if configs:
        check_parts(configs)
    return names


def _refuse_secrets(cfg: DictConfig, swept: Sequence[Override]) -> None:
    """Raise ValueError for a swept secret: folders and pages are named by swept values."""
    for item in swept:
        key, value = item.key_or_group, item.value()
        if "${" in str(value):
            value = OmegaConf.select(cfg, key)
        if redact({key: value}) != {key: value}:
            why = "would be written into folder names and pages"
            raise ValueError(f"{key}: the secrets of a sweep {why}; start a run for each of them")


def _stop(number: int, _: Any) -> None:
    """Stop a sweep on a signal: no further job starts, running jobs save first."""
    _note_end(OPEN[0][0])
    family = psutil.Process().children(recursive=True)
    ranks = [process for process in family if "--worker" in process.cmdline()]
    for process in family if number == signal.SIGTERM else ():  # Ctrl-C reaches all processes
        if process not in ranks:  # their launchers forward the signal
            process.send_signal(number)
    psutil.wait_procs(ranks, timeout=60)
    raise Interrupted(128 + number)
