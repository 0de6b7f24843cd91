"""What the parent says while a run starts, and if it is stopped before it began. Torch-free.

A run has begun once its status.json has an iteration: then it speaks for itself.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from trainer.runs.failures import close_status, say
from trainer.runs.run_files import load_run, read_status

OURS = {".hydra", ".lock", "config.yaml", "status.json"}  # what is there before a run begins


def announce(config: dict[str, Any], folder: Path) -> None:
    """Say at once what starts: a run's own first word comes when torch and a model are loaded."""
    if "kept_in" in config:  # a warm-up: that it begins has been said
        return
    if _is_aside(config):
        say(f"{_mode(config)}: starting")
        return
    here = Path(os.path.relpath(folder))
    place = folder if here.parts[:1] == ("..",) else here
    verb = "going on" if config.get("resume") else "starting"
    say(f"{load_run(folder).experiment}: {verb} in {place}")


def leave(config: dict[str, Any], folder: Path) -> None:
    """Say that a run was stopped before it began, if it was; of a dated folder nothing stays.

    A folder that was named stays, and so does one in which anything is that a run wrote.
    """
    status = read_status(folder)
    if "iteration" in status:
        return
    if not status.get("reason"):
        close_status(folder, "preempted", "stopped before it began")
    if _is_aside(config):
        return
    if config.get("resume"):
        say("stopped before it went on; what was saved before is still there")
        return
    say("stopped before it began; nothing is saved")
    if not config["output_dir"] and {path.name for path in folder.iterdir()} <= OURS:
        for name in OURS - {".hydra"}:
            (folder / name).unlink(missing_ok=True)
        if (folder.parent / "sweep.json").exists():  # a job's; a dated folder goes at exit
            shutil.rmtree(folder)


def drop_unused(folder: Path) -> None:
    """Remove a reserved folder that no run has got: at most Hydra has written its own there."""
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {".hydra"}:
        shutil.rmtree(folder)


def _is_aside(config: dict[str, Any]) -> bool:
    """Return whether this is not a run that was asked for: a warm-up, a preflight, a mode."""
    return "kept_in" in config or _mode(config) != "train"


def _mode(config: dict[str, Any]) -> str:
    return "preflight" if config.get("preflight") else config.get("mode", "train")
