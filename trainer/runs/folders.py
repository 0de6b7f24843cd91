"""Run folders: each holds at most one run."""

import atexit
import itertools
import os
import re
import shutil
from datetime import datetime
from functools import cache
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "train.py"
PLAN = "sweep.json"  # a sweep's command line, the folders of its jobs, and whether it has ended
TEMPORARY = ".leash-"  # prefix of folders that are removed at exit
RUN = "config.yaml status.json metrics.jsonl transcripts.jsonl report.html model errors checkpoints"


@cache
def unique_folder(parent: str) -> str:
    """Reserve and return a new dated folder; the same folder on every call."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for number in itertools.count(1):
        folder = Path(parent) / (stamp if number == 1 else f"{stamp}_{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        atexit.register(remove_unused, folder.absolute())
        return str(folder)
    raise AssertionError("unreachable")


def script() -> str:
    """Return the path of train.py for a command, relative to the current directory if below it."""
    return str(SCRIPT) if (near := os.path.relpath(SCRIPT)).startswith("..") else near


def program() -> list[str]:
    """Return what starts leash: `leash` where installed, `python train.py` in a clone."""
    return ["python", script()] if (SCRIPT.parent / "pyproject.toml").exists() else ["leash"]


def is_main_rank() -> bool:
    """Return whether this process is rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def holds_run(folder: Path) -> bool:
    """Return whether a folder holds a run, or a file that a new run would replace."""
    return any((folder / name).exists() for name in RUN.split())


def remove_run(folder: Path) -> None:
    """Remove the files of a run that was refused before it began: its name stays free."""
    for name in (*RUN.split(), "run.log"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def remove_unused(folder: Path) -> None:
    """Remove a reserved folder that no run has used: Hydra's files and locks are hidden."""
    if folder.is_dir() and all(path.name.startswith(".") for path in folder.iterdir()):
        shutil.rmtree(folder)


def quoted(text: str) -> str:
    """Quote a text for Hydra's grammar: backslashes escape only before a quote."""
    text = re.sub(r'(\\*)"', r'\1\1\\"', text)
    return '"' + re.sub(r"(\\+)\Z", r"\1\1", text) + '"'
