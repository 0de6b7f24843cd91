"""sweep.csv and sweep.html: what the jobs of a sweep reached, and at which KL.

Rebuilt from the files of the jobs, finished or not. The picture is the reward-KL frontier: one
point per job, a line through the Pareto points, those that no other job beats in both. Reward and
KL of a job are means over its last ten iterations. The KL axis is a square-root scale, as in Gao
et al. 2022 (Scaling Laws for Reward Model Overoptimization, arXiv:2210.10760), where a distance
is the root of a KL.
"""

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from trainer import page, svg
from trainer.redact import redact, redact_text
from trainer.run_files import Run, dig, find_jobs, load_run, number, write_text

_OVERLAYS = (
    ("Reward", "mean per reply", "reward/mean"),
    ("KL to the reference", "nats per reply (k1)", "kl/ref_sequence"),
    ("Accuracy on held-out prompts", "share of replies, sampled", "eval/sampled_accuracy"),
    ("Policy entropy", "nats per token", "policy/entropy"),
    ("Loss", "", "loss/total"),
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


def write_sweep(folder: str | Path) -> Path:
    """Write sweep.csv and sweep.html into a multirun folder; return the path of the page."""
    folder = Path(folder)
    jobs = [load_run(job) for job in find_jobs(folder)]
    rows = [_row(folder, job) for job in jobs]
    write_text(folder / "sweep.csv", _csv(rows))
    path = folder / "sweep.html"
    write_text(path, page.page("sweep - leash", _body(folder, rows, jobs)))
    return path


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


def pareto(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that no other beats in reward and KL, in order of KL.

    >>> [r.job for r in pareto([Row("a", reward=1, kl=2), Row("b", reward=0.5, kl=3)])]
    ['a']
    """
    best: list[Row] = []
    for row in sorted(_placed(rows), key=lambda r: (r.kl, -(r.reward or 0.0))):
        if not best or (row.reward or 0.0) > (best[-1].reward or 0.0):
            best.append(row)
    return best


def frontier_svg(rows: Sequence[Row], *, width: int = 480, height: int = 340) -> str:
    """Draw reward against KL, one labelled point per job, as a standalone SVG document."""
    return svg.standalone([_frontier(rows, width, height)], width=width, height=height)


def _frontier(rows: Sequence[Row], width: int, height: int) -> str:
    placed = _placed(rows)
    if not placed:
        raise ValueError("expected at least one job with reward/mean and kl/ref_sequence, got none")
    kls, rewards = [r.kl or 0.0 for r in placed], [r.reward or 0.0 for r in placed]
    y_ticks = svg.ticks(min(rewards), max(rewards), count=5)
    left = 14 + max(svg.text_width(svg.short(t)) for t in y_ticks)
    top = max(*kls, 1e-3) * 1.15
    x = svg.Axis(0.0, top, left + 12, width - 40, math.sqrt)
    y = svg.Axis(y_ticks[0], y_ticks[-1], height - 48, 48)
    parts = [svg.label(2, 14, "Reward against KL to the reference", style="title")]
    keys = _varying(rows)
    named = f"; labels: {keys[0]}" if len(keys) == 1 else ""
    parts.append(svg.label(2, 31, f"mean of the last ten iterations{named}"))
    parts += svg.grid(y, y_ticks, left=left, right=width - 12)
    for tick in _root_ticks(x):
        parts.append(f'<path class="grid" d="M{x(tick)} {height - 48}v6"/>')
        parts.append(svg.label(x(tick), height - 28, svg.short(tick), anchor="middle"))
    name = "KL, nats per reply (square-root scale)"
    parts.append(svg.label((left + width) / 2, height - 6, name, anchor="middle"))
    line = [(x(r.kl or 0.0), y(r.reward or 0.0)) for r in pareto(placed)]
    if len(line) > 1:
        parts.append(f'<path class="line" style="stroke:var(--hue0)" d="{svg.path(line)}"/>')
    parts += _points(placed, rows, x, y)
    return svg.frame("".join(parts), width=width, height=height, title=name)


def _points(placed: Sequence[Row], rows: Sequence[Row], x: svg.Axis, y: svg.Axis) -> list[str]:
    """Draw the points (Pareto ones filled) and their labels where they hide nothing."""
    front = {row.job for row in pareto(placed)}
    spots = [(x(r.kl or 0.0), y(r.reward or 0.0)) for r in placed]
    boxes = [(px - 6, py - 6, px + 6, py + 6) for px, py in spots]
    names, keys, parts = labels(rows), _varying(rows), []
    for row, (px, py) in zip(placed, spots, strict=True):
        fill = "var(--hue0)" if row.job in front else "var(--paper)"
        text = row.overrides.get(keys[0], "") if len(keys) == 1 else names[row.job]
        text += "" if row.state == "finished" else f" ({row.state})"
        tip = svg.label(0, 0, f"{text}: reward {row.reward:.3f}, KL {row.kl:.3f}")
        tip = f"<title>{tip[tip.index('>') + 1 : -len('</text>')]}</title>"
        style = f'style="fill:{fill};stroke:var(--hue0);stroke-width:1.8"'
        parts.append(f'<circle cx="{px}" cy="{py}" r="4.5" {style}>{tip}</circle>')
        wide = svg.text_width(text)
        tries = [(px + 9, py + 15), (px - wide / 2, py - 10), (px - wide / 2, py + 20)]
        tries += [(px - 9 - wide, py - 8), (px + 9, py - 8), (px - 9 - wide, py + 15)]
        within = [(a, b) for a, b in tries if a > x.start - 12 and a + wide < x.stop + 36] or tries
        free = [(a, b) for a, b in within if not _hits((a, b - 10, a + wide, b + 2), boxes)]
        a, b = (free or within)[0]
        boxes.append((a, b - 10, a + wide, b + 2))
        parts.append(svg.label(a, b, text, style="value"))
    return parts


def _hits(box: tuple[float, ...], others: Sequence[tuple[float, ...]]) -> bool:
    return any(box[0] < o[2] and o[0] < box[2] and box[1] < o[3] and o[1] < box[3] for o in others)


def _root_ticks(axis: svg.Axis) -> list[float]:
    """Choose ticks 0 and 1-2-5 values that lie at least 44 pixels apart, from the right."""
    power = math.floor(math.log10(axis.hi))
    values = [m * 10.0**p for p in range(power, power - 4, -1) for m in (5, 2, 1)]
    kept: list[float] = []
    for value in [v for v in values if v <= axis.hi]:
        space = min(axis(value) - axis(0.0), axis(kept[-1]) - axis(value) if kept else 1e9)
        if space >= 44:
            kept.append(value)
    return [0.0, *reversed(kept)]


def labels(rows: Sequence[Row]) -> dict[str, str]:
    """Name each job by the overrides in which the jobs differ, else by its folder."""
    keys, named = _varying(rows), {}
    for row in rows:
        pairs = [f"{k}={row.overrides[k]}" for k in keys if k in row.overrides]
        named[row.job] = ", ".join(pairs) or row.job
    return named


def _keys(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row.overrides))


def _varying(rows: Sequence[Row]) -> list[str]:
    return [k for k in _keys(rows) if len({r.overrides.get(k) for r in rows}) > 1]


def _placed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.reward is not None and row.kl is not None]


def _row(folder: Path, run: Run) -> Row:
    job = run.folder.relative_to(folder).as_posix()
    coeff = run.last("kl/coeff")
    if coeff is None:
        coeff = number(dig(run.config, "kl", "coeff"))
    return Row(
        job=job,
        overrides=redact(run.overrides or _from_name(job)),
        state=run.state,
        objective=number(run.status.get("objective")),
        accuracy=run.last("eval/sampled_accuracy"),
        reward=run.last_ten_mean("reward/mean"),
        kl=run.last_ten_mean("kl/ref_sequence"),
        coeff=coeff,
        iteration=int(run.metrics[-1]["progress/iteration"]) if run.metrics else 0,
    )


def _from_name(job: str) -> dict[str, str]:
    """Read `a=1,b=[2,3]`, the name Hydra gives a job's folder."""
    parts = re.split(r",(?=[\w.+~/@]+=)", job)
    return dict(part.split("=", 1) for part in parts if "=" in part)


_COLUMNS = {
    "state": "state",
    "objective": "objective",
    "eval/sampled_accuracy": "accuracy",
    "reward/mean": "reward",
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
    frontier = _frontier(rows, 480, 340) if _placed(rows) else ""
    named = labels(rows)
    drawn = [(named[r.job], run) for r, run in zip(rows, jobs, strict=True) if run.metrics]
    return [
        f"<h1>Sweep of {page.escape(name)}</h1>",
        f'<p class="muted">{len(rows)} jobs: {page.escape(counts)}</p>',
        f'<div style="max-width:640px;margin:20px 0 28px">{frontier}</div>' if frontier else "",
        _table(rows),
        page.charts(_overlays(drawn), title="Curves", key=[name for name, _ in drawn]),
    ]


def _overlays(jobs: Sequence[tuple[str, Run]]) -> list[str]:
    drawn = []
    for title, unit, metric in _OVERLAYS:
        series = [
            svg.Series(name, run.series(metric), hue=i, dots=metric.startswith("eval/"))
            for i, (name, run) in enumerate(jobs)
        ]
        if any(s.points for s in series):
            drawn.append(svg.line_chart(series, title=title, unit=unit, legend=False))
    return drawn


def _table(rows: Sequence[Row]) -> str:
    """Draw what differs between the jobs, and in a line below it what does not."""

    def cell(value: object) -> str:
        is_number = number(value)
        return (
            "" if value is None else svg.short(is_number) if is_number is not None else str(value)
        )

    columns = {key: [row.overrides.get(key, "") for row in rows] for key in _varying(rows)}
    same: dict[str, str] = {}
    for title, name in _COLUMNS.items():
        cells = [cell(getattr(row, name)) for row in rows]
        if len(rows) > 1 and len(set(cells)) == 1:
            same |= {title: cells[0]} if cells[0] else {}
        elif not any(_alike(cells, shown) for shown in columns.values()):
            columns[title] = cells
    names = [page.escape(name) for name in labels(rows).values()]
    links = (f"{page.escape(quote(row.job))}/report.html" for row in rows)
    body = [
        [f'<a href="{link}">{name}</a>', *map(page.escape, cells)]
        for link, name, *cells in zip(links, names, *columns.values(), strict=True)
    ]
    text = ", ".join(f"{title} {value}" for title, value in same.items())
    note = f'<p class="muted">the same in all jobs: {page.escape(text)}</p>' if same else ""
    return page.table(["job", *columns], body) + note


def _alike(cells: Sequence[str], others: Sequence[str]) -> bool:
    """Return whether two columns say the same; 0.10 is 0.1."""

    def plain(text: str) -> object:
        try:
            return float(text)
        except ValueError:
            return text

    return [*map(plain, cells)] == [*map(plain, others)]
