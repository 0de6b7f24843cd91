"""Read the files of a run folder in any state, and write them atomically. Torch-free.

A run may be killed at any byte and still needs its report: a missing file reads as empty, a torn
line is skipped.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from policies.files import write_text
from trainer.runs.lock import is_free

ITERATION = "progress/iteration"
PREFIX = "experiment:"  # of a model that another experiment trains
Compose = Callable[[str], dict[str, Any]]  # from the name of that experiment to its configuration
STATUS = {"state": str, "iteration": int, "seconds": (int, float)}
STATUS |= {"machine": dict, "notes": list, "inputs": dict}
PLACES = ("output_dir", "resume")  # keys that name a folder
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster with libyaml


@dataclass(frozen=True)
class Run:
    """The contents of a run folder. `metrics`: the last logged dict of each iteration, in order.

    `words`: the overrides of the command line; `defaults`: the configuration without them, as the
    experiment and as leash define it (conf/compose.py).
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
        """Return the experiment: from the config, else Hydra's choice, else the folder's parent."""
        named = self.config.get("experiment") or self.overrides.get("experiment")
        hydra = read_yaml(self.folder / ".hydra" / "hydra.yaml")
        chosen = dig(hydra, "hydra", "runtime", "choices", "experiment")
        return str(named or chosen or self.folder.resolve().parent.name)

    @property
    def state(self) -> str:
        """Return the state in status.json; "killed" if it is "running" without a process."""
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

        The start of a short run is excluded from its result.
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
    """Return status.json without values of a wrong type; {} if it is missing or torn."""
    try:
        status = parse_line((folder / "status.json").read_text(errors="replace")) or {}
    except OSError:
        return {}
    return {
        key: value for key, value in status.items() if isinstance(value, STATUS.get(key, object))
    }


def is_sweep(folder: Path) -> bool:
    """Return whether a folder is a sweep folder, by the files of Hydra, its plan or its page."""
    return any((folder / name).is_file() for name in ("multirun.yaml", "sweep.json", "sweep.csv"))


def number(value: Any) -> float | None:
    """Return a finite int or float unchanged, and None for anything else."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and abs(value) < 1e300 else None  # a huge int overflows a float


def read_lines(path: Path, *, most: int | None = None) -> list[dict[str, Any]]:
    """Read the JSON objects of a .jsonl file; skip torn lines, return [] for a missing file.

    `most`: read only the first and last `most / 2` bytes of a larger file.
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
    """Replace a .jsonl file atomically."""
    write_text(path, "".join(json_line(line) for line in lines))


def json_line(item: dict[str, Any]) -> str:
    """Format one line: sorted keys, strict JSON (finite numbers only), ASCII."""
    return json.dumps(item, sort_keys=True, allow_nan=False) + "\n"


def dig(data: Any, *keys: str) -> Any:
    """Return data[key][key]..., or None if a key or a mapping is missing."""
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def flatten(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings under keys with dots.

    >>> [*flatten({"kl": {"coeff": 0.1, "end": None}, "stop": ["a"]})]
    [('kl.coeff', 0.1), ('kl.end', None), ('stop', ['a'])]
    """
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def read_yaml(path: Path, kind: type = dict) -> Any:
    """Read a YAML file of type `kind`; return an empty `kind` if it is missing or torn."""
    try:
        data = yaml.load(path.read_text(errors="replace"), Loader=_Loader)
    except (OSError, ValueError, yaml.YAMLError):
        return kind()
    return data if isinstance(data, kind) else kind()


def parse_line(text: str) -> dict[str, Any] | None:
    """Parse a line of JSON; return None if it is torn or not an object."""
    try:
        item = json.loads(text)
    except ValueError:
        return None
    return item if isinstance(item, dict) else None
