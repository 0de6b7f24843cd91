"""Where a run may lie: a folder of its own that can be written to and holds no other run."""

import atexit
import itertools
import os
from datetime import datetime
from functools import cache
from pathlib import Path

from trainer.runs.run_files import find_jobs, is_sweep, read_status, remove_unused

RUN = "config.yaml status.json metrics.jsonl transcripts.jsonl report.html model errors checkpoints"


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


def make_writable(folder: str | Path, key: str) -> Path:
    """Make a folder unless it is there; ValueError if nothing can be written into it."""
    path, reason = Path(folder), None
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror
    if not reason and os.access(path, os.W_OK | os.X_OK):
        return path
    raise ValueError(
        f"cannot write to {path.absolute()} ({reason or 'it is read-only'}); give a folder with "
        f"{key}=/path/to/it"
    )


def holds_run(folder: Path) -> bool:
    """Return whether a run has begun in a folder, or something is there that one would replace."""
    return any((folder / name).exists() for name in RUN.split())


def no_run(folder: Path) -> str:
    """Return why a folder without a config.yaml cannot be gone on with."""
    if folder.is_file():
        return f"expected the folder of a run, got a file; give resume={folder.parent}"
    jobs = find_jobs(folder) if is_sweep(folder) else []
    if jobs:
        return f"expected one run, got a sweep; give one of its jobs, resume='{jobs[0]}'"
    return "expected a run folder with a config.yaml, got none"


def nothing_left(folder: Path, asked: int) -> str | None:
    """Return a line if a run already did all iterations that are asked for, else None.

    More than were asked for, or more to do with no checkpoint to begin at, is a ValueError.
    """
    status = read_status(folder)
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
