"""The files of a run folder: read them in whatever state they are, write them in one piece.

A run may be killed at any byte, and its report is wanted most when that happened: a missing file
reads as empty, a torn line is skipped. Torch-free.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from policies.cache import write_text
from trainer.runs.lock import is_free

ITERATION = "progress/iteration"
PREFIX = "experiment:"  # of a model that an experiment trains first
PLACES = ("output_dir", "resume")  # keys that name a place, not a run
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster where libyaml is


@dataclass(frozen=True)
class Run:
    """What a run folder holds. `metrics`: one dict per iteration, in order, the last one logged.

    `words`: the overrides of the command line; `defaults`: what the configuration would be without
    them, as the experiment and as leash have it (conf/compose.py).
    """

    folder: Path
    status: dict[str, Any] = field(repr=False)
    config: dict[str, Any] = field(repr=False)
    words: list[str]
    defaults: dict[str, Any] = field(repr=False)
    metrics: list[dict[str, Any]] = field(repr=False)

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
        """Name the state in status.json; killed, if it is "running" without a process."""
        state = self.status.get("state", "not started")
        return "killed" if state == "running" and is_free(self.folder) else state

    @cached_property
    def _series(self) -> dict[str, list[tuple[float, float]]]:
        out: dict[str, list[tuple[float, float]]] = {}
        for line in self.metrics:
            for name, value in line.items():
                points = out.setdefault(name, [])
                if number(value) is not None:
                    points.append((line[ITERATION], value))
        return out

    def series(self, name: str) -> list[tuple[float, float]]:
        """List (iteration, value) of one metric, without the iterations that lack it."""
        return self._series.get(name, [])

    def names(self) -> list[str]:
        return sorted(self._series)

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
    lines = [line for line in lines if number(line.get(ITERATION)) is not None]
    by_iteration = {line[ITERATION]: line for line in lines}
    return Run(
        folder=folder,
        status=read_status(folder),
        config=read_yaml(folder / "config.yaml"),
        words=read_yaml(folder / ".hydra" / "overrides.yaml", list),
        defaults=read_yaml(folder / ".hydra" / "defaults.yaml"),
        metrics=[by_iteration[iteration] for iteration in sorted(by_iteration)],
    )


def read_status(folder: Path) -> dict[str, Any]:
    """Return status.json, or {} where it is missing or torn."""
    try:
        return parse_line((folder / "status.json").read_text(errors="replace")) or {}
    except OSError:
        return {}


def is_sweep(folder: Path) -> bool:
    """Return whether a folder is that of one sweep: Hydra, its start and its page leave files."""
    return any((folder / name).is_file() for name in ("multirun.yaml", "sweep.json", "sweep.csv"))


def number(value: Any) -> float | None:
    """Return a finite int or float as it is, anything else as None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and abs(value) < 1e300 else None  # an int may have any length


def read_lines(path: Path, *, most: int | None = None) -> list[dict[str, Any]]:
    """Read the JSON objects of a .jsonl file; torn lines are left out, no file is no lines.

    `most`: of a file of more bytes only both ends, half of it each.
    """
    if not path.is_file():
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


def read_yaml(path: Path, kind: type = dict) -> Any:
    """Read a YAML file of a mapping, or of another `kind`; empty where it is missing or torn."""
    try:
        data = yaml.load(path.read_text(errors="replace"), Loader=_Loader)
    except (OSError, ValueError, yaml.YAMLError):
        return kind()
    return data if isinstance(data, kind) else kind()


def parse_line(text: str) -> dict[str, Any] | None:
    """Return the object of a line of JSON; None of a torn one."""
    try:
        item = json.loads(text)
    except ValueError:
        return None
    return item if isinstance(item, dict) else None
