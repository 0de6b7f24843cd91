"""The limit beside what was reached: limit.json of a run or its sweep, drawn, and the efficiency.

The samples are those of mode=limit, the maths is in trainer/limit.py.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory

from trainer.limit import FILE, Curve, Limit, best_of, most_kl_of_best_of, read_limit
from trainer.metric_names import ACCURACY, HELD_KL, HELD_REWARD
from trainer.reports.chart import Box, Chart, escape, meet, text_width
from trainer.reports.known_limit import is_of
from trainer.reports.sweep_jobs import as_job, load_sweep, other_limits
from trainer.runs.folders import quoted
from trainer.runs.run_files import Run, is_sweep

HUE = "var(--hue3)"


@dataclass(frozen=True)
class Reached:
    """What an evaluation found: the mean of a metric, and the KL of the same replies, in nats."""

    iteration: float
    metric: str
    value: float
    kl: float

    def efficiency(self, limit: Limit) -> float | None:
        """Return the least KL for this value over the KL."""
        return limit.efficiency(self.metric, self.value, self.kl)


def held_out(run: Run, metric: str) -> list[Reached]:
    """Return the evaluations that measured both a metric and the KL."""
    spent = dict(run.series(HELD_KL))
    return [Reached(i, metric, v, spent[i]) for i, v in run.series(metric) if i in spent]


def efficiency(run: Run, limit: Limit) -> float | None:
    """Return the KL efficiency of the last evaluation."""
    found = held_out(run, limit.metric)
    return found[-1].efficiency(limit) if found else None


class Lines:
    """What a picture shows of a limit, as far as the points in it go: `most` nats."""

    def __init__(self, limit: Limit, metric: str, *, most: float) -> None:
        self.values, drawn = limit.of(metric), limit.bounds(metric).curve()
        inside = drawn.kl <= most
        self.curve = Curve(*(side[inside] for side in vars(drawn).values()))
        count = self.values.shape[1]
        powers = takewhile(lambda k: 2 * k <= count, (2**i for i in range(1, 20)))
        self.best = [
            (k, bound, best_of(self.values, k))
            for k in powers
            if (bound := most_kl_of_best_of(k)) <= most
        ]

    @property
    def range(self) -> list[float]:
        """Return what the axis of the values should hold."""
        return [*self.curve.value.tolist(), *(value for _, _, value in self.best)]

    def draw(self, chart: Chart, what: str, points: Sequence[tuple[float, float]]) -> list[Box]:
        """Draw the optimum with its band, and the best of k replies; return what that covers.

        A diamond says its k where that hides neither another nor one of the `points` (KL, value).
        """
        kl = self.curve.kl.tolist()
        sides = (self.curve.high.tolist(), self.curve.low.tolist()[::-1])
        outline = [*zip(kl, sides[0], strict=True), *zip(kl[::-1], sides[1], strict=True)]
        chart.path(outline, f"fill:{HUE};opacity:0.18;stroke:none", kind="area")
        chart.path(zip(kl, self.curve.value.tolist(), strict=True), f"stroke:{HUE}")
        spots = [(chart.x(kl), chart.y(value)) for kl, value in points]
        spots += (own := [(chart.x(bound), chart.y(value)) for _, bound, value in self.best])
        taken: list[Box] = [(x - 6, y - 6, x + 6, y + 6) for x, y in spots]
        for (k, bound, value), (x, y) in zip(self.best, own, strict=True):
            tip = (
                f"best of {k} replies of the reference: {what} {value:.3f}, KL at most {bound:.2f}"
            )
            shape = f'd="M{x} {y - 5:g}l5 5l-5 5l-5 -5z" style="fill:{HUE}"'
            chart.parts.append(f"<path {shape}><title>{escape(tip)}</title></path>")
            wide = text_width(str(k))
            for left, base in ((x + 8, y + 4), (x - wide / 2, y + 17), (x - 8 - wide, y + 4)):
                box = (left, base - 9, left + wide, base + 1)
                if box[2] < chart.width and not any(meet(box, other) for other in taken):
                    chart.text(left, base, str(k))
                    taken.append(box)
                    break
        return taken[len(points) :]


def picture(run: Run, limit: Limit, *, width: int = 360, height: int = 260) -> str:
    """Draw the way of a run, evaluation by evaluation, below what no policy can pass."""
    from trainer.reports.frontier import kl_axes  # here: a run without a limit needs none of it

    points = held_out(run, limit.metric)
    if not points:
        return ""
    what = _what(limit)
    kls, values = [max(point.kl, 0.0) for point in points], [point.value for point in points]
    lines = Lines(limit, limit.metric, most=max(*kls, 0.5))
    title = f"{what.capitalize()} against KL, held-out prompts"
    chart = Chart(title, "line: the best there is; diamonds: best of 2, 4 ... replies",
                  width=width, height=height)  # fmt: skip
    kl_axes(chart, max(*kls, 0.5), [*values, *lines.range])
    lines.draw(chart, what, [*zip(kls, values, strict=True)])
    chart.path(
        zip(kls, values, strict=True), "stroke:var(--hue0);stroke-width:1;stroke-dasharray:2 4"
    )
    for point in points:
        got = point.efficiency(limit)
        share = "" if got is None else f", efficiency {got:.2f}"
        tip = f"iteration {point.iteration:g}: {what} {point.value:.3f}, KL {point.kl:z.3f}{share}"
        chart.dot(max(point.kl, 0.0), point.value, "fill:var(--hue0)", radius=4, tip=tip)
    return chart.svg()


def caption(run: Run, limit: Limit) -> str:
    """Say how near the last evaluation is to the line, and what the line was drawn from."""
    return f"{_verdict(run, limit)}; 1 is on the line ({limit.about()}; {limit.ends()})"


def what_came_out(folder: Path) -> str:
    """Say how near a run, or each job of a sweep, came to its limit: a line each, and what of."""
    limit = read_limit(folder / FILE)
    if limit is None:
        raise ValueError(f"{folder / FILE} is damaged; remove it, and ask again")
    jobs = load_sweep(folder).jobs if is_sweep(folder) else [as_job(folder)]
    lines = [f"the limit: {limit.about()}"]
    for job in jobs:
        reached = "no evaluation with a KL to judge"
        if found := held_out(job.run, limit.metric):
            reached = f"{_what(limit)} {found[-1].value:z.3f}, {_verdict(job.run, limit)}"
        lines.append(f"{job.name}: {reached}")
    return "\n".join(lines)


def _what(limit: Limit) -> str:
    return "accuracy" if limit.metric == ACCURACY else "reward"


def _verdict(run: Run, limit: Limit) -> str:
    """Say what the efficiency of the last evaluation is, or why there is none."""
    last = held_out(run, limit.metric)[-1]
    got = last.efficiency(limit)
    if got is not None:
        return f"KL efficiency {got:.2f} at {last.kl:.2f} nats"
    if last.kl <= 1e-3:
        return "this run has not moved"
    return f"no efficiency, so far out no sample reaches (--limit {8 * limit.success.shape[1]})"


def check_evaluated(folder: Path) -> None:
    """Raise ValueError for a run, or a sweep, of which a limit would judge nothing."""
    jobs = load_sweep(folder).jobs if is_sweep(folder) else [as_job(folder)]
    if not any(job.run.series(metric) for job in jobs for metric in (ACCURACY, HELD_REWARD)):
        raise ValueError(f"{folder} was not evaluated, so a limit would say nothing of it")


def make(folder: Path, samples: int) -> None:
    """Sample the reference of a run, or of a sweep whose jobs share it, into its folder."""
    import subprocess

    run = folder
    if is_sweep(folder):
        jobs = load_sweep(folder).jobs
        if not jobs or other_limits(jobs):
            raise ValueError(
                "expected jobs that start from one model on one task, with one reference and one "
                "way to evaluate, got others; name one of them"
            )
        run = next((job.run.folder for job in jobs if job.run.metrics), jobs[0].run.folder)
    if samples < 2:
        raise ValueError(f"expected --limit of at least 2 replies, got {samples}")
    known = read_limit(folder / FILE) if (folder / FILE).is_file() else None
    if known is not None and known.success.shape[1] >= samples and is_of(known, run):
        return  # more replies are only nearer to the truth
    script = Path(__file__).parents[2] / "train.py"
    with TemporaryDirectory(dir=folder, prefix=".limit") as aside:  # a job may have its own
        words = ["mode=limit", f"resume={run.resolve()}", f"eval.num_samples={samples}"]
        command = [sys.executable, str(script), *words, f"output_dir={quoted(aside)}"]
        process = subprocess.Popen(command)
        try:
            code = process.wait()
        finally:
            process.terminate()  # where this one was stopped
            process.wait()
        if code:
            raise ValueError(f"{run} was not sampled: see above (exit code {code})")
        (Path(aside) / FILE).replace(folder / FILE)
