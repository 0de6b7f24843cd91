"""The files of a run folder: read them in whatever state they are, write them in one piece.

A run may be killed at any byte, and its report is wanted most when that happened: a missing file
reads as empty, a torn line is skipped. Torch-free.
"""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from policies.cache import write_text

ITERATION = "progress/iteration"
PREFIX = "experiment:"  # of a model that an experiment trains first
PLACES = ("output_dir", "resume")  # keys that name a place, not a run
_KINDS: dict[str, Any] = {"state": str, "reason": str | None, "resumed": str, "iteration": int}
_KINDS |= {"objective": int | float | None, "seconds": int | float, "model": dict, "machine": dict}
_KINDS |= {"phase": str, "phase_since": int | float, "phase_share": int | float | None}
_KINDS["ended"] = str
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
        from trainer.runs.lock import is_free  # here: a worker does not ask

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
    """Return status.json, or {} before it is there; what is of a wrong type is left out."""
    path = folder / "status.json"
    try:
        data = path.read_bytes() if path.is_file() else b""
    except OSError:
        return {}
    found = parse_line(data.decode("utf-8", "replace")) or {}
    good = {k: v for k, v in found.items() if isinstance(v, _KINDS.get(k, object))}
    notes = good.pop("notes", None)
    if isinstance(notes, list):
        good["notes"] = [note for note in notes if isinstance(note, dict)]
    return good


def is_sweep(folder: Path) -> bool:
    """Tell whether a folder is that of one sweep: Hydra, its start and its page leave files."""
    return any((folder / name).is_file() for name in ("multirun.yaml", "sweep.json", "sweep.csv"))


def number(value: Any) -> float | None:
    """Return a finite int or float as it is, anything else as None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and abs(value) < 1e300 else None  # an int may have any length


def read_lines(path: Path, *, most: int | None = None) -> list[dict[str, Any]]:
    """Read the JSON objects of a .jsonl file; torn lines are left out, no file is no lines.

    `most`: of a file of more bytes only both ends, half of it each.
    """
    if not path.is_file():  # a pipe would be waited for
        return []
    if most is None or path.stat().st_size <= most:
        data = path.read_bytes()
    else:
        with open(path, "rb") as file:
            data = file.read(most // 2) + b"\n"
            file.seek(-(most // 2), os.SEEK_END)
            data += file.read()
    parsed = (parse_line(line) for line in data.decode("utf-8", "replace").split("\n"))
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
    if not path.is_file():
        return None
    try:
        if bomb_in(data := path.read_bytes()):
            return None
        return yaml.load(data.decode("utf-8", "replace"), Loader=_Loader)
    except (yaml.YAMLError, RecursionError, ValueError):
        return None


def bomb_in(data: bytes) -> str | None:
    """Return the fault of a YAML file that stands for far more than it holds, None of others."""
    if re.search(rb"[\s\[{,]\*[\w-]", data):
        from trainer.runs.yaml_size import bomb  # here: few files have aliases

        return bomb(data)
    return None


def _read_words(path: Path) -> list[str]:
    data = _load_yaml(path)
    return [item for item in data if isinstance(item, str)] if isinstance(data, list) else []


def parse_line(text: str) -> dict[str, Any] | None:
    """Return the object of a line of JSON; None of a torn one."""
    try:
        item = json.loads(text)
    except (ValueError, RecursionError):  # torn, or nested without end
        return None
    return item if isinstance(item, dict) else None
