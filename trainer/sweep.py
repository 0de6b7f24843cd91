"""sweep.csv and sweep.html: what the jobs of a sweep reached, and at which KL.

Rebuilt from the files of the jobs, finished or not. Reward and KL of a job are means over its last
ten iterations; the reward is the task's alone, without a KL part. The picture: show/frontier.py.
"""

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from trainer.redact import redact, redact_text
from trainer.run_files import Run, dig, find_jobs, load_run, number, write_text
from trainer.show import about, charts, page, svg
from trainer.show.frontier import Point, frontier

_OVERLAYS = (
    ("Reward", "mean per reply", "reward/mean"),
    ("KL to the reference", "nats per reply (k1)", "kl/ref_sequence"),
    ("Accuracy on held-out prompts", "share of replies, sampled", "eval/sampled_accuracy"),
    ("Policy entropy", "nats per token", "policy/entropy"),
    ("Reply length", "tokens, mean", "response/length_mean"),
    ("Loss", "mean of the last epoch's steps", "loss/total"),
)


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


def write_sweep(folder: str | Path) -> Path:
    """Write sweep.csv and sweep.html into a multirun folder; return the path of the page."""
    folder = Path(folder)
    jobs = [load_run(job) for job in find_jobs(folder)]
    rows = [_row(folder, job) for job in jobs]
    write_text(folder / "sweep.csv", _csv(rows))
    path = folder / "sweep.html"
    write_text(path, page.page("sweep - leash", _body(folder, rows, jobs)))
    return path


def begin_job(folder: Path, number: int, jobs: Sequence[Sequence[str]]) -> str:
    """Write the page of the jobs before this one; return the line that announces it."""
    write_sweep(folder)
    return job_line(number, jobs)


def job_line(number: int, jobs: Sequence[Sequence[str]]) -> str:
    """Say which job of a sweep begins: its number, and the overrides that not all jobs have.

    >>> job_line(1, [["seed=1", "kl.coeff=0"], ["seed=1", "kl.coeff=0.1"]])
    'job 2 of 2: kl.coeff=0.1'
    """
    own = [word for word in jobs[number] if any(word not in job for job in jobs)]
    return redact_text(f"job {number + 1} of {len(jobs)}: {' '.join(own)}".rstrip(": "))


def read_rows(folder: str | Path) -> list[Row]:
    """Read one row per job of a multirun folder."""
    return [_row(Path(folder), load_run(job)) for job in find_jobs(folder)]


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


def frontier_svg(rows: Sequence[Row], *, width: int = 480, height: int = 340) -> str:
    """Draw reward against KL, one labelled point per setting, as a standalone SVG document."""
    return svg.standalone([_picture(rows, width, height)], width=width, height=height)


def labels(rows: Sequence[Row]) -> dict[str, str]:
    """Name each job by the overrides in which the jobs differ, else by its folder."""
    return _named(rows, _varying(rows))


def settings(rows: Sequence[Row]) -> dict[str, str]:
    """Name the setting of each job: what differs between the jobs, without the seed."""
    if _settings(rows):
        return _named(rows, _settings(rows))
    same = {row.job: "all seeds" for row in rows}
    return same if _varying(rows) == ["seed"] else labels(rows)


def best(rows: Sequence[Row]) -> Row | None:
    """Return the finished job with the highest objective, at equal ones that with the lower KL."""
    ended = [row for row in rows if row.objective is not None and row.state == "finished"]
    return max(ended, key=lambda r: (r.objective or 0.0, -(r.kl or 0.0)), default=None)


def _picture(rows: Sequence[Row], width: int, height: int) -> str:
    named = ", ".join(_settings(rows))
    return frontier(points(rows), named=named, width=width, height=height)


def _named(rows: Sequence[Row], keys: Sequence[str]) -> dict[str, str]:
    pairs = {r.job: [f"{k}={r.overrides[k]}" for k in keys if k in r.overrides] for r in rows}
    return {job: ", ".join(own) or job for job, own in pairs.items()}


def _keys(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row.overrides))


def _varying(rows: Sequence[Row]) -> list[str]:
    """List the keys in which the jobs differ, as far as they have them: one may not have begun."""
    return [k for k in _keys(rows) if len({r.overrides[k] for r in rows if k in r.overrides}) > 1]


def _settings(rows: Sequence[Row]) -> list[str]:
    return [key for key in _varying(rows) if key != "seed"]


def _row(folder: Path, run: Run) -> Row:
    job = run.folder.relative_to(folder).as_posix()
    coeff = run.last("kl/coeff")
    if coeff is None:
        coeff = number(dig(run.config, "kl", "coeff"))
    reward = run.last_ten_mean("reward/raw_mean")
    overrides = {k: v for k, v in run.overrides.items() if k not in about.PLACES}
    return Row(
        job=job,
        overrides=redact(overrides or _from_name(job)),
        state=run.state,
        objective=number(run.status.get("objective")),
        accuracy=run.last("eval/sampled_accuracy"),
        reward=run.last_ten_mean("reward/mean") if reward is None else reward,
        kl=run.last_ten_mean("kl/ref_sequence"),
        coeff=coeff,
        iteration=int(run.metrics[-1]["progress/iteration"]) if run.metrics else 0,
        command=about.command(run),
    )


def _from_name(job: str) -> dict[str, str]:
    """Read `a=1,b=[2,3]`, the name Hydra gives a job's folder."""
    parts = re.split(r",(?=[\w.+~/@]+=)", job)
    return dict(part.split("=", 1) for part in parts if "=" in part)


_COLUMNS = {
    "state": "state",
    "objective": "objective",
    "eval/sampled_accuracy": "accuracy",
    "reward/raw_mean": "reward",
    "kl/ref_sequence": "kl",
    "kl/coeff": "coeff",
    "progress/iteration": "iteration",
}


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["job", *_keys(rows), *_COLUMNS])
    for row in rows:
        own = [row.overrides.get(key, "") for key in _keys(rows)]
        writer.writerow([row.job, *own, *(getattr(row, name) for name in _COLUMNS.values())])
    return text.getvalue()


def _body(folder: Path, rows: Sequence[Row], jobs: Sequence[Run]) -> list[str]:
    states = [row.state for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
    name = jobs[0].experiment if jobs else folder.name
    picture = _picture(rows, 420, 320) if points(rows) else ""
    again = page.command(f"python -m trainer.report {folder.resolve()}")
    own = settings(rows)
    begun = [row.job for row, run in zip(rows, jobs, strict=True) if run.metrics]
    groups = list(dict.fromkeys(own[job] for job in begun))
    return [
        f"<h1>Sweep of {page.escape(name)}</h1>",
        f'<p class="muted">{len(rows)} jobs: {page.escape(counts)}</p>',
        *_best(rows),
        f'<div class="sides"><div>{picture}</div><div>{_table(rows)}</div></div>' if rows else "",
        page.charts(_overlays(rows, jobs, groups), title="Curves", key=groups),
        f'<p class="muted">Written from the files of the jobs; again: {again}</p>',
    ]


def _best(rows: Sequence[Row]) -> list[str]:
    """Say which job did best, and how to run it again."""
    row = best(rows)
    if row is None or len(rows) < 2:
        return []
    values = [("objective", row.objective), ("reward", row.reward), ("KL", row.kl)]
    told = ", ".join(f"{name} {svg.short(v)}" for name, v in values if v is not None)
    line = f"Highest objective: <b>{page.escape(labels(rows)[row.job])}</b> ({page.escape(told)})"
    return [f"<p>{line}</p>", f"<p>{page.command(row.command)}</p>" if row.command else ""]


def _overlays(rows: Sequence[Row], jobs: Sequence[Run], groups: Sequence[str]) -> list[str]:
    """Draw the curves of all jobs over each other; the seeds of a setting share a hue."""
    names, own, drawn = labels(rows), settings(rows), []
    for title, unit, metric in _OVERLAYS:
        series = [
            charts.Series(
                names[row.job],
                run.series(metric),
                hue=groups.index(own[row.job]),
                dots=metric.startswith("eval/"),
            )
            for row, run in zip(rows, jobs, strict=True)
            if run.metrics
        ]
        if any(s.points for s in series):
            drawn.append(charts.line_chart(series, title=title, unit=unit, named=False))
    return drawn


def _table(rows: Sequence[Row]) -> str:
    """Draw what differs between the jobs, and in a line below it what does not."""

    def cell(value: object) -> str:
        known = number(value)
        return "" if value is None else str(value) if known is None else svg.short(known)

    columns = {key: [row.overrides.get(key, "") for row in rows] for key in _varying(rows)}
    same: dict[str, str] = {}
    for title, name in _COLUMNS.items():
        cells = [cell(getattr(row, name)) for row in rows]
        if len(rows) > 1 and len(set(cells)) == 1:
            same |= {title: cells[0]} if cells[0] else {}
        elif not any(_alike(cells, shown) for shown in columns.values()):
            columns[title] = cells
    if not _varying(rows):
        columns = {"job": [row.job for row in rows], **columns}
    shown = [
        [page.badge(c) if title == "state" else page.escape(c) for c in cells]
        for title, cells in columns.items()
    ]
    links = (f'<a href="{page.escape(quote(row.job))}/report.html">' for row in rows)
    shown[0] = [f"{a}{cell or '-'}</a>" for a, cell in zip(links, shown[0], strict=True)]
    text = ", ".join(f"{title} {value}" for title, value in same.items())
    note = f'<p class="muted">the same in all jobs: {page.escape(text)}</p>' if same else ""
    return page.table([*columns], zip(*shown, strict=True), sortable=True) + note


def _alike(cells: Sequence[str], others: Sequence[str]) -> bool:
    """Return whether two columns say the same where both say something.

    0.10 is 0.1, and 0.06431 was cut to 0.0643.
    """

    def same(one: str, other: str) -> bool:
        if not (one and other):
            return True
        try:
            return math.isclose(float(one), float(other), rel_tol=5e-3)
        except ValueError:
            return one == other

    return all(map(same, cells, others))
