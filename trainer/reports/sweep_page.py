"""The page of a sweep: the frontier, a table of the jobs, their curves over each other."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from trainer.reports import charts, page, svg
from trainer.reports.about import task_reward
from trainer.reports.frontier import AVERAGED, frontier
from trainer.reports.jobs import Row, Setting, best, grouped, labels, points, settings, varying
from trainer.reports.panels import MAIN
from trainer.reports.text import duration, one_line
from trainer.runs.run_files import Run, dig, number

_OVERLAYS = (  # each under the title and with the unit of its panel
    "reward/raw_mean",
    "kl/ref_sequence",
    "eval/sampled_accuracy",
    "policy/entropy",
    "response/length_mean",
    "loss/total",
)
COLUMNS = {  # metric or state: field of Row
    "state": "state",
    "objective": "objective",
    "eval/sampled_accuracy": "accuracy",
    "reward/raw_mean": "reward",
    "kl/ref_sequence": "kl",
    "kl/coeff": "coeff",
    "progress/iteration": "iteration",
    "iterations_averaged": "averaged",
}
OBJECTIVES = {  # in the order in which a run takes them
    "eval/sampled_accuracy": "held-out accuracy, sampled",
    "eval/greedy_accuracy": "held-out accuracy, greedy",
    "reward/mean": "mean reward of the last iteration, a KL in it included",
    "loss/total": "minus the loss of the last iteration",
}
GOING = ("running", "starting")
MOST = 20  # settings that the terminal lists


@dataclass(frozen=True)
class Sweep:
    """What the page is of. `left`: jobs that have not begun; `live`: whether the sweep goes on.

    `live` is None where nobody wrote it down, as of a search by a script of one's own. `command`
    continues the sweep.
    """

    folder: Path
    rows: Sequence[Row]
    jobs: Sequence[Run]
    left: int = 0
    live: bool | None = None
    command: str = ""

    @property
    def unfinished(self) -> bool:
        """Whether the sweep does not go on though jobs are not finished."""
        ended = all(row.state == "finished" for row in self.rows)
        return self.live is False and not (ended and not self.left)


def body(sweep: Sweep) -> list[str]:
    """Return the parts of the page (HTML)."""
    rows, jobs = sweep.rows, sweep.jobs
    name = jobs[0].experiment if jobs else sweep.folder.name
    drawing = picture(rows, 420, 320) if points(rows) else ""
    again = page.command(f"python -m trainer.reports {shlex.quote(str(sweep.folder.resolve()))}")
    own = settings(rows)
    begun = [row.job for row, run in zip(rows, jobs, strict=True) if run.metrics]
    groups = list(dict.fromkeys(own[job] for job in begun))
    sides = f'<div class="sides"><div>{drawing}</div><div>{_table(rows, jobs)}</div></div>'
    return [
        page.heading(f"Sweep of {name}", _state(sweep)),
        *_progress(sweep),
        page.stale(again) if sweep.live else "",
        f"<p>Continue it: {page.copyable(sweep.command)}</p>" if sweep.unfinished else "",
        *_best(rows, jobs),
        sides if rows else "",
        page.charts(_overlays(rows, jobs, groups), title="Curves", key=groups),
        f'<footer class="muted">Written from the files of the jobs; again: {again}</footer>',
    ]


def picture(rows: Sequence[Row], width: int, height: int) -> str:
    """Draw the frontier of the jobs."""
    named = ", ".join(key for key in varying(rows) if key != "seed")
    return frontier(points(rows), named=named, width=width, height=height)


def _state(sweep: Sweep) -> str:
    if sweep.live is None:
        return ""
    ended = all(row.state in ("finished", "failed") for row in sweep.rows)
    return "running" if sweep.live else "finished" if ended and not sweep.left else "stopped"


def _progress(sweep: Sweep) -> list[str]:
    """Say how many jobs are in which state, which one runs and how long the rest may take."""
    states = [row.state for row in sweep.rows]
    counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states))]
    counts += [f"{sweep.left} {'to come' if sweep.live else 'not begun'}"] * bool(sweep.left)
    total = len(states) + sweep.left
    line = f"{total} job{'s' * (total != 1)}: {', '.join(counts)}"
    out = [f'<p class="muted">{line}{_rest(sweep)}</p>']
    names = labels(sweep.rows)
    for row, run in zip(sweep.rows, sweep.jobs, strict=True):
        if row.state in GOING:
            of = number(dig(run.config, "trainer", "num_iterations"))
            where = f", iteration {row.iteration} of {of:g}" if of and run.metrics else ""
            link = _link(run, row, page.escape(names[row.job]))
            out.append(f"<p>{row.state.capitalize()}: {link}{where}</p>")
    return out


def _rest(sweep: Sweep) -> str:
    """Estimate the time left from the jobs that are finished."""
    seconds = [number(run.status.get("seconds")) or 0.0 for run in sweep.jobs]
    pairs = list(zip(seconds, sweep.rows, strict=True))
    done = [s for s, row in pairs if row.state == "finished"]
    going = [s for s, row in pairs if row.state in GOING]
    if not (sweep.live and done):
        return ""
    each = sum(done) / len(done)
    return f"; about {duration(each * sweep.left + sum(max(each - s, 0.0) for s in going))} left"


def _link(run: Run, row: Row, text: str) -> str:
    """Link the page of a job (`text` is HTML), if it has one yet."""
    if not (run.folder / "report.html").is_file():
        return text
    return f'<a href="{page.escape(quote(row.job))}/report.html">{text}</a>'


def _best(rows: Sequence[Row], jobs: Sequence[Run]) -> list[str]:
    """Say which setting did best, and how to run it again."""
    found = best(rows)
    if found is None or len(rows) < 2:
        return []
    line = f"Highest objective: <b>{page.escape(found.name)}</b> ({page.escape(_told(found))})"
    command = found.finished[0].command
    note = f"reward and KL: mean of the {AVERAGED}"
    return [
        f"<p>{line}</p>",
        f"<p>{page.copyable(command)}</p>" if command else "",
        f'<p class="muted">objective: {page.escape(_objective(jobs))}; {note}</p>',
    ]


def _told(setting: Setting) -> str:
    values = [("objective", "objective"), ("reward", "reward"), ("KL", "kl")]
    known = [(name, setting.mean(field)) for name, field in values]
    told = ", ".join(f"{name} {svg.short(value)}" for name, value in known if value is not None)
    count = len(setting.finished)
    return f"{told}; means of {count} seeds" if count > 1 else told


def _objective(jobs: Sequence[Run]) -> str:
    """Say what the objective of the jobs is."""
    used = [next((m for m in OBJECTIVES if run.series(m)), None) for run in jobs if run.metrics]
    return " or ".join(OBJECTIVES[metric] for metric in dict.fromkeys(used) if metric)


def results(sweep: Sweep) -> list[str]:
    """Return what a sweep came to for a terminal: a line per setting, the best, what is left."""
    made = grouped(sweep.rows)
    if len(made) > MOST:  # the best of them
        made = sorted(made, key=lambda s: -(s.mean("objective") or -math.inf))
    fields = ("reward", "kl", "objective")
    cells = [["setting", "reward", "KL", "objective", "state"]]
    for setting in made[:MOST]:
        values = [setting.mean(field) for field in fields]
        shown = ["-" if value is None else svg.short(value) for value in values]
        cells.append([one_line(setting.name, 48), *shown, setting.state])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    lines += [f"... {len(made) - MOST} more in sweep.html"] * (len(made) > MOST)
    found = best(sweep.rows)
    if found is not None and len(sweep.rows) > 1:
        lines.append(f"best     {found.name} ({_told(found)})")
        lines += [f"again    {found.finished[0].command}"] * bool(found.finished[0].command)
    lines = lines if sweep.rows else []
    if sweep.unfinished:
        left = f"{sweep.left} not begun; " if sweep.left else ""
        lines.append(f"{left}continue with: {sweep.command}")
    return lines


def _overlays(rows: Sequence[Row], jobs: Sequence[Run], groups: Sequence[str]) -> list[str]:
    """Draw the curves of all jobs over each other; the seeds of a setting share a hue."""
    names, own, drawn = labels(rows), settings(rows), []
    for metric in _OVERLAYS:
        series = [
            charts.Series(
                names[row.job],
                run.series(task_reward(run) if metric == "reward/raw_mean" else metric),
                hue=groups.index(own[row.job]),
                dots=metric.startswith("eval/"),
            )
            for row, run in zip(rows, jobs, strict=True)
            if run.metrics
        ]
        if any(s.points for s in series):
            panel = next(panel for panel in MAIN if metric in panel.metrics)
            which = f", {panel.metrics[metric]}" if len(panel.metrics) > 1 else ""
            unit = f"{panel.unit}{which}"
            chart = charts.line_chart(series, title=panel.title, unit=unit, named=False)
            drawn.append(page.figure(chart, panel.healthy, metric))
    return drawn


def _table(rows: Sequence[Row], jobs: Sequence[Run]) -> str:
    """Draw what differs between the jobs, and in a line below it what does not."""

    def cell(value: object) -> str:
        known = number(value)
        return "" if value is None else str(value) if known is None else svg.short(known)

    columns = {key: [row.overrides.get(key, "") for row in rows] for key in varying(rows)}
    same: dict[str, str] = {}
    for title, name in COLUMNS.items():
        cells = [cell(getattr(row, name)) for row in rows]
        if len(rows) > 1 and len(set(cells)) == 1:
            same |= {title: cells[0]} if cells[0] else {}
        elif not any(_alike(cells, shown) for shown in columns.values()):
            columns[title] = cells
    if not varying(rows):
        columns = {"job": [row.job for row in rows], **columns}
    shown = [
        [page.badge(c) if title == "state" else page.escape(c) for c in cells]
        for title, cells in columns.items()
    ]
    firsts = zip(jobs, rows, shown[0], strict=True)
    shown[0] = [_link(run, row, cell or "-") for run, row, cell in firsts]
    text = ", ".join(f"{title} {value}" for title, value in same.items())
    note = f'<p class="muted">the same in all jobs: {page.escape(text)}</p>' if same else ""
    return page.table([*columns], zip(*shown, strict=True), sortable=True) + note


def _alike(cells: Sequence[str], others: Sequence[str]) -> bool:
    """Return whether a column says what another one says too, wherever it says something.

    0.10 is 0.1, and 0.06431 was cut to 0.0643.
    """

    def same(one: str, other: str) -> bool:
        if not (one and other):
            return not one
        try:
            return math.isclose(float(one), float(other), rel_tol=5e-3)
        except ValueError:
            return one == other

    return all(map(same, cells, others))
