"""The picture of a sweep: what was reached against the KL, a point per setting.

Bars go from the lowest to the highest seed. The line joins the Pareto points, those that no other
beats in both; a setting without a finished job is on no line. A cross is the model before training.
The KL axis is a square-root scale, as in Gao et al. 2022 (Scaling Laws for Reward Model
Overoptimization, arXiv:2210.10760), where a distance is the root of a KL.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trainer.reports.chart import Axis, Box, Chart, meet, text_width
from trainer.reports.sweep_jobs import (
    ACCURACY,
    DRIFT,
    HELD_KL,
    HELD_REWARD,
    KL,
    REWARD,
    Job,
    Setting,
    grouped,
    start,
    varying,
)

if TYPE_CHECKING:
    from trainer.reports.limits import Limit, Lines

AVERAGED = "last ten iterations, at most a quarter of all"
TITLES = {
    REWARD: ("Reward against KL to the reference", f"mean reward per reply: {AVERAGED}"),
    ACCURACY: ("Accuracy against KL to the reference", "share of held-out replies, sampled"),
    HELD_REWARD: ("Held-out reward against KL to the reference", "mean per held-out reply"),
}
WHAT = {REWARD: "reward", ACCURACY: "accuracy", HELD_REWARD: "held-out reward"}


def frontier(
    jobs: Sequence[Job],
    *,
    width: int,
    height: int,
    by: str = REWARD,
    limit: "Limit | None" = None,
    sampler: bool = False,
) -> str:
    """Draw reward (or `by` a held-out metric) against KL, one labelled point per setting.

    Beside a held-out metric stands what no policy can pass on those prompts, if it is known. With
    `sampler` the KL is that to the policy that sampled.
    """
    if sampler:
        jobs, limit = [_from_the_sampler(job) for job in jobs], None
    placed = [setting for setting in grouped(jobs) if setting.spots(by)]
    if not placed:
        raise ValueError(f"expected a job with {by} and kl/ref_sequence, got none")
    line, begin = pareto(placed, by), None if sampler else start(jobs, by)
    named = ", ".join(key for key in varying(jobs) if key != "seed")
    notes = [f"labels: {named}"] * bool(named)
    notes += ["bars: lowest to highest seed"] * any(len(s.spots(by)) > 1 for s in placed)
    notes += ["hollow: beaten in both"] * any(s.finished and s not in line for s in placed)
    notes += ["dashed: unfinished"] * any(not s.finished for s in placed)
    notes += ["cross: before training"] * (begin is not None)
    if limit and by != REWARD:
        notes += ["upper line: the best there is", "diamonds: best of 2, 4 ... replies"]
    title, unit = TITLES[by]
    title = title.replace("reference", "sampler") if sampler else title
    chart = Chart(title, unit, width=width, height=height)
    for line_of_notes in _wrapped(notes, width):
        chart.top += 15
        chart.text(2, chart.top - 4, line_of_notes)
    spots = [spot for setting in placed for spot in setting.spots(by)]
    kls, values = zip(*spots, *([begin] if begin else []), strict=True)
    lines = _limit_lines(limit, by, max(kls))
    of = "nats per token" if sampler else "nats per reply"
    kl_axes(chart, max(kls), [*values, *(lines.range if lines else [])], of=of)
    taken: list[Box] = []  # what no label may cover: points, bars, other labels
    if lines:
        taken += lines.draw(chart, WHAT[by], spots)
    if len(line) > 1:
        chart.path([setting.place(by) for setting in line], "stroke:var(--hue0)")
    if begin:
        taken += _cross(chart, *begin)
    for setting in placed:
        taken += _draw(chart, setting, by, filled=setting in line)
    for setting in placed:
        taken += _label(chart, setting, setting.place(by), taken)
    return chart.svg()


def _from_the_sampler(job: Job) -> Job:
    """Return a job whose KL is that to the policy that sampled."""
    drift = job.reached.get(DRIFT)
    spent = {KL: None if drift is None else max(drift, 0.0), HELD_KL: None}
    return replace(job, reached=job.reached | spent)


def kl_axes(
    chart: Chart, most: float, values: Sequence[float], *, of: str = "nats per reply"
) -> None:
    """Draw the axes of `values` against the KL, from 0 to `most` nats."""
    chart.axes(
        (0.0, max(most, 1e-3)),
        (min(values), max(values)),
        x_label=f"KL, {of} (square-root scale)",
        x_ticks=_root_ticks,
        warp=math.sqrt,
        inset=(12, 28),  # for the labels of the outermost points
    )


def _limit_lines(limit: "Limit | None", by: str, most: float) -> "Lines | None":
    if limit is None or by == REWARD:
        return None
    from trainer.reports.limits import Lines  # here: numpy, for those that have a limit

    return Lines(limit, by, most=most)


def _wrapped(notes: Sequence[str], width: int) -> list[str]:
    """Join notes into lines that fit."""
    lines = [""]
    for note in notes:
        longer = f"{lines[-1]}; {note}" if lines[-1] else note
        if lines[-1] and text_width(longer) > width:
            lines.append(note)
        else:
            lines[-1] = longer
    return lines


def pareto(settings: Sequence[Setting], by: str = REWARD) -> list[Setting]:
    """Return the finished settings that no other beats in reward and KL, in order of KL."""
    front: list[Setting] = []
    done = [setting for setting in settings if setting.finished]
    for setting in sorted(done, key=lambda s: (s.place(by)[0], -s.place(by)[1])):
        if not front or setting.place(by)[1] > front[-1].place(by)[1]:
            front.append(setting)
    return front


def _cross(chart: Chart, kl: float, value: float) -> list[Box]:
    """Draw the model before training; return what it covers."""
    x, y = chart.x(kl), chart.y(value)
    tip = f"<title>before training: {value:z.3f}, KL {kl:z.3f}</title>"
    shape = f'd="M{x - 5:g} {y - 5:g}l10 10m0 -10l-10 10"'
    chart.parts.append(f'<path class="bars" style="stroke-width:2" {shape}>{tip}</path>')
    return [(x - 6, y - 6, x + 6, y + 6)]


def _draw(chart: Chart, setting: Setting, by: str, *, filled: bool) -> list[Box]:
    """Draw a point, filled if no other beats it, dashed if it is not finished; return its boxes."""
    (kl, value), spots = setting.place(by), setting.spots(by)
    x, y = chart.x(kl), chart.y(value)
    boxes: list[Box] = [(x - 6, y - 6, x + 6, y + 6)]
    count = len(spots)
    if count > 1:  # bars: how far the seeds lie apart, in both directions
        xs, ys = [chart.x(k) for k, _ in spots], [chart.y(v) for _, v in spots]
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
    tip = f"{name}: {WHAT[by]} {value:z.3f}, KL {kl:z.3f}{several}"
    chart.dot(kl, value, style, radius=4.5, tip=tip)
    return boxes


def _label(
    chart: Chart, setting: Setting, place: tuple[float, float], taken: Sequence[Box]
) -> list[Box]:
    """Name a point where that hides nothing and return the box; without room its tooltip tells."""
    text = setting.label if setting.finished else f"{setting.label} ({setting.state})"
    wide, (kl, value) = text_width(text, size=12), place
    for side in (10, -10 - wide, -wide / 2, 18, -18 - wide):  # right, left, centred, further off
        for drop in (15, -8, 4, 24, -17, 34, -24):
            x, y = chart.x(kl) + side, chart.y(value) + drop
            a, b, c, d = x - 4, y - 11, x + wide + 4, y + 3
            inside = a > 0 and c < chart.width and chart.y.stop - 12 < b and d < chart.y.start + 10
            if inside and not any(meet((a, b, c, d), other) for other in taken):
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
