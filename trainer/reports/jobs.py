"""The jobs of a sweep as rows, and what they are called: by what differs between them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from trainer.reports.frontier import Point


@dataclass(frozen=True)
class Row:
    """One job. `reward` and `kl` (nats per reply) are means over the `averaged` last iterations."""

    job: str
    overrides: dict[str, str] = field(default_factory=dict)
    state: str = "finished"
    objective: float | None = None
    accuracy: float | None = None
    reward: float | None = None
    kl: float | None = None
    coeff: float | None = None
    iteration: int = 0
    averaged: int = 0
    command: str = ""


@dataclass(frozen=True)
class Setting:
    """Jobs that differ in the seed alone. What is told of it is of its finished jobs, if any is."""

    name: str
    jobs: tuple[Row, ...]

    @property
    def finished(self) -> tuple[Row, ...]:
        return tuple(job for job in self.jobs if job.state == "finished")

    @property
    def counted(self) -> tuple[Row, ...]:
        return self.finished or self.jobs

    @property
    def state(self) -> str:
        """Say in which states its jobs are: "finished", or "2 finished, 1 failed"."""
        counts = Counter(job.state for job in self.jobs)
        several = len(self.jobs) > 1
        return ", ".join(f"{n} {state}" if several else state for state, n in counts.items())

    def mean(self, name: str) -> float | None:
        """Average a field of Row over the jobs that count and have it."""
        values = [value for job in self.counted if (value := getattr(job, name)) is not None]
        return fmean(values) if values else None


def labels(rows: Sequence[Row]) -> dict[str, str]:
    """Name each job by the overrides in which the jobs differ, else by its folder."""
    return _named(rows, varying(rows))


def settings(rows: Sequence[Row]) -> dict[str, str]:
    """Name the setting of each job: what differs between the jobs, without the seed."""
    if _settings(rows):
        return _named(rows, _settings(rows))
    same = {row.job: "all seeds" for row in rows}
    return same if varying(rows) == ["seed"] else labels(rows)


def grouped(rows: Sequence[Row]) -> list[Setting]:
    """Put the jobs of a setting together."""
    names = settings(rows)
    held: dict[str, list[Row]] = {}
    for row in rows:
        held.setdefault(names[row.job], []).append(row)
    return [Setting(name, tuple(jobs)) for name, jobs in held.items()]


def best(rows: Sequence[Row]) -> Setting | None:
    """Return the setting whose finished jobs have the highest mean objective.

    At equal ones that with the lower KL. Not that of the best job: with many seeds it is the
    luckiest.
    """
    ended = [s for s in grouped(rows) if s.finished and s.mean("objective") is not None]

    def worth(setting: Setting) -> tuple[float, float]:
        return setting.mean("objective") or 0.0, -(setting.mean("kl") or 0.0)

    return max(ended, key=worth, default=None)


def points(rows: Sequence[Row]) -> list[Point]:
    """Return a point per setting, of its finished jobs if it has any.

    >>> pair = [Row(s, {"seed": s}, reward=1.0, kl=k) for s, k in (("1", 0.5), ("2", 1.5))]
    >>> [(p.kl, p.reward, len(p.seeds)) for p in points(pair)]
    [(1.0, 1.0, 2)]
    """
    keys, made = _settings(rows), []
    for setting in grouped(rows):
        seeds = tuple(
            (job.kl, job.reward)
            for job in setting.counted
            if job.kl is not None and job.reward is not None
        )
        short = ", ".join(setting.jobs[0].overrides.get(key, "-") for key in keys)
        ended = len(setting.finished) == len(setting.jobs)
        note, done = "" if ended else f" ({setting.state})", bool(setting.finished)
        made += [Point(short or setting.name, seeds, note, done)] * bool(seeds)
    return made


def all_keys(rows: Sequence[Row]) -> list[str]:
    """List the keys that any job overrides."""
    return list(dict.fromkeys(key for row in rows for key in row.overrides))


def varying(rows: Sequence[Row]) -> list[str]:
    """List the keys in which the jobs differ, as far as they have them: one may not have begun."""
    return [
        k for k in all_keys(rows) if len({r.overrides[k] for r in rows if k in r.overrides}) > 1
    ]


def _named(rows: Sequence[Row], keys: Sequence[str]) -> dict[str, str]:
    pairs = {r.job: [f"{k}={r.overrides[k]}" for k in keys if k in r.overrides] for r in rows}
    return {job: ", ".join(own) or job for job, own in pairs.items()}


def _settings(rows: Sequence[Row]) -> list[str]:
    return [key for key in varying(rows) if key != "seed"]
