"""A command line that torchrun, accelerate launch or srun runs once per rank. Torch-free."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf import start
from conf.command_line import flags_and_overrides
from trainer.runs.failures import say
from trainer.runs.launch import prepare
from trainer.runs.lock import lock_folder
from trainer.runs.nodes import walk_texts
from trainer.runs.outside import Start, agree, be_rank, outside_ranks
from trainer.runs.run_files import PLACES

__all__ = ["join", "outside_ranks"]


def join(words: list[str], ranks: int, worker: Callable[..., int], **ours: Any) -> int:
    """Be one rank of a run, or of a mode, that an outside launcher started; return the exit code.

    Rank 0 reads the words for all.
    """
    words = _with_ranks(words, ranks)
    if lost := {"RANK", "MASTER_ADDR", "MASTER_PORT"} - {*os.environ}:
        meant = "start by torchrun, accelerate launch or srun, or unset WORLD_SIZE"
        raise ValueError(f"WORLD_SIZE={ranks}, but {min(lost)} is not set; {meant}")
    return be_rank(agree(lambda: _make(words, **ours)), worker)


def _make(words: list[str], **ours: Any) -> Start:
    if any(word.startswith(("mode=", "preflight=")) for word in words):
        from conf.preflight_and_modes import asked, folder_aside

        if config := asked(words):
            return _start(config, folder_aside(config), aside=True, **ours)
    job = start.read_command(words)
    if job.done:
        say(job.done)
        return Start()
    lock_folder(job.folder)  # until this process ends
    begun, again = _start(job.config, start.begin(job), **ours), job.config.get("resume")
    return replace(begun, words=(f"resume={again}",)) if again else begun


def _start(config: dict[str, Any], folder: Path, *, aside: bool = False, **ours: Any) -> Start:
    if again := config.get("resume"):
        config["resume"] = str(Path(again).absolute())  # nodes may have started elsewhere
    path, _ = prepare(config, folder.absolute(), **ours)
    named = {key: value for key, value in config.items() if key not in PLACES}
    files = {text for _, text in walk_texts(named) if "/" in text and os.path.exists(text)}
    files |= {config["resume"]} if again else set()
    return Start(
        config=str(path),
        text=path.read_text(encoding="utf-8"),
        shared=tuple(sorted(files)),
        aside=aside,
        threads=config["launch"]["threads"],
    )


def _with_ranks(words: Sequence[str], ranks: int) -> list[str]:
    """Return the words with the number of ranks that there are; some take one alone."""
    flags, overrides = flags_and_overrides(words)
    launcher = f"torchrun, accelerate launch or srun, which started {ranks} processes"
    if flags:
        what = f"{' '.join(sorted(flags))} does not go below {launcher}"
        raise ValueError(f"{what}; type python train.py -m ..., with launch.num_processes={ranks}")
    for mode in ("chat", "export"):
        if f"mode={mode}" in overrides:
            raise ValueError(f"mode={mode} is one process, not for {launcher}; type python alone")
    key = "launch.num_processes"
    if other := [w for w in overrides if w.partition("=")[0] == key and w != f"{key}={ranks}"]:
        raise ValueError(f"{other[0]} is not what {launcher} says; leave it out")
    return [*(word for word in overrides if word != f"{key}={ranks}"), f"{key}={ranks}"]
