"""The picture of a sweep: reward against KL, a point per setting, a line through the best.

Settings that differ in the seed alone are one point, their mean; bars span the seeds. The line
joins the Pareto points, those that no other beats in both. The KL axis is a square-root scale, as
in Gao et al. 2022 (Scaling Laws for Reward Model Overoptimization, arXiv:2210.10760), where a
distance is the root of a KL.
"""

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from trainer.show import svg

Spot = tuple[float, float]  # KL, reward


@dataclass(frozen=True)
class Point:
    """One setting. `seeds`: KL and reward of each of its jobs; `note`: what is not as it should."""

    name: str
    seeds: tuple[Spot, ...]
    note: str = ""

    @property
    def kl(self) -> float:
        return sum(kl for kl, _ in self.seeds) / len(self.seeds)

    @property
    def reward(self) -> float:
        return sum(reward for _, reward in self.seeds) / len(self.seeds)


def pareto(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats in reward and KL, in order of KL.

    >>> [p.name for p in pareto([Point("a", ((2, 1),)), Point("b", ((3, 0.5),))])]
    ['a']
    """
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.kl, -p.reward)):
        if not best or point.reward > best[-1].reward:
            best.append(point)
    return best


def frontier(points: Sequence[Point], *, named: str, width: int = 480, height: int = 340) -> str:
    """Draw the points; `named` says what their labels are."""
    if not points:
        raise ValueError("expected at least one job with reward/mean and kl/ref_sequence, got none")
    spots = [spot for point in points for spot in point.seeds]
    rewards = [reward for _, reward in spots]
    y_ticks = svg.ticks(min(rewards), max(rewards), count=5)
    left = 14 + max(svg.text_width(svg.short(t)) for t in y_ticks)
    top = max(*(kl for kl, _ in spots), 1e-3) * 1.15
    x = svg.Axis(0.0, top, left + 12, width - 40, math.sqrt)
    y = svg.Axis(y_ticks[0], y_ticks[-1], height - 48, 62)
    parts = [svg.label(2, 14, "Reward against KL to the reference", style="title")]
    several = any(len(point.seeds) > 1 for point in points)
    parts.append(svg.label(2, 30, "reward per reply, mean of the last ten iterations"))
    notes = [f"labels: {named}"] * bool(named) + ["bars: lowest to highest seed"] * several
    parts.append(svg.label(2, 45, "; ".join(notes)))
    parts += svg.grid(y, y_ticks, left=left, right=width - 12)
    for tick in _root_ticks(x):
        parts.append(f'<path class="grid" d="M{x(tick)} {height - 48}v6"/>')
        parts.append(svg.label(x(tick), height - 28, svg.short(tick), anchor="middle"))
    name = "KL, nats per reply (square-root scale)"
    parts.append(svg.label((left + width) / 2, height - 6, name, anchor="middle"))
    best = pareto(points)
    line = [(x(p.kl), y(p.reward)) for p in best]
    if len(line) > 1:
        parts.append(f'<path class="line" style="stroke:var(--hue0)" d="{svg.path(line)}"/>')
    parts += [_bars(point, x, y) for point in points if len(point.seeds) > 1]
    parts += [_dot(point, x, y, filled=point in best) for point in points]
    parts += _names(points, x, y, line)
    return svg.frame("".join(parts), width=width, height=height, title=name)


def _bars(point: Point, x: svg.Axis, y: svg.Axis) -> str:
    """Draw how far the seeds of a setting lie apart, in both directions."""
    kls, rewards = [kl for kl, _ in point.seeds], [reward for _, reward in point.seeds]
    lo, hi, low, high = x(min(kls)), x(max(kls)), y(min(rewards)), y(max(rewards))
    cx, cy = x(point.kl), y(point.reward)
    across = f"M{lo} {cy}H{hi}M{lo} {cy - 3:g}v6M{hi} {cy - 3:g}v6"
    along = f"M{cx} {low}V{high}M{cx - 3:g} {low}h6M{cx - 3:g} {high}h6"
    return f'<path class="bars" style="stroke:var(--muted);fill:none" d="{across}{along}"/>'


def _dot(point: Point, x: svg.Axis, y: svg.Axis, *, filled: bool) -> str:
    """Draw a point: filled if no other beats it."""
    paint = "var(--hue0)" if filled else "var(--paper)"
    count = f", {len(point.seeds)} seeds" if len(point.seeds) > 1 else ""
    tip = f"{point.name}{point.note}: reward {point.reward:.3f}, KL {point.kl:.3f}{count}"
    style = f'style="fill:{paint};stroke:var(--hue0);stroke-width:1.8"'
    where = f'cx="{x(point.kl)}" cy="{y(point.reward)}" r="4.5"'
    return f"<circle {where} {style}><title>{html.escape(tip)}</title></circle>"


def _names(points: Sequence[Point], x: svg.Axis, y: svg.Axis, line: Sequence[Spot]) -> list[str]:
    """Place the labels where they hide nothing; one that would has none, its tooltip tells.

    The line (pixels) is kept free too, where there is another place.
    """
    spots = [(x(p.kl), y(p.reward)) for p in points]
    taken = [(px - 6, py - 6, px + 6, py + 6) for px, py in spots]
    on_line = list(_along(line))
    parts = []
    for point, (px, py) in zip(points, spots, strict=True):
        text = f"{point.name}{point.note}"
        wide = svg.text_width(text, size=12)
        tries = [(px + 9, py + 15), (px - wide / 2, py - 10), (px - wide / 2, py + 20)]
        tries += [(px - 9 - wide, py - 8), (px + 9, py - 8), (px - 9 - wide, py + 15)]
        tries += [(px + 12, py + 4), (px - 12 - wide, py + 4)]
        tries += [(px - wide / 2, py + d) for d in (-24, 34)]
        boxes = {(a, b): (a - 4, b - 11, a + wide + 4, b + 3) for a, b in tries}
        free = [spot for spot, box in boxes.items() if _inside(box, x, y) and not _hits(box, taken)]
        if free:
            a, b = min(free, key=lambda spot: _hits(boxes[spot], on_line))  # the first, else any
            taken.append(boxes[a, b])
            parts.append(svg.label(a, b, text, style="value"))
    return parts


def _along(line: Sequence[Spot]) -> Iterator[tuple[float, ...]]:
    """Cover a line with small boxes."""
    for (ax, ay), (bx, by) in pairwise(line):
        count = max(int(math.dist((ax, ay), (bx, by)) / 4), 1)
        for k in range(count + 1):
            cx, cy = ax + (bx - ax) * k / count, ay + (by - ay) * k / count
            yield cx - 1, cy - 1, cx + 1, cy + 1


def _inside(box: tuple[float, ...], x: svg.Axis, y: svg.Axis) -> bool:
    across = box[0] > 0 and box[2] < x.stop + 40
    return across and box[1] > y.stop - 12 and box[3] < y.start + 10


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
