"""The pages of a sweep, written again and again while it goes on: sweep.html and sweep.csv.

What is told of the jobs is in sweep_jobs.py, the picture in frontier.py, what they reply in
sweep_replies.py.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING
from urllib.parse import quote

from policies.cache import write_text
from trainer.reports import markup
from trainer.reports.chart import Series, line_chart, standalone
from trainer.reports.formats import duration, nats, short
from trainer.reports.frontier import AVERAGED, frontier
from trainer.reports.markup import escape, repeat_command
from trainer.reports.panels import MAIN, figure, open_notes
from trainer.reports.sweep_jobs import (
    ACCURACY,
    DRIFT,
    EFFICIENCY,
    HELD_KL,
    HELD_REWARD,
    KL,
    REWARD,
    Job,
    Setting,
    Sweep,
    as_csv,
    best,
    counted,
    grouped,
    limit_of,
    load_sweep,
    other_starts,
    task_reward,
    tied,
    varying,
)
from trainer.reports.sweep_replies import side_by_side
from trainer.runs.run_files import dig, number

if TYPE_CHECKING:
    from trainer.limit import Limit

OBJECTIVES = {  # in the order in which a run takes them
    "eval/sampled_accuracy": "held-out accuracy, sampled",
    "eval/greedy_accuracy": "held-out accuracy, greedy",
    "reward/mean": "mean reward of the last iteration, a KL in it included",
    "loss/total": "minus the loss of the last iteration",
}
TITLES = {  # of what the jobs reached; sweep.csv has the names of the metrics
    ACCURACY: "accuracy",
    REWARD: "reward",
    KL: "KL",
    DRIFT: "KL to the sampler",
    HELD_REWARD: "held-out reward",
    HELD_KL: "held-out KL",
    EFFICIENCY: "KL efficiency",
    "kl/coeff": "KL coefficient",
    "progress/iteration": "iteration",
    "iterations_averaged": "iterations averaged",
}
GOING = ("running", "starting")
MOVES = 1e-4  # nats per token to the sampler; with one step on a batch it is rounding
PATIENCE = 300.0  # seconds; a page that is older may be called stale


def write_sweep(folder: str | Path) -> Path:
    """Write sweep.csv and sweep.html into a multirun folder; return the path of the page."""
    sweep = load_sweep(folder)
    write_text(sweep.folder / "sweep.csv", as_csv(sweep.jobs))
    path = sweep.folder / "sweep.html"
    patience = PATIENCE if sweep.live else None
    write_text(path, markup.page("sweep", _body(sweep), patience=patience))
    return path


def sweep_svg(folder: str | Path) -> str:
    """Draw the frontier of a multirun folder as a standalone SVG document."""
    sweep = load_sweep(folder)
    limit = limit_of(sweep)
    by = limit.metric if limit else REWARD
    drawn = frontier(sweep.jobs, width=480, height=340, by=by, limit=limit)
    return standalone([drawn], width=480, height=340)


def _body(sweep: Sweep) -> Iterator[str]:
    """Yield the parts of the page (HTML)."""
    jobs, made = sweep.jobs, grouped(sweep.jobs)
    name = jobs[0].run.experiment if jobs else sweep.folder.name
    over = all(job.state in ("finished", "failed") for job in jobs) and not sweep.left
    state = "running" if sweep.live else "finished" if over else "stopped"
    known = "" if sweep.live is None else markup.badge(state)
    yield f"<h1>{escape(f'Sweep of {name}')}{known}</h1>"
    yield from _progress(sweep)
    if sweep.live:
        yield markup.stale(sweep.folder)
    if sweep.unfinished:
        yield f"<p>Continue it: {markup.command(sweep.command, copy=True)}</p>"
    if found := best(jobs):
        again = repeat_command(found.finished[0].run)
        used = dict.fromkeys(next(filter(job.run.series, OBJECTIVES), "none") for job in jobs)
        objective = " or ".join(OBJECTIVES[metric] for metric in used if metric in OBJECTIVES)
        note = f"objective: {objective}; reward and KL: mean of the {AVERAGED}"
        same = f"; {told}" if (told := tied(jobs, found)) else ""
        said = f"<b>{escape(found.name)}</b> ({escape(found.numbers())}){escape(same)}"
        yield f"<p>Highest objective: {said}</p>"
        yield f"<p>{markup.command(again, copy=True)}</p>" if again else ""
        yield f'<p class="muted">{escape(note)}</p>'
    if jobs:
        drawn = _pictures(made, jobs, limit_of(sweep))
        yield f'<div class="sides"><div>{drawn}</div><div>{_table(jobs)}</div></div>'
        yield from _warnings(jobs)
    begun = [setting for setting in made if any(job.run.metrics for job in setting.jobs)]
    drawn = list(_overlays(begun, varying(jobs)))
    yield markup.charts(drawn, title="Curves", names=[setting.name for setting in begun])
    yield from side_by_side(made, same_start=not other_starts(jobs))
    again = f"Written from the files of the jobs; again: {markup.rewrite(sweep.folder)}"
    yield f'<footer class="muted">{again}</footer>'


def _pictures(made: Sequence[Setting], jobs: Sequence[Job], limit: "Limit | None") -> str:
    """Draw reward, and what is held out, against KL; a click changes between them."""
    by = {"reward": REWARD, "accuracy": ACCURACY, "held-out reward": HELD_REWARD}
    if limit:  # what it is of goes first
        by = {"accuracy": ACCURACY, "held-out reward": HELD_REWARD, "reward": REWARD}
    drawn = {
        name: frontier(jobs, width=420, height=320, by=metric, limit=limit)
        for name, metric in by.items()
        if any(setting.spots(metric) for setting in made)
    }
    metric = ACCURACY if "accuracy" in drawn else REWARD
    moved = (job for job in jobs if (job.reached.get(DRIFT) or 0.0) > MOVES)
    if any(job.reached.get(metric) is not None for job in moved):
        at = frontier(jobs, width=420, height=320, by=metric, sampler=True)
        drawn["KL to the sampler"] = at
    about = f"The limit: {limit.about()}; {limit.ends()}" if limit else ""
    return markup.tabs(drawn) + (f'<p class="muted">{escape(about)}</p>' if about else "")


def _progress(sweep: Sweep) -> Iterator[str]:
    """Say how many jobs are in which state, which one runs and how long the rest may take."""
    states = [counted(sorted(job.state for job in sweep.jobs))] * bool(sweep.jobs)
    states += [f"{sweep.left} {'to come' if sweep.live else 'not begun'}"] * bool(sweep.left)
    total = len(sweep.jobs) + sweep.left
    line = f"{total} job{'s' * (total != 1)}: {', '.join(states)}"
    took = [(job.state, number(job.run.status.get("seconds")) or 0.0) for job in sweep.jobs]
    done = [seconds for state, seconds in took if state == "finished"]
    if sweep.live and done:
        each = fmean(done)
        going = sum(max(each - seconds, 0.0) for state, seconds in took if state in GOING)
        line += f"; about {duration(each * sweep.left + going)} left"
    yield f'<p class="muted">{line}</p>'
    for job in (job for job in sweep.jobs if job.state in GOING):
        of = number(dig(job.run.config, "trainer", "num_iterations"))
        here = f", iteration {job.reached['progress/iteration']} of {of:g}" if of else ""
        link = _link(job, job.called(varying(sweep.jobs)))
        yield f"<p>{job.state.capitalize()}: {link}{here if job.run.metrics else ''}</p>"


def _link(job: Job, text: str) -> str:
    """Link the page of a job, if it has one yet."""
    if not (job.run.folder / "report.html").is_file():
        return escape(text)
    return f'<a href="{escape(quote(job.name))}/report.html">{escape(text)}</a>'


def _table(jobs: Sequence[Job]) -> str:
    """Draw what differs between the jobs, and in a line below it what does not."""
    columns = {key: [job.overrides.get(key, "") for job in jobs] for key in varying(jobs)}
    columns, same = columns or {"job": [job.name for job in jobs]}, []
    for title in jobs[0].reached:
        values = [job.reached[title] for job in jobs]
        told = nats if title in (KL, HELD_KL, DRIFT) else short
        cells = [v if isinstance(v, str) else "" if v is None else told(v) for v in values]
        if len(set(cells)) == 1 and (len(jobs) > 1 or not cells[0]):
            same += [f"{TITLES.get(title, title)} {cells[0]}"] * bool(cells[0])
        elif cells not in columns.values() and title.replace("/", ".") not in columns:
            columns[title] = cells  # but not kl/coeff beside kl.coeff
    first, *rest = columns
    drawn = [[_link(job, cell or "-") for job, cell in zip(jobs, columns[first], strict=True)]]
    for title in rest:
        draw = markup.badge if title == "state" else escape
        drawn.append([draw(cell) for cell in columns[title]])
    text = f"the same in all jobs: {', '.join(same)}"
    note = f'<p class="muted">{escape(text)}</p>' if same else ""
    titles = [TITLES.get(title, title) for title in columns]
    return markup.table(titles, zip(*drawn, strict=True), sortable=True) + note


def _warnings(jobs: Sequence[Job]) -> Iterator[str]:
    """Say what the jobs warn of and have not taken back, each warning once, with those it is of."""
    found: dict[tuple[str, str], list[Job]] = {}
    for job in jobs:
        for note in open_notes(job.run):
            found.setdefault((str(note.get("level")), str(note.get("title"))), []).append(job)
    keys = varying(jobs)
    for (level, title), those in sorted(found.items(), key=lambda item: item[0][0]):
        links = "; ".join(_link(job, job.called(keys)) for job in those)
        yield f'<p class="note {escape(level)}"><b>{escape(title)}</b><br>{links}</p>'


def _overlays(begun: Sequence[Setting], keys: Sequence[str]) -> Iterator[str]:
    """Draw the curves of all jobs over each other; the seeds of a setting share a hue."""
    for panel in (panel for panel in MAIN if panel.swept):
        series = []
        for hue, job in ((hue, job) for hue, setting in enumerate(begun) for job in setting.jobs):
            task = panel.swept == REWARD
            points = job.run.series(task_reward(job.run) if task else panel.swept)
            dots = panel.swept.startswith("eval/")
            series += [Series(job.called(keys), points, hue, dots)] * bool(points)
        if series:
            which = f", {panel.metrics[panel.swept]}" if len(panel.metrics) > 1 else ""
            how = {"title": panel.title, "unit": panel.unit + which, "named": False}
            chart = line_chart(series, least=panel.least, **how)
            yield figure(chart, f"healthy: {panel.healthy}" if panel.healthy else "", [panel.swept])
