"""The picture of a sweep: reward against KL, a point per setting, a line through the best.

Settings that differ in the seed alone are one point, their mean; bars span the seeds. The line
joins the Pareto points, those that no other beats in both; a setting without a finished job is on
no line. The KL axis is a square-root scale, as in Gao et al. 2022 (Scaling Laws for Reward Model
Overoptimization, arXiv:2210.10760), where a distance is the root of a KL.
"""

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from trainer.reports import svg

TITLE = "Reward against KL to the reference"
AVERAGED = "last ten iterations, at most a quarter of all"
Spot = tuple[float, float]  # KL, reward
Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Point:
    """One setting. `seeds`: KL and reward of each of its jobs; `note`: what is not as it should.

    `finished`: whether these jobs are.
    """

    name: str
    seeds: tuple[Spot, ...]
    note: str = ""
    finished: bool = True

    @property
    def kl(self) -> float:
        return sum(kl for kl, _ in self.seeds) / len(self.seeds)

    @property
    def reward(self) -> float:
        return sum(reward for _, reward in self.seeds) / len(self.seeds)


def pareto(points: Sequence[Point]) -> list[Point]:
    """Return the finished points that no other beats in reward and KL, in order of KL.

    >>> [p.name for p in pareto([Point("a", ((2, 1),)), Point("b", ((3, 0.5),))])]
    ['a']
    """
    best: list[Point] = []
    done = [point for point in points if point.finished]
    for point in sorted(done, key=lambda p: (p.kl, -p.reward)):
        if not best or point.reward > best[-1].reward:
            best.append(point)
    return best


def frontier(points: Sequence[Point], *, named: str, width: int = 480, height: int = 340) -> str:
    """Draw the points; `named` says what their labels are."""
    if not points:
        raise ValueError("expected a job with reward/raw_mean and kl/ref_sequence, got none")
    spots = [spot for point in points for spot in point.seeds]
    rewards = [reward for _, reward in spots]
    y_ticks = svg.ticks(min(rewards), max(rewards), count=5)
    left = 14 + max(svg.text_width(svg.short(t)) for t in y_ticks)
    x = svg.Axis(0.0, _top(max(kl for kl, _ in spots)), left + 12, width - 40, math.sqrt)
    y = svg.Axis(y_ticks[0], y_ticks[-1], height - 48, 62)
    parts = [svg.label(2, 14, TITLE, style="title")]
    parts.append(svg.label(2, 30, f"mean reward per reply: {AVERAGED}"))
    notes = [f"labels: {named}"] * bool(named)
    notes += ["bars: lowest to highest seed"] * any(len(point.seeds) > 1 for point in points)
    best = pareto(points)
    notes += ["hollow: beaten in both"] * any(p.finished and p not in best for p in points)
    notes += ["dashed: unfinished"] * any(not point.finished for point in points)
    parts.append(svg.label(2, 45, "; ".join(notes)))
    parts += svg.grid(y, y_ticks, left=left, right=width - 12)
    for tick in _root_ticks(x):
        parts.append(f'<path class="grid" d="M{x(tick)} {height - 48}v6"/>')
        parts.append(svg.label(x(tick), height - 28, svg.short(tick), anchor="middle"))
    name = "KL, nats per reply (square-root scale)"
    parts.append(svg.label((left + width) / 2, height - 6, name, anchor="middle"))
    line = [(x(p.kl), y(p.reward)) for p in best]
    if len(line) > 1:
        parts.append(f'<path class="line" style="stroke:var(--hue0)" d="{svg.path(line)}"/>')
    parts += [_bars(point, x, y) for point in points if len(point.seeds) > 1]
    parts += [_dot(point, x, y, filled=point in best) for point in points]
    parts += _names(points, x, y, line)
    return svg.frame("".join(parts), width=width, height=height, title=TITLE)


def _bars(point: Point, x: svg.Axis, y: svg.Axis) -> str:
    """Draw how far the seeds of a setting lie apart, in both directions."""
    kls, rewards = [kl for kl, _ in point.seeds], [reward for _, reward in point.seeds]
    lo, hi, low, high = x(min(kls)), x(max(kls)), y(min(rewards)), y(max(rewards))
    cx, cy = x(point.kl), y(point.reward)
    across = f"M{lo} {cy}H{hi}M{lo} {cy - 3:g}v6M{hi} {cy - 3:g}v6"
    along = f"M{cx} {low}V{high}M{cx - 3:g} {low}h6M{cx - 3:g} {high}h6"
    return f'<path class="bars" style="stroke:var(--muted);fill:none" d="{across}{along}"/>'


def _dot(point: Point, x: svg.Axis, y: svg.Axis, *, filled: bool) -> str:
    """Draw a point: filled if no other beats it, dashed if it is not finished."""
    paint = "var(--hue0)" if filled else "var(--paper)"
    dashes = "" if point.finished else ";stroke-dasharray:3 2"
    count = f", {len(point.seeds)} seeds" if len(point.seeds) > 1 else ""
    tip = f"{point.name}{point.note}: reward {point.reward:.3f}, KL {point.kl:.3f}{count}"
    style = f'style="fill:{paint};stroke:var(--hue0);stroke-width:1.8{dashes}"'
    where = f'cx="{x(point.kl)}" cy="{y(point.reward)}" r="4.5"'
    return f"<circle {where} {style}><title>{html.escape(tip)}</title></circle>"


def _names(points: Sequence[Point], x: svg.Axis, y: svg.Axis, line: Sequence[Spot]) -> list[str]:
    """Place the labels where they hide nothing; one that would has none, its tooltip tells.

    The bars and the line (pixels) are kept free too, where there is another place.
    """
    spots = [(x(p.kl), y(p.reward)) for p in points]
    bars = [box for point in points if len(point.seeds) > 1 for box in _boxes(point, x, y)]
    taken = [(px - 6, py - 6, px + 6, py + 6) for px, py in spots]
    on_line = list(_along(line))
    parts = []
    for point, (px, py) in zip(points, spots, strict=True):
        text = point.name if point.finished else f"{point.name}{point.note}"
        wide = svg.text_width(text, size=12)
        tries = [(px + 10, py + 15), (px - wide / 2, py - 10), (px - wide / 2, py + 20)]
        tries += [(px - 10 - wide, py - 8), (px + 10, py - 8), (px - 10 - wide, py + 15)]
        tries += [(px + 12, py + 4), (px - 12 - wide, py + 4)]
        tries += [(px - wide / 2, py + d) for d in (-24, 34)]
        tries += [(px + a, py + b) for a in (18, -18 - wide) for b in (24, -17)]
        boxes = {(a, b): (a - 4, b - 11, a + wide + 4, b + 3) for a, b in tries}
        free = [spot for spot, box in boxes.items() if _inside(box, x, y) and not _hits(box, taken)]
        if free:
            a, b = min(free, key=lambda s: (_hits(boxes[s], bars), _hits(boxes[s], on_line)))
            taken.append(boxes[a, b])
            parts.append(svg.label(a, b, text, style="value"))
    return parts


def _boxes(point: Point, x: svg.Axis, y: svg.Axis) -> list[Box]:
    """Return the boxes (pixels) that the bars of a point fill."""
    kls, rewards = [kl for kl, _ in point.seeds], [reward for _, reward in point.seeds]
    cx, cy = x(point.kl), y(point.reward)
    across = (x(min(kls)) - 1, cy - 3, x(max(kls)) + 1, cy + 3)
    return [across, (cx - 3, y(max(rewards)) - 1, cx + 3, y(min(rewards)) + 1)]


def _along(line: Sequence[Spot]) -> Iterator[Box]:
    """Cover a line with small boxes."""
    for (ax, ay), (bx, by) in pairwise(line):
        count = max(int(math.dist((ax, ay), (bx, by)) / 4), 1)
        for k in range(count + 1):
            cx, cy = ax + (bx - ax) * k / count, ay + (by - ay) * k / count
            yield cx - 1, cy - 1, cx + 1, cy + 1


def _inside(box: Box, x: svg.Axis, y: svg.Axis) -> bool:
    across = box[0] > 0 and box[2] < x.stop + 40
    return across and box[1] > y.stop - 12 and box[3] < y.start + 10


def _hits(box: Box, others: Sequence[Box]) -> bool:
    return any(box[0] < o[2] and o[0] < box[2] and box[1] < o[3] and o[1] < box[3] for o in others)


def _top(most: float) -> float:
    """Return the end of the KL axis: a round number, none of the data lies beyond it."""
    most = max(most, 1e-3)
    power = 10.0 ** math.floor(math.log10(most))
    steps = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
    return next(m * power for m in steps if most <= m * power * (1 + 1e-9))


def _root_ticks(axis: svg.Axis) -> list[float]:
    """Choose ticks: 0, the end, and round values at least 44 pixels apart, from the right."""
    power = math.floor(math.log10(axis.hi))
    values = [m * 10.0**p for p in range(power, power - 4, -1) for m in (5, 4, 3, 2, 1)]
    kept: list[float] = [axis.hi]
    for value in [v for v in values if v < axis.hi]:
        space = min(axis(value) - axis(0.0), axis(kept[-1]) - axis(value))
        if space >= 44:
            kept.append(value)
    return [0.0, *reversed(kept)]
