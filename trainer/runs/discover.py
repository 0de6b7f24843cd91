"""Find existing runs below a folder, and check whether a run has iterations left."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.runs.lock import LOCK_FILE, is_free
from trainer.runs.run_files import is_sweep, read_status, read_yaml


def is_job(folder: Path) -> bool:
    """Return whether a folder is a run folder."""
    return any((folder / name).is_file() for name in ("metrics.jsonl", "status.json"))


def find_jobs(folder: str | Path) -> list[Path]:
    """List the job folders below `folder`, failed ones too, in natural order (2 before 10)."""
    jobs = []
    for path, names, _ in os.walk(folder):
        place = Path(path)
        if place != Path(folder) and (".hydra" in names or is_job(place)):
            jobs.append(place)
            names.clear()
        names[:] = [name for name in names if not name.startswith(".")]
    return sorted(jobs, key=lambda job: _natural(str(job)))


def find_runs(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the runs and the sweeps at or below a folder; jobs of a sweep are not listed."""
    if is_job(folder) or is_sweep(folder):
        return ([folder], []) if is_job(folder) else ([], [folder])
    jobs = find_jobs(folder)
    above = {job: next((p for p in job.parents if is_sweep(p)), None) for job in jobs}
    return [j for j in jobs if not above[j]], list(dict.fromkeys(filter(None, above.values())))


def is_running(folder: Path) -> bool:
    """Return whether a run is in progress; before its first status it has only its lock."""
    state = read_status(folder).get("state")
    begun = state == "running" or (state is None and (folder / LOCK_FILE).is_file())
    return begun and not is_free(folder)


def has_weights(folder: Path) -> bool:
    """Return whether a run has a checkpoint or, finished, a final model; neither is verified."""
    finished = read_status(folder).get("state") == "finished" and (folder / "model").is_dir()
    return finished or any((folder / "checkpoints").glob("iteration_*"))


def missing_weights(folder: Path) -> str:
    """Return the message for a run without weights."""
    state = read_status(folder).get("state", "not started")
    text = f"expected a checkpoint or a final model in {folder}, got none: its state is {state}"
    return f"{text}; finish it with resume={folder}"


def nothing_left(config: Mapping[str, Any]) -> str | None:
    """Return a message if the run to resume has already done all its iterations, else None.

    A run that trainer.stop_at or .patience ended has nothing left unless they change. Raise
    ValueError if it has more iterations than the configuration, or no checkpoint to resume from.
    """
    if not config["resume"] or config["mode"] != "train":
        return None
    folder, total = Path(config["resume"]), config["trainer"]["num_iterations"]
    status = read_status(folder)
    done, finished = status.get("iteration", 0), status.get("state") == "finished"
    if done > total:
        hint = "give a larger trainer.num_iterations, or leave it out"
        raise ValueError(f"{folder} has {done} iterations already, more than {total}; {hint}")
    if not finished:
        return None
    before = read_yaml(folder / "config.yaml").get("trainer") or {}
    same = all(before.get(key) == config["trainer"][key] for key in ("stop_at", "patience"))
    if same and (why := status.get("ended")):
        return f"{folder} is finished at iteration {done}: {why}"
    saved = any((folder / "checkpoints").glob("iteration_*"))
    if done == total:
        more = "; a larger trainer.num_iterations continues it" if saved else ""
        return f"{folder} is finished: {done} of {total} iterations{more}"
    if not saved:
        text = f"{folder} is finished with {done} iterations and without a checkpoint"
        raise ValueError(f"{text}; start a new run with trainer.num_iterations={total}")
    return None


def _natural(text: str) -> list[tuple[int, float, str]]:
    """Sort key in which numbers compare as numbers: kl.coeff=0.1 before kl.coeff=1."""
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return [(0, float(p), "") if p[:1].isdigit() else (1, 0.0, p) for p in parts if p]
