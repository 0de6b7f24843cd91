"""The files of a run folder: read them in whatever state they are, write them in one piece.

A run may be killed at any byte, and its report is wanted most when that happened: a missing file
reads as empty, a torn line is skipped. Torch-free.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from policies.cache import write_text
from trainer.runs.lock import is_free

ITERATION = "progress/iteration"
PLACES = ("output_dir", "resume")  # keys that name a place, not a run
_FILES = ("metrics.jsonl", "status.json")  # either makes a folder that of a run
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster where libyaml is


@dataclass(frozen=True)
class Run:
    """What a run folder holds. `metrics`: one dict per iteration, in order, the last one logged.

    `words`: the overrides of the command line; `defaults`: what the configuration would be without
    them, as the experiment and as leash have it (conf/start.py).
    """

    folder: Path
    status: dict[str, Any]
    config: dict[str, Any]
    words: list[str]
    defaults: dict[str, Any]
    metrics: list[dict[str, Any]]

    @cached_property
    def overrides(self) -> dict[str, str]:
        pairs = (word.lstrip("+~").partition("=") for word in self.words)
        return {key: value for key, _, value in pairs}

    @property
    def experiment(self) -> str:
        """Name the experiment: from the config, else what Hydra chose, else the folder's parent."""
        named = self.config.get("experiment") or self.overrides.get("experiment")
        hydra = read_yaml(self.folder / ".hydra" / "hydra.yaml")
        chosen = dig(hydra, "hydra", "runtime", "choices", "experiment")
        return str(named or chosen or self.folder.resolve().parent.name)

    @property
    def state(self) -> str:
        """Name the state in status.json; killed, if it says running and no process is there."""
        told = str(self.status.get("state", "not started"))
        return "killed" if told == "running" and is_free(self.folder) else told

    def series(self, name: str) -> list[tuple[float, float]]:
        """List (iteration, value) of one metric, without the iterations that lack it."""
        found = ((line[ITERATION], number(line.get(name))) for line in self.metrics)
        return [(iteration, value) for iteration, value in found if value is not None]

    def names(self) -> list[str]:
        return sorted({name for line in self.metrics for name in line})

    def last(self, name: str) -> float | None:
        values = self.series(name)
        return values[-1][1] if values else None

    def last_ten(self, name: str) -> list[float]:
        """List a metric of the last ten trained iterations that have it, at most a quarter of them.

        The start of a short run is no part of what it came to.
        """
        values = [value for iteration, value in self.series(name) if iteration >= 1]
        return values[-max(1, min(10, len(values) // 4)) :]

    def last_ten_mean(self, name: str) -> float | None:
        """Average a metric over its `last_ten`."""
        values = self.last_ten(name)
        return sum(values) / len(values) if values else None


def load_run(folder: str | Path) -> Run:
    """Read a run folder, finished or not."""
    folder = Path(folder)
    lines = read_lines(folder / "metrics.jsonl")
    by_iteration = {
        line[ITERATION]: line for line in lines if number(line.get(ITERATION)) is not None
    }
    return Run(
        folder=folder,
        status=read_status(folder),
        config=read_yaml(folder / "config.yaml"),
        words=_read_words(folder / ".hydra" / "overrides.yaml"),
        defaults=read_yaml(folder / ".hydra" / "defaults.yaml"),
        metrics=[by_iteration[iteration] for iteration in sorted(by_iteration)],
    )


def read_status(folder: Path) -> dict[str, Any]:
    """Return status.json, or {} before it is there."""
    try:
        data = (folder / "status.json").read_bytes()
    except OSError:
        return {}
    return _parse(data.decode("utf-8", "replace")) or {}


def is_sweep(folder: Path) -> bool:
    """Tell whether a folder is that of one sweep: Hydra, its start and its page leave files."""
    return any((folder / name).is_file() for name in ("multirun.yaml", "sweep.json", "sweep.csv"))


def is_job(folder: Path) -> bool:
    """Tell whether a folder is that of one run."""
    return any((folder / name).is_file() for name in _FILES)


def find_jobs(folder: str | Path) -> list[Path]:
    """List the job folders below `folder`, in natural order (2 before 10); failed ones too."""
    jobs = []
    for path, names, files in os.walk(folder):
        here = Path(path)
        if here != Path(folder) and (".hydra" in names or is_job(here) or _is_set_up(here, files)):
            jobs.append(here)
            names.clear()
        names[:] = [name for name in names if not name.startswith(".")]
    return sorted(jobs, key=lambda job: _natural(str(job)))


def _is_set_up(folder: Path, files: list[str]) -> bool:
    """Tell whether the config.yaml of a folder is that of a run; Hydra's sources have one too."""
    return "config.yaml" in files and {"policy", "algorithm"} <= {
        *read_yaml(folder / "config.yaml")
    }


def find_runs(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the runs and the sweeps that a folder is or holds; a job goes with its sweep."""
    if is_job(folder) or is_sweep(folder):
        return ([folder], []) if is_job(folder) else ([], [folder])
    jobs = find_jobs(folder)
    above = {job: next((p for p in job.parents if is_sweep(p)), None) for job in jobs}
    return [j for j in jobs if not above[j]], list(dict.fromkeys(filter(None, above.values())))


def remove_unused(folder: Path) -> None:
    """Remove a reserved folder that no run has got: at most Hydra has written its own there."""
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {".hydra"}:
        shutil.rmtree(folder)


def _natural(text: str) -> list[tuple[int, float, str]]:
    """Sort key in which numbers compare as numbers: kl.coeff=0.1 before kl.coeff=1."""
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return [(0, float(p), "") if p[:1].isdigit() else (1, 0.0, p) for p in parts if p]


def number(value: Any) -> float | None:
    """Return a finite int or float as it is, anything else as None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and abs(value) < float("inf") else None


def read_lines(path: Path, *, most: int | None = None) -> list[dict[str, Any]]:
    """Read the JSON objects of a .jsonl file; torn lines are left out, no file is no lines.

    `most`: of a file of more bytes only both ends, half of it each.
    """
    if not path.exists():
        return []
    if most is None or path.stat().st_size <= most:
        data = path.read_bytes()
    else:
        with open(path, "rb") as file:
            data = file.read(most // 2) + b"\n"
            file.seek(-(most // 2), os.SEEK_END)
            data += file.read()
    parsed = (_parse(line) for line in data.decode("utf-8", "replace").split("\n"))
    return [line for line in parsed if line is not None]


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Replace a .jsonl file in one piece."""
    write_text(path, "".join(json_line(line) for line in lines))


def json_line(item: dict[str, Any]) -> str:
    """Format one line: sorted keys, strict JSON (nothing that is not finite), ASCII."""
    return json.dumps(item, sort_keys=True, allow_nan=False) + "\n"


def dig(data: Any, *keys: str) -> Any:
    """Return data[key][key]..., or None where a key or a mapping is missing."""
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping; {} where it is missing or torn."""
    data = _load_yaml(path)
    return data if isinstance(data, dict) else {}


def _load_yaml(path: Path) -> Any:
    if not path.exists():
        return None
    try:
        return yaml.load(path.read_bytes().decode("utf-8", "replace"), Loader=_Loader)
    except yaml.YAMLError:
        return None


def _read_words(path: Path) -> list[str]:
    data = _load_yaml(path)
    return [item for item in data if isinstance(item, str)] if isinstance(data, list) else []


def _parse(text: str) -> dict[str, Any] | None:
    try:
        item = json.loads(text)
    except ValueError:
        return None
    return item if isinstance(item, dict) else None
