"""A sweep: its jobs checked before the first starts, its plan, its page, and stop signals."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from conf.compose import FAULTS, explain, hide_secrets
from conf.job import read_job
from policies.files import write_text
from trainer.runs.failures import print_error, say
from trainer.runs.folders import PLAN, quoted
from trainer.runs.launch import Interrupted, check_parts
from trainer.runs.lock import lock_folder
from trainer.runs.redact import redact, redact_text
from trainer.runs.run_files import read_yaml

OPEN: list[tuple[Path, Any]] = []  # folder and lock of the sweep of this process


def begin(config: DictConfig, words: Sequence[str]) -> None:
    """Check the jobs of a sweep, write its plan with the words typed, and fix its folder."""
    words = [word for word in words if not word.startswith("hydra.sweep.dir=")]
    folder = Path(os.path.abspath(str(config.hydra.sweep.dir)))
    plan = {"words": [*map(redact_text, words)], "jobs": _name_jobs(config, folder)}
    lock = lock_folder(folder)
    write_text(folder / PLAN, json.dumps({**plan, "ended": False}, indent=1))
    page = write_page(folder)
    OPEN[:] = [(folder, lock)]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    say(f"sweep    {page}")


def end() -> None:
    """Write the final page of this process's sweep, if it has one, however the sweep ended."""
    for folder, lock in OPEN:
        try:
            _note_end(folder)
            hide_secrets(folder)  # of multirun.yaml
            page = f"sweep    {write_page(folder)}"
        except (*FAULTS, OSError) as error:  # a full disk
            print_error(ValueError(explain(error)))
            page = ""
        finally:
            lock.release()
        from trainer.pages.sweep_jobs import load_sweep, results

        for line in filter(None, [*results(load_sweep(folder)), page]):
            say(line)
    OPEN.clear()


def write_page(folder: Path) -> Path:
    """Write sweep.csv and sweep.html; return the page."""
    from trainer.pages.sweep_page import write_sweep  # one run has no such page

    return write_sweep(folder)


def _note_end(folder: Path) -> None:
    write_text(folder / PLAN, json.dumps(read_yaml(folder / PLAN) | {"ended": True}, indent=1))


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
