"""What a command line sets going: the parent of a run, of a sweep or of a mode. Torch-free."""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from conf import start
from conf.command_line import help_text, spell_out
from conf.compose import compose_experiment
from trainer.accelerate_settings import check_accelerate
from trainer.runs.failures import complain, say
from trainer.runs.launch import Interrupted, agree, prepare
from trainer.runs.launch import start as launch
from trainer.runs.lock import lock_folder
from trainer.runs.run_files import read_status

Worker = Callable[[str, str], int]  # config.yaml, run folder -> exit code


@hydra.main(version_base="1.3", config_path=".", config_name="config")
def show(cfg: DictConfig) -> None:
    """Let Hydra show what a flag asks for: --cfg job ..."""


def run_command(words: list[str], *, script: Path, worker: Worker) -> int:
    """Check everything that can be checked, then run `script`; return the exit code."""
    if {"--help", "-h"} & {*words}:
        say(help_text())
        return 0
    words = sys.argv[1:] = spell_out(words)  # Hydra reads them too
    ours: dict[str, Any] = {"script": script, "compose": partial(compose_experiment, words=words)}

    def run(job: start.Job) -> None:
        say(job.done) if job.done else launch(job.config, start.begin(job), **ours)

    start.set_up()
    failed = 2  # before a run begins
    try:
        check_accelerate()
        if not (size := os.environ.get("WORLD_SIZE") or "1").isdecimal():
            meant = "unset it, or start by torchrun or accelerate launch"
            raise ValueError(f"expected WORLD_SIZE to be a number of ranks, got {size!r}; {meant}")
        if (ranks := int(size)) > 1:
            return join(words, ranks, worker, **ours)
        if any(word.startswith(("mode=", "preflight=")) for word in words):
            from conf.preflight_and_modes import asked, run_aside

            if config := asked(words):
                return run_aside(config, **ours)
        wanted, failed = start.read_command(words), 1
        if wanted is None:
            show()
        elif isinstance(wanted, start.Job):
            try:
                run(wanted)
            except Interrupted:  # a run that is finished has ended well, whatever came then
                if read_status(wanted.folder).get("state") != "finished":
                    raise
        else:
            return wanted.run(run)
    except (ValueError, RuntimeError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            complain(error)
        return failed if isinstance(error, RuntimeError) else 2  # refused
    except KeyboardInterrupt:  # outside of a run
        say("stopped before it began; nothing is saved")
        return 130
    return 0


def join(words: list[str], ranks: int, worker: Worker, **ours: Any) -> int:
    """Be one rank of `torchrun train.py` or `accelerate launch train.py`; return the exit code."""
    config = start.compose_joined(words, ranks=ranks)

    def make() -> Path:
        lock_folder(folder := start.run_folder(words))  # until this process ends
        return prepare(config, folder, **ours)

    path = agree(make, config)
    return worker(str(path), str(path.parent))
