"""Draw reward (or accuracy) against KL, for sweeps and runs, with the optimal frontier.

A sweep has a point per setting. Bars span the seeds. The line joins the Pareto points of finished
settings. A cross is the model before training. The KL axis has a square-root scale, as in Gao et
al. 2022 (Scaling Laws for Reward Model Overoptimization, arXiv:2210.10760), where a distance is the
root of a KL. The optimal frontier (trainer/kl/frontier.py) needs the samples of mode=frontier.
"""

import math
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from html import escape
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from trainer.kl import FRONTIER_FILE
from trainer.kl.frontier import (
    ACCURACY,
    EVAL_REWARD,
    MIN_KL,
    Curve,
    Frontier,
    best_of,
    most_kl_of_best_of,
    read_frontier,
)
from trainer.pages.chart import Axis, Box, Chart, text_width
from trainer.pages.summary import hydra_path
from trainer.pages.sweep_jobs import (
    REWARD,
    Job,
    Setting,
    comparable,
    efficiency,
    grouped,
    has_same_rows,
    held_out,
    load_jobs,
    start,
    varying,
)
from trainer.runs.folders import SCRIPT
from trainer.runs.run_files import Run

AVERAGED = "last ten iterations, at most a quarter of all"
TITLES = {
    REWARD: ("Reward against KL to the reference", f"mean per response: {AVERAGED}"),
    ACCURACY: ("Accuracy against KL to the reference", "share of held-out responses, sampled"),
    EVAL_REWARD: ("Held-out reward against KL to the reference", "mean per held-out response"),
}
LABELS = {REWARD: "reward", ACCURACY: "accuracy", EVAL_REWARD: "held-out reward"}
HUE = "var(--hue3)"  # colour of the optimal frontier


def draw_sweep(
    jobs: Sequence[Job],
    *,
    width: int,
    height: int,
    by: str = REWARD,
    frontier: Frontier | None = None,
) -> str:
    """Draw reward (or `by` a held-out metric) against KL, one labelled point per setting.

    A held-out metric is drawn with its `frontier`, if known.
    """
    frontier = None if by == REWARD else frontier
    placed = [setting for setting in grouped(jobs) if setting.spots(by)]
    if not placed:
        raise ValueError(f"expected a job with {by} and kl/ref_sequence, got none")
    line, begin = pareto(placed, by), start(jobs, by)
    named = ", ".join(key for key in varying(jobs) if key != "seed")
    notes = {
        f"labels: {named}": named,
        "bars: lowest to highest seed": any(len(s.spots(by)) > 1 for s in placed),
        "hollow: beaten in both": any(s.finished and s not in line for s in placed),
        "dashed: unfinished": any(not s.finished for s in placed),
        "cross: before training": begin,
        "upper line: the best there is; diamonds: best of 2, 4 ... responses": frontier,
    }
    chart = Chart(*TITLES[by], width=width, height=height)
    for text in textwrap.wrap("; ".join(n for n, holds in notes.items() if holds), width // 6):
        chart.top += 15
        chart.text(2, chart.top - 4, text)
    spots = [spot for setting in placed for spot in setting.spots(by)]
    kls, values = zip(*spots, *([begin] if begin else []), strict=True)
    lines = FrontierLines(frontier, by, most=max(kls)) if frontier else None
    kl_axes(chart, max(kls), [*values, *(lines.range if lines else [])])
    if lines:
        lines.draw(chart, LABELS[by])
    if len(line) > 1:
        chart.path([setting.place(by) for setting in line], "stroke:var(--hue0)")
    if begin:
        _cross(chart, *begin)
    for setting in placed:
        _point(chart, setting, by, filled=setting in line)
    marks = [(kl, value) for _, kl, value in lines.best] if lines else []
    _labels(chart, placed, by, marks=[*marks, *([begin] if begin else [])])
    return chart.svg()


def draw_run(run: Run, frontier: Frontier) -> str:
    """Draw the path of a run's evaluations below the optimal frontier."""
    points = held_out(run, frontier.metric)
    if not points:
        return ""
    label = "accuracy" if frontier.metric == ACCURACY else "reward"
    iterations, values, spent = zip(*points, strict=True)
    kls = [max(kl, 0.0) for kl in spent]
    lines = FrontierLines(frontier, frontier.metric, most=max(*kls, 0.5))
    unit = "line: the best there is; diamonds: best of 2, 4 ... responses"
    title = f"{label.capitalize()} against KL, held-out prompts"
    chart = Chart(title, unit, height=260)
    kl_axes(chart, max(*kls, 0.5), [*values, *lines.range])
    lines.draw(chart, label)
    dashed = "stroke:var(--hue0);stroke-width:1;stroke-dasharray:2 4"
    chart.path(zip(kls, values, strict=True), dashed)
    for iteration, value, kl in zip(iterations, values, kls, strict=True):
        got = frontier.efficiency(frontier.metric, value, kl)
        efficiency = "" if got is None else f", efficiency {got:.2f}"
        tip = f"iteration {iteration:g}: {label} {value:.3f}, KL {kl:.3f}{efficiency}"
        chart.dot(kl, value, "fill:var(--hue0)", radius=4, tip=tip)
    return chart.svg()


def kl_axes(chart: Chart, most: float, values: Sequence[float]) -> None:
    """Draw the axes of `values` against the KL, from 0 to `most` nats."""
    chart.axes(
        (0.0, max(most, 1e-3)),
        (min(values), max(values)),
        x_label="KL, nats per response (square-root scale)",
        x_ticks=_root_ticks,
        warp=math.sqrt,
        inset=(12, 28),  # leaves room for the labels of the outermost points
    )


def pareto(settings: Sequence[Setting], by: str = REWARD) -> list[Setting]:
    """Return the finished settings that no other setting dominates, in order of KL."""
    front: list[Setting] = []
    done = [setting for setting in settings if setting.finished]
    for setting in sorted(done, key=lambda s: (s.place(by)[0], -s.place(by)[1])):
        if not front or setting.place(by)[1] > front[-1].place(by)[1]:
            front.append(setting)
    return front


class FrontierLines:
    """The curves of a frontier in a picture, up to a KL of `most` nats."""

    def __init__(self, frontier: Frontier, metric: str, *, most: float) -> None:
        values, bounds = frontier.of(metric), frontier.band(metric).curve()
        self.curve = Curve(*(side[bounds.kl <= most] for side in vars(bounds).values()))
        powers = (2**i for i in range(1, values.shape[1].bit_length()) if 2**i <= values.shape[1])
        best_kls = ((k, most_kl_of_best_of(k)) for k in powers)
        self.best = [(k, kl, best_of(values, k)) for k, kl in best_kls if kl <= most]

    @property
    def range(self) -> list[float]:
        """Return the values that the y axis should include."""
        return [*self.curve.value.tolist(), *(value for _, _, value in self.best)]

    def draw(self, chart: Chart, label: str) -> None:
        """Draw the optimum with its band, and best-of-k."""
        kl = self.curve.kl.tolist()
        high, low = self.curve.high.tolist(), self.curve.low.tolist()[::-1]
        outline = [*zip(kl, high, strict=True), *zip(kl[::-1], low, strict=True)]
        chart.path(outline, f"fill:{HUE};opacity:0.18;stroke:none", kind="area")
        chart.path(zip(kl, self.curve.value.tolist(), strict=True), f"stroke:{HUE}")
        for k, bound, value in self.best:
            of = f"best of {k} responses of the reference"
            tip = f"{of}: {label} {value:.3f}, KL at most {bound:.2f}"
            shape = f'd="M{chart.x(bound)} {chart.y(value) - 5:g}l5 5l-5 5l-5 -5z"'
            element = f'<path {shape} style="fill:{HUE}"><title>{escape(tip)}</title></path>'
            chart.parts.append(element)


def _cross(chart: Chart, kl: float, value: float) -> None:
    """Draw the model before training."""
    x, y = chart.x(kl), chart.y(value)
    tip = f"<title>before training: {value:z.3f}, KL {kl:z.3f}</title>"
    shape = f'd="M{x - 5:g} {y - 5:g}l10 10m0 -10l-10 10"'
    chart.parts.append(f'<path class="bars" style="stroke-width:2" {shape}>{tip}</path>')


def _point(chart: Chart, setting: Setting, by: str, *, filled: bool) -> None:
    """Draw a point, `filled` if on the Pareto line, dashed if unfinished."""
    (kl, value), spots, several = setting.place(by), setting.spots(by), ""
    x, y = _pixel(chart, (kl, value))
    if len(spots) > 1:  # bars show the range over the seeds in both directions
        xs, ys = zip(*(_pixel(chart, spot) for spot in spots), strict=True)
        left, right, top, bottom = min(xs), max(xs), min(ys), max(ys)
        across = f"M{left} {y}H{right}M{left} {y - 3:g}v6M{right} {y - 3:g}v6"
        along = f"M{x} {bottom}V{top}M{x - 3:g} {bottom}h6M{x - 3:g} {top}h6"
        chart.parts.append(f'<path class="bars" d="{across}{along}"/>')
        several = f", {len(spots)} seeds"
    paint = "var(--hue0)" if filled else "var(--paper)"
    dashes = "" if setting.finished else ";stroke-dasharray:3 2"
    style = f"fill:{paint};stroke:var(--hue0);stroke-width:1.8{dashes}"
    done = len(setting.finished) == len(setting.jobs)
    name = setting.label if done else f"{setting.label} ({setting.state})"
    tip = f"{name}: {LABELS[by]} {value:z.3f}, KL {kl:z.3f}{several}"
    chart.dot(kl, value, style, radius=4.5, tip=tip)


def _labels(
    chart: Chart, settings: Sequence[Setting], by: str, *, marks: Sequence[tuple[float, float]]
) -> None:
    """Label the points where there is room; the others have only tooltips.

    Points at one pixel share a label.
    """
    texts: dict[tuple[float, float], list[str]] = {}  # pixel -> labels
    points = [_pixel(chart, spot) for spot in (*marks, *(s.place(by) for s in settings))]
    taken: list[Box] = [(x - 6, y - 6, x + 6, y + 6) for x, y in points]
    for setting in settings:
        x, y = _pixel(chart, setting.place(by))
        xs, ys = zip(*(_pixel(chart, spot) for spot in setting.spots(by)), strict=True)
        taken += [
            (min(xs) - 1, y - 3, max(xs) + 1, y + 3),
            (x - 3, min(ys) - 1, x + 3, max(ys) + 1),
        ]
        spot = next((spot for spot in texts if math.dist(spot, (x, y)) < 3), (x, y))
        state = "" if setting.finished else f" ({setting.state})"
        texts.setdefault(spot, []).append(setting.label + state)
    for (x, y), names in texts.items():
        text = ", ".join(names)
        wide = text_width(text, size=12)
        lefts = (x + 10, x - 10 - wide, x - wide / 2)  # right, left, centred
        for left, base in product(lefts, (y + 15, y - 8, y + 4, y + 26, y - 19)):
            box = (left - 4, base - 11, left + wide + 4, base + 3)
            inside = box[0] > 0 and box[2] < chart.width and chart.y.stop < base < chart.y.start + 7
            if inside and not any(_meet(box, other) for other in taken):
                chart.text(left, base, text, style="value")
                taken.append(box)
                break


def _pixel(chart: Chart, spot: tuple[float, float]) -> tuple[float, float]:
    return chart.x(spot[0]), chart.y(spot[1])


def _meet(box: Box, other: Box) -> bool:
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]


def _root_ticks(axis: Axis) -> list[float]:
    """Choose 0 and round values at least 44 pixels apart, from the right."""
    powers = range(math.floor(math.log10(axis.hi)), -5, -1)
    chosen: list[float] = []
    for value in (m * 10.0**power for power in powers for m in (5, 2, 1)):
        end = axis(chosen[-1]) if chosen else math.inf
        if value <= axis.hi and min(axis(value) - axis.start, end - axis(value)) >= 44:
            chosen.append(value)
    return [0.0, *chosen]


def caption(run: Run, frontier: Frontier) -> str:
    """Return the efficiency of the last evaluation, and the samples behind the line."""
    got, (_, _, kl) = efficiency(run, frontier), held_out(run, frontier.metric)[-1]
    if got is not None:
        text = f"KL efficiency {got:.2f}{_error(run, '')}; on the line it is 1."
    else:
        why = "it lies beyond the end of the line" if kl > MIN_KL else "its KL is about 0"
        text = f"The run has no KL efficiency, because {why}."
    if (trained := run.last("kl/efficiency_train")) is not None:
        text += f" On training prompts it is {trained:.2f}{_error(run, '_train')}."
    return f"{text} {_split(run)}{frontier.about()}"


def _error(run: Run, suffix: str) -> str:
    """Return the standard error of an efficiency as text, or "" if a run logs none."""
    error = run.last(f"kl/efficiency_error{suffix}")
    return "" if error is None else f" (standard error {error:.2f})"


def _split(run: Run) -> str:
    """Return the share of the KL that does not change the accuracy (trainer/kl/split.py)."""
    parts = [run.last(f"kl/{name}") for name in ("needed", "misallocated", "in_right", "in_wrong")]
    if None in parts:
        return ""
    _, _, right, wrong = (f"{part / sum(parts):.0%}" for part in parts)
    return (
        f"{wrong} of the KL changed wrong responses into other wrong ones and {right} right ones "
        "into other right ones: style, not accuracy. "
    )


def sample_frontier(folder: Path, samples: int) -> None:
    """Sample the reference of a run or a sweep, and write frontier.json into its folder."""
    jobs = load_jobs(folder)
    if not comparable(jobs):
        raise ValueError(
            "expected jobs that start from one model on one task, with one reference and one way "
            "to evaluate, got others; name one of them"
        )
    run = next((job.run.folder for job in jobs if job.run.metrics), jobs[0].run.folder)
    known = read_frontier(folder / FRONTIER_FILE) if (folder / FRONTIER_FILE).is_file() else None
    if known is not None and known.success.shape[1] >= samples and has_same_rows(known, run):
        return  # the existing samples are at least as precise
    with TemporaryDirectory(dir=folder, prefix=".frontier") as aside:  # a job may have a file too
        words = ["mode=frontier", f"eval.num_samples={samples}"]
        words.append(f"resume={hydra_path(run.resolve())}")
        command = [sys.executable, str(SCRIPT), *words, f"output_dir={hydra_path(Path(aside))}"]
        if code := subprocess.run(command, check=False).returncode:
            raise ValueError(f"{run} was not sampled: see above (exit code {code})")
        (Path(aside) / FRONTIER_FILE).replace(folder / FRONTIER_FILE)
