"""sweep.html: the jobs of a sweep as a picture, a table and curves over each other.

The picture is reward against KL, a point per setting, bars from the lowest to the highest seed. The
line joins the Pareto points, those that no other beats in both; a setting without a finished job is
on no line. The KL axis is a square-root scale, as in Gao et al. 2022 (Scaling Laws for Reward Model
Overoptimization, arXiv:2210.10760), where a distance is the root of a KL.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from urllib.parse import quote

from policies.cache import write_text
from trainer.reports import markup
from trainer.reports.chart import (
    Axis,
    Chart,
    Series,
    escape,
    line_chart,
    standalone,
    text_width,
)
from trainer.reports.formats import duration, short
from trainer.reports.panels import MAIN, figure
from trainer.reports.sweep_jobs import (
    REWARD,
    Job,
    Setting,
    Sweep,
    as_csv,
    best,
    grouped,
    load_sweep,
    task_reward,
    varying,
)
from trainer.runs.run_files import dig, number

AVERAGED = "last ten iterations, at most a quarter of all"
OBJECTIVES = {  # in the order in which a run takes them
    "eval/sampled_accuracy": "held-out accuracy, sampled",
    "eval/greedy_accuracy": "held-out accuracy, greedy",
    "reward/mean": "mean reward of the last iteration, a KL in it included",
    "loss/total": "minus the loss of the last iteration",
}
GOING = ("running", "starting")
PATIENCE = 300.0  # seconds; a page that is older may be called stale
Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels


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
    drawn = frontier(load_sweep(folder).jobs, width=480, height=340)
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
        again = markup.repeat_command(found.finished[0].run)
        used = dict.fromkeys(next(filter(job.run.series, OBJECTIVES), "none") for job in jobs)
        objective = " or ".join(OBJECTIVES[metric] for metric in used if metric in OBJECTIVES)
        note = f"objective: {objective}; reward and KL: mean of the {AVERAGED}"
        yield f"<p>Highest objective: <b>{escape(found.name)}</b> ({escape(found.numbers())})</p>"
        yield f"<p>{markup.command(again, copy=True)}</p>" if again else ""
        yield f'<p class="muted">{escape(note)}</p>'
    if jobs:
        drawn = frontier(jobs, width=420, height=320) if any(s.spots for s in made) else ""
        yield f'<div class="sides"><div>{drawn}</div><div>{_table(jobs)}</div></div>'
    begun = [setting for setting in made if any(job.run.metrics for job in setting.jobs)]
    drawn = list(_overlays(begun, varying(jobs)))
    yield markup.charts(drawn, title="Curves", names=[setting.name for setting in begun])
    again = f"Written from the files of the jobs; again: {markup.rewrite(sweep.folder)}"
    yield f'<footer class="muted">{again}</footer>'


def _progress(sweep: Sweep) -> Iterator[str]:
    """Say how many jobs are in which state, which one runs and how long the rest may take."""
    counts = Counter(sorted(job.state for job in sweep.jobs))
    states = [f"{count} {state}" for state, count in counts.items()]
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
        cells = [v if isinstance(v, str) else "" if v is None else short(v) for v in values]
        if len(jobs) > 1 and len(set(cells)) == 1:
            same += [f"{title} {cells[0]}"] * bool(cells[0])
        elif cells not in columns.values() and title.replace("/", ".") not in columns:
            columns[title] = cells  # but not kl/coeff beside kl.coeff
    first, *rest = columns
    drawn = [[_link(job, cell or "-") for job, cell in zip(jobs, columns[first], strict=True)]]
    for title in rest:
        draw = markup.badge if title == "state" else escape
        drawn.append([draw(cell) for cell in columns[title]])
    text = f"the same in all jobs: {', '.join(same)}"
    note = f'<p class="muted">{escape(text)}</p>' if same else ""
    return markup.table(columns, zip(*drawn, strict=True), sortable=True) + note


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
            chart = line_chart(series, title=panel.title, unit=panel.unit + which, named=False)
            yield figure(chart, panel.healthy, [panel.swept])


def frontier(jobs: Sequence[Job], *, width: int, height: int) -> str:
    """Draw reward against KL, one labelled point per setting."""
    placed = [setting for setting in grouped(jobs) if setting.spots]
    if not placed:
        raise ValueError("expected a job with reward/raw_mean and kl/ref_sequence, got none")
    line = pareto(placed)
    named = ", ".join(key for key in varying(jobs) if key != "seed")
    notes = [f"labels: {named}"] * bool(named)
    notes += ["bars: lowest to highest seed"] * any(len(s.spots) > 1 for s in placed)
    notes += ["hollow: beaten in both"] * any(s.finished and s not in line for s in placed)
    notes += ["dashed: unfinished"] * any(not s.finished for s in placed)
    title, unit = "Reward against KL to the reference", f"mean reward per reply: {AVERAGED}"
    chart = Chart(title, unit, width=width, height=height)
    chart.text(2, 45, "; ".join(notes))
    chart.top = 49
    kls, rewards = zip(*(spot for setting in placed for spot in setting.spots), strict=True)
    chart.axes(
        (0.0, max(*kls, 1e-3)),
        (min(rewards), max(rewards)),
        x_label="KL, nats per reply (square-root scale)",
        x_ticks=_root_ticks,
        warp=math.sqrt,
        inset=(12, 28),  # for the labels of the outermost points
    )
    if len(line) > 1:
        chart.path([setting.place for setting in line], "stroke:var(--hue0)")
    taken: list[Box] = []  # what no label may cover: points, bars, other labels
    for setting in placed:
        taken += _draw(chart, setting, filled=setting in line)
    for setting in placed:
        taken += _label(chart, setting, taken)
    return chart.svg()


def pareto(settings: Sequence[Setting]) -> list[Setting]:
    """Return the finished settings that no other beats in reward and KL, in order of KL."""
    front: list[Setting] = []
    done = [setting for setting in settings if setting.finished]
    for setting in sorted(done, key=lambda s: (s.place[0], -s.place[1])):
        if not front or setting.place[1] > front[-1].place[1]:
            front.append(setting)
    return front


def _draw(chart: Chart, setting: Setting, *, filled: bool) -> list[Box]:
    """Draw a point, filled if no other beats it, dashed if it is not finished; return its boxes."""
    kl, reward = setting.place
    x, y = chart.x(kl), chart.y(reward)
    boxes: list[Box] = [(x - 6, y - 6, x + 6, y + 6)]
    count = len(setting.spots)
    if count > 1:  # bars: how far the seeds lie apart, in both directions
        xs, ys = (
            sorted(chart.x(k) for k, _ in setting.spots),
            [chart.y(r) for _, r in setting.spots],
        )
        left, right, top, bottom = xs[0], xs[-1], min(ys), max(ys)
        across = f"M{left} {y}H{right}M{left} {y - 3:g}v6M{right} {y - 3:g}v6"
        along = f"M{x} {bottom}V{top}M{x - 3:g} {bottom}h6M{x - 3:g} {top}h6"
        chart.parts.append(f'<path class="bars" d="{across}{along}"/>')
        boxes += [(left - 1, y - 3, right + 1, y + 3), (x - 3, top - 1, x + 3, bottom + 1)]
    paint = "var(--hue0)" if filled else "var(--paper)"
    dashes = "" if setting.finished else ";stroke-dasharray:3 2"
    style = f"fill:{paint};stroke:var(--hue0);stroke-width:1.8{dashes}"
    tip = f"{setting.label}{_open(setting)}: reward {reward:.3f}, KL {kl:.3f}"
    chart.dot(kl, reward, style, radius=4.5, tip=tip + f", {count} seeds" * (count > 1))
    return boxes


def _open(setting: Setting) -> str:
    """Say which jobs of a setting are not finished."""
    return "" if len(setting.finished) == len(setting.jobs) else f" ({setting.state})"


def _label(chart: Chart, setting: Setting, taken: Sequence[Box]) -> list[Box]:
    """Name a point where that hides nothing and return the box; without room its tooltip tells."""
    text = setting.label + ("" if setting.finished else _open(setting))
    wide, (kl, reward) = text_width(text, size=12), setting.place
    for side in (10, -10 - wide, -wide / 2, 18, -18 - wide):  # right, left, centred, further off
        for drop in (15, -8, 4, 24, -17, 34, -24):
            x, y = chart.x(kl) + side, chart.y(reward) + drop
            a, b, c, d = x - 4, y - 11, x + wide + 4, y + 3
            inside = a > 0 and c < chart.width and chart.y.stop - 12 < b and d < chart.y.start + 10
            if inside and not any(a < g and e < c and b < h and f < d for e, f, g, h in taken):
                chart.text(x, y, text, style="value")
                return [(a, b, c, d)]
    return []


def _root_ticks(axis: Axis) -> list[float]:
    """Choose 0 and round values at least 44 pixels apart, from the right."""
    powers = range(math.floor(math.log10(axis.hi)), -5, -1)
    kept: list[float] = []
    for value in (m * 10.0**power for power in powers for m in (5, 2, 1)):
        end = axis(kept[-1]) if kept else math.inf
        if value <= axis.hi and min(axis(value) - axis.start, end - axis(value)) >= 44:
            kept.append(value)
    return [0.0, *kept]
