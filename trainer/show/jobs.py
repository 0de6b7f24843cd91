"""The jobs of a sweep as rows, and what they are called: by what differs between them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.show.frontier import Point


@dataclass(frozen=True)
class Row:
    """One job. `reward` and `kl` (nats per reply) are means over the last ten iterations."""

    job: str
    overrides: dict[str, str] = field(default_factory=dict)
    state: str = "finished"
    objective: float | None = None
    accuracy: float | None = None
    reward: float | None = None
    kl: float | None = None
    coeff: float | None = None
    iteration: int = 0
    command: str = ""


def labels(rows: Sequence[Row]) -> dict[str, str]:
    """Name each job by the overrides in which the jobs differ, else by its folder."""
    return _named(rows, varying(rows))


def settings(rows: Sequence[Row]) -> dict[str, str]:
    """Name the setting of each job: what differs between the jobs, without the seed."""
    if _settings(rows):
        return _named(rows, _settings(rows))
    same = {row.job: "all seeds" for row in rows}
    return same if varying(rows) == ["seed"] else labels(rows)


def best(rows: Sequence[Row]) -> Row | None:
    """Return the finished job with the highest objective, at equal ones that with the lower KL."""
    ended = [row for row in rows if row.objective is not None and row.state == "finished"]
    return max(ended, key=lambda r: (r.objective or 0.0, -(r.kl or 0.0)), default=None)


def points(rows: Sequence[Row]) -> list[Point]:
    """Return a point per setting; jobs that differ in the seed alone are one.

    >>> pair = [Row(s, {"seed": s}, reward=1.0, kl=k) for s, k in (("1", 0.5), ("2", 1.5))]
    >>> [(p.kl, p.reward, len(p.seeds)) for p in points(pair)]
    [(1.0, 1.0, 2)]
    """
    names = settings(rows)
    held: dict[str, list[Row]] = {}
    for row in rows:
        if row.reward is not None and row.kl is not None:
            held.setdefault(names[row.job], []).append(row)
    keys, made = _settings(rows), []
    for name, group in held.items():
        short = ", ".join(group[0].overrides.get(key, "-") for key in keys)
        unfinished = sorted({row.state for row in group if row.state != "finished"})
        note = f" ({', '.join(unfinished)})" if unfinished else ""
        seeds = tuple((row.kl or 0.0, row.reward or 0.0) for row in group)
        made.append(Point(short or name, seeds, note))
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
