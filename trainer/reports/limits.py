"""The limit beside what was reached: limit.json of a run or its sweep, drawn, and the efficiency.

The samples are those of mode=limit, the maths is in trainer/limit.py.
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from trainer.limit import FILE, Curve, Limit, best_of, curve, most_kl_of_best_of, read_limit
from trainer.metric_names import ACCURACY, HELD_KL, HELD_REWARD
from trainer.reports.chart import Box, Chart, escape, meet, text_width
from trainer.reports.sweep_jobs import as_job, load_sweep, other_starts
from trainer.runs.run_files import Run, is_sweep

HUE = "var(--hue3)"


def held_out(run: Run) -> Iterator[tuple[float, str, float, float]]:
    """Yield iteration, metric, value and KL of the evaluations that measured both.

    The metric is the accuracy where the task has one, else the reward.
    """
    metric = ACCURACY if any(v for _, v in run.series(ACCURACY)) else HELD_REWARD
    spent = dict(run.series(HELD_KL))
    for iteration, value in run.series(metric):
        if iteration in spent:
            yield iteration, metric, value, spent[iteration]


def efficiency(run: Run, limit: Limit) -> float | None:
    """Return the KL efficiency of the last evaluation."""
    found = list(held_out(run))
    return limit.efficiency(*found[-1][1:]) if found else None


class Lines:
    """What a picture shows of a limit, as far as the points in it go: `most` nats."""

    def __init__(self, limit: Limit, metric: str, *, most: float) -> None:
        self.values, drawn = limit.of(metric), curve(limit.of(metric))
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

    points = list(held_out(run))
    if not points:
        return ""
    metric = points[0][1]
    what = "accuracy" if metric == ACCURACY else "reward"
    kls, values = [max(kl, 0.0) for *_, kl in points], [value for _, _, value, _ in points]
    lines = Lines(limit, metric, most=max(*kls, 0.5))
    title = f"{what.capitalize()} against KL, held-out prompts"
    chart = Chart(title, "line: the best there is; diamonds: best of 2, 4 ... replies",
                  width=width, height=height)  # fmt: skip
    kl_axes(chart, max(*kls, 0.5), [*values, *lines.range])
    lines.draw(chart, what, [*zip(kls, values, strict=True)])
    chart.path(
        zip(kls, values, strict=True), "stroke:var(--hue0);stroke-width:1;stroke-dasharray:2 4"
    )
    for iteration, _, value, kl in points:
        got = limit.efficiency(metric, value, kl)
        share = "" if got is None else f", efficiency {got:.2f}"
        tip = f"iteration {iteration:g}: {what} {value:.3f}, KL {kl:z.3f}{share}"
        chart.dot(max(kl, 0.0), value, "fill:var(--hue0)", radius=4, tip=tip)
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
        found = list(held_out(job.run))
        reached = "no evaluation with a KL to judge"
        if found:
            _, metric, value, _ = found[-1]
            what = "accuracy" if metric == ACCURACY else "reward"
            reached = f"{what} {value:z.3f}, {_verdict(job.run, limit)}"
        lines.append(f"{job.name}: {reached}")
    return "\n".join(lines)


def _verdict(run: Run, limit: Limit) -> str:
    """Say what the efficiency of the last evaluation is, or why there is none."""
    found = list(held_out(run))[-1]
    got, kl = limit.efficiency(*found[1:]), found[-1]
    if got is not None:
        return f"KL efficiency {got:.2f} at {kl:.2f} nats"
    if kl <= 1e-3:
        return "this run has not moved"
    return f"no efficiency, so far out no sample reaches (--limit {8 * limit.success.shape[1]})"


def make(folder: Path, samples: int) -> None:
    """Sample the reference of a run, or of a sweep whose jobs share it, into its folder."""
    import subprocess

    run = folder
    if is_sweep(folder):
        jobs = load_sweep(folder).jobs
        if not jobs or other_starts(jobs):
            raise ValueError(
                "expected jobs that start from one model on one task, got others; name one of them"
            )
        run = next((job.run.folder for job in jobs if job.run.metrics), jobs[0].run.folder)
    script = Path(__file__).parents[2] / "train.py"
    words = ["mode=limit", f"resume={run.resolve()}", f"eval.num_samples={samples}"]
    if samples < 2:
        raise ValueError(f"expected --limit of at least 2 replies, got {samples}")
    if code := subprocess.run([sys.executable, str(script), *words]).returncode:
        raise ValueError(f"{run} was not sampled: see above (exit code {code})")
    if run != folder:  # of a sweep, for all of its jobs
        (run / FILE).replace(folder / FILE)
