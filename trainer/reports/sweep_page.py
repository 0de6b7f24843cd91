"""What the jobs of a sweep reached, and at which KL: sweep.html, sweep.csv, a terminal's lines.

Read from the files of the jobs, finished or not. Reward and KL of a job are means over its last ten
iterations, at most a quarter of them; the reward is the task's alone, without a KL part. Jobs are
called after what differs between them; those that differ in the seed alone are one setting.

The picture is reward against KL, a point per setting, bars from the lowest to the highest seed. The
line joins the Pareto points, those that no other beats in both; a setting without a finished job is
on no line. The KL axis is a square-root scale, as in Gao et al. 2022 (Scaling Laws for Reward Model
Overoptimization, arXiv:2210.10760), where a distance is the root of a KL.
"""

import csv
import io
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

from policies.cache import write_text
from trainer.reports import markup
from trainer.reports.chart import Axis, Chart, Series, line_chart, standalone, text_width
from trainer.reports.formats import duration, one_line, short
from trainer.reports.markup import escape, repeat_command
from trainer.reports.panels import MAIN, figure
from trainer.reports.sweep import PLACE, PLAN
from trainer.runs.find import find_jobs
from trainer.runs.lock import is_free
from trainer.runs.redact import redact
from trainer.runs.run_files import PLACES, Run, dig, load_run, number, read_yaml

OBJECTIVE, REWARD, KL = "objective", "reward/raw_mean", "kl/ref_sequence"
COLUMNS = {"objective": OBJECTIVE, "reward": REWARD, "KL": KL}
MOST = 20  # settings that the terminal lists
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


@dataclass(frozen=True)
class Job:
    """A job, by the name of its folder; `reached`: its state and metrics, a column each."""

    name: str
    run: Run
    overrides: dict[str, str]
    reached: dict[str, Any]

    @property
    def state(self) -> str:
        return self.reached["state"]

    def called(self, keys: Sequence[str]) -> str:
        """Name the job by some of its overrides, else by its folder."""
        own = (f"{key}={self.overrides[key]}" for key in keys if key in self.overrides)
        return ", ".join(own) or self.name


@dataclass(frozen=True)
class Setting:
    """Jobs that differ in the seed alone; `label`: its name in the picture.

    What is told of it is of its finished jobs, if any is.
    """

    name: str
    label: str
    jobs: tuple[Job, ...]

    @property
    def finished(self) -> tuple[Job, ...]:
        return tuple(job for job in self.jobs if job.state == "finished")

    @property
    def state(self) -> str:
        """Say in which states its jobs are: "finished", or "2 finished, 1 failed"."""
        told = _counted(job.state for job in self.jobs)
        return told.removeprefix("1 ") if len(self.jobs) == 1 else told

    @property
    def spots(self) -> list[tuple[float, float]]:
        """List KL and reward of its jobs."""
        held = [(job.reached[KL], job.reached[REWARD]) for job in self.finished or self.jobs]
        return [(kl, reward) for kl, reward in held if kl is not None and reward is not None]

    @property
    def place(self) -> tuple[float, float]:
        """Return the mean KL and reward."""
        kls, rewards = zip(*self.spots, strict=True)
        return fmean(kls), fmean(rewards)

    def mean(self, name: str) -> float | None:
        """Average a column over the jobs that have it."""
        values = [job.reached[name] for job in self.finished or self.jobs]
        known = [value for value in values if value is not None]
        return fmean(known) if known else None

    def numbers(self) -> str:
        """Tell its objective, reward and KL."""
        means = {name: self.mean(key) for name, key in COLUMNS.items()}
        told = ", ".join(f"{name} {short(v)}" for name, v in means.items() if v is not None)
        count = len(self.finished)
        return f"{told}; means of {count} seeds" if count > 1 else told


@dataclass(frozen=True)
class Sweep:
    """The jobs of a multirun folder. `left`: jobs that have not begun; `live`: whether it goes on.

    `live` is None where nobody wrote it down, as of a search by a script of one's own. `command`
    continues the sweep.
    """

    folder: Path
    jobs: Sequence[Job]
    left: int = 0
    live: bool | None = None
    command: str = ""

    @property
    def unfinished(self) -> bool:
        """Whether the sweep does not go on though jobs are not finished."""
        ended = all(job.state == "finished" for job in self.jobs)
        return self.live is False and not (ended and not self.left)


def load_sweep(folder: str | Path) -> Sweep:
    """Read a multirun folder, whatever state it is in."""
    folder = Path(folder)
    plan = read_yaml(folder / PLAN)  # JSON is YAML
    live = not plan.get("ended") and not is_free(folder) if plan else None
    jobs = [_read_job(folder, load_run(job)) for job in find_jobs(folder)]
    for job in jobs if live else ():  # one at a time: one without a status is the one that begins
        job.reached["state"] = job.state.replace("not started", "starting")
    planned, words = (_texts(plan.get(key)) for key in ("jobs", "words"))
    place = str(folder.resolve())
    if not re.fullmatch(r"[\w./+-]+", place, re.ASCII):  # quoted for Hydra's grammar
        place = "'" + place.replace("'", "\\'") + "'"
    again = shlex.join(["python", "train.py", "-m", *words, f"{PLACE}{place}"]) if plan else ""
    left = sum(not (folder / name).is_dir() for name in planned)
    return Sweep(folder, jobs, left, live, again)


def varying(jobs: Sequence[Job]) -> list[str]:
    """List the keys in which the jobs differ, as far as they have them: one may not have begun."""
    values: dict[str, set[str]] = {}
    for job in jobs:
        for key, value in job.overrides.items():
            values.setdefault(key, set()).add(value)
    return [key for key, found in values.items() if len(found) > 1]


def grouped(jobs: Sequence[Job]) -> list[Setting]:
    """Put the jobs of a setting together."""
    differ = varying(jobs)
    keys = [key for key in differ if key != "seed"]
    held: dict[str, list[Job]] = {}
    for job in jobs:
        name = "all seeds" if differ == ["seed"] else job.called(keys)
        held.setdefault(name, []).append(job)
    values = {name: [own[0].overrides.get(key, "-") for key in keys] for name, own in held.items()}
    return [Setting(n, ", ".join(values[n]) or n, tuple(own)) for n, own in held.items()]


def best(jobs: Sequence[Job]) -> Setting | None:
    """Return the setting whose finished jobs have the highest mean objective; of one job, None.

    At equal ones that with the lower KL. Not that of the best job: with many seeds it is the
    luckiest.
    """
    ended = [s for s in grouped(jobs) if s.finished and s.mean(OBJECTIVE) is not None]

    def worth(setting: Setting) -> tuple[float, float]:
        return setting.mean(OBJECTIVE) or 0.0, -(setting.mean(KL) or 0.0)

    return max(ended, key=worth, default=None) if len(jobs) > 1 else None


def results(sweep: Sweep) -> list[str]:
    """Return what a sweep came to for a terminal: a line per setting, the best, what is left."""
    made, lines = grouped(sweep.jobs), []
    if len(made) > MOST:  # the best of them
        made = sorted(made, key=lambda s: -(s.mean(OBJECTIVE) or -math.inf))
    cells = [["setting", "reward", "KL", "objective", "state"]]
    for setting in made[:MOST]:
        values = [setting.mean(COLUMNS[name]) for name in cells[0][1:-1]]
        numbers = ["-" if value is None else short(value) for value in values]
        cells.append([one_line(setting.name, 48), *numbers, setting.state])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if made:
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    lines += [f"... {len(made) - MOST} more in sweep.html"] * (len(made) > MOST)
    if found := best(sweep.jobs):
        again = repeat_command(found.finished[0].run)
        lines.append(f"best     {found.name} ({found.numbers()})")
        lines += [f"again    {again}"] * bool(again)
    if sweep.unfinished:
        left = f"{sweep.left} not begun; " if sweep.left else ""
        lines.append(f"{left}continue with: {sweep.command}")
    return lines


def as_csv(jobs: Sequence[Job]) -> str:
    """Return a line per job: its overrides and what it reached."""
    text = io.StringIO()
    keys = dict.fromkeys(key for job in jobs for key in job.overrides)
    columns = ["job", *keys, *dict.fromkeys(name for job in jobs for name in job.reached)]
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({"job": job.name, **job.overrides, **job.reached} for job in jobs)
    return text.getvalue()


def task_reward(run: Run) -> str:
    """Name the metric of the task's reward: that without a KL part, where a run has it."""
    return "reward/raw_mean" if run.series("reward/raw_mean") else "reward/mean"


def _counted(states: Iterable[str]) -> str:
    return ", ".join(f"{count} {state}" for state, count in Counter(states).items())


def _texts(found: object) -> list[str]:
    """Return the texts of a list, of a damaged file none."""
    return [item for item in found if isinstance(item, str)] if isinstance(found, list) else []


def _read_job(folder: Path, run: Run) -> Job:
    name = run.folder.relative_to(folder).as_posix()
    overrides = {k: v for k, v in run.overrides.items() if k not in PLACES}
    if not overrides:  # `a=1,b=2`, the name that `job_name` gives a folder
        parts = re.split(r",(?=[\w.+~/@]+=)", name)
        overrides = dict(part.split("=", 1) for part in parts if "=" in part)
    coeff, ends = run.last("kl/coeff"), run.last_ten(KL) or run.last_ten("reward/mean")
    reached = {
        "state": run.state,
        OBJECTIVE: number(run.status.get("objective")),
        "eval/sampled_accuracy": run.last("eval/sampled_accuracy"),
        REWARD: run.last_ten_mean(task_reward(run)),
        KL: run.last_ten_mean(KL),
        "kl/coeff": number(dig(run.config, "kl", "coeff")) if coeff is None else coeff,
        "progress/iteration": int(run.metrics[-1]["progress/iteration"]) if run.metrics else 0,
        "iterations_averaged": len(ends),
    }
    return Job(name, run, redact(overrides), reached)


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
        again = repeat_command(found.finished[0].run)
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
    states = [_counted(sorted(job.state for job in sweep.jobs))] * bool(sweep.jobs)
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
        xs, ys = [chart.x(k) for k, _ in setting.spots], [chart.y(r) for _, r in setting.spots]
        left, right, top, bottom = min(xs), max(xs), min(ys), max(ys)
        across = f"M{left} {y}H{right}M{left} {y - 3:g}v6M{right} {y - 3:g}v6"
        along = f"M{x} {bottom}V{top}M{x - 3:g} {bottom}h6M{x - 3:g} {top}h6"
        chart.parts.append(f'<path class="bars" d="{across}{along}"/>')
        boxes += [(left - 1, y - 3, right + 1, y + 3), (x - 3, top - 1, x + 3, bottom + 1)]
    paint = "var(--hue0)" if filled else "var(--paper)"
    dashes = "" if setting.finished else ";stroke-dasharray:3 2"
    style = f"fill:{paint};stroke:var(--hue0);stroke-width:1.8{dashes}"
    several, open_ = f", {count} seeds" * (count > 1), len(setting.finished) < len(setting.jobs)
    name = f"{setting.label} ({setting.state})" if open_ else setting.label
    tip = f"{name}: reward {reward:.3f}, KL {kl:.3f}{several}"
    chart.dot(kl, reward, style, radius=4.5, tip=tip)
    return boxes


def _label(chart: Chart, setting: Setting, taken: Sequence[Box]) -> list[Box]:
    """Name a point where that hides nothing and return the box; without room its tooltip tells."""
    text = setting.label if setting.finished else f"{setting.label} ({setting.state})"
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
