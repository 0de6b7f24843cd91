"""What a command line sets going: the parent of a run, of a sweep or of a mode. Torch-free."""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from conf import start
from conf.command_line import help_text, spell_out, without_flags
from conf.compose import compose_experiment, compose_raw
from trainer.accelerate_settings import check_accelerate
from trainer.runs.failures import complain, say
from trainer.runs.launch import Interrupted
from trainer.runs.launch import start as launch
from trainer.runs.run_files import read_status

Worker = Callable[..., int]  # config.yaml, run folder, name=value ... -> exit code


@hydra.main(version_base="1.3", config_path=".", config_name="config")
def show(cfg: DictConfig) -> None:
    """Let Hydra show what a flag asks for: --cfg job ..."""


def run_command(words: list[str], *, script: Path, worker: Worker) -> int:
    """Check everything that can be checked, then run `script`; return the exit code."""
    if {"--help", "-h"} & {*words}:
        say(help_text())
        return 0
    try:
        given, words = words, spell_out(words)
    except ValueError as error:
        complain(error)
        return 2
    if "resume=last" in given:
        say(next(word for word in words if word.startswith("resume=")))
    sys.argv[1:] = words  # Hydra reads them too
    ours: dict[str, Any] = {"script": script, "compose": partial(compose_experiment, words=words)}

    start.set_up()
    failed = 2  # before a run begins
    try:
        check_accelerate()
        if os.environ.keys() & {"WORLD_SIZE", "SLURM_STEP_ID"}:
            from conf.joined import join, outside_ranks  # here: most runs start their own ranks

            if (ranks := outside_ranks()) > 1:
                return join(words, ranks, worker, **ours)
        if any(word.startswith(("mode=", "preflight=")) for word in words):
            from conf.preflight_and_modes import asked, run_aside

            if config := asked(words):
                return run_aside(config, **ours)
        wanted, failed = start.read_command(words), 1
        if wanted is None:
            leave_to_hydra(words)
        elif isinstance(wanted, start.Job):
            try:
                run_job(wanted, **ours)
            except Interrupted:  # a run that is finished has ended well, whatever came then
                if read_status(wanted.folder).get("state") != "finished":
                    raise
        else:
            return wanted.run(partial(run_job, **ours))
    except (ValueError, RuntimeError, OSError) as error:
        if os.environ.get("RANK", "0") == "0" or isinstance(error, RuntimeError):
            for fault in getattr(error, "faults", [error]):
                complain(fault)
        return failed if isinstance(error, RuntimeError) else 2  # refused
    except KeyboardInterrupt:  # outside of a run
        say("stopped before it began; nothing is saved")
        return 130
    return 0


def run_job(job: start.Job, **ours: Any) -> None:
    """Run a job in fresh processes, unless it is done."""
    say(job.done) if job.done else launch(job.config, start.begin(job), **ours)


def leave_to_hydra(words: list[str]) -> None:
    """Let Hydra show what a flag asks for; a fault in the words is said in one line."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise it, print no text of Hydra's own
    try:
        show()
    except (HydraException, OmegaConfBaseException, ValueError):
        compose_raw(without_flags(words))  # the same fault in our words
        raise
