"""Line and area charts over the iterations of a run, as SVG text.

Every chart carries its own title, unit, legend and ticks, so it stands in a page or in a file of
its own. Left out on purpose: interaction beyond the tooltips that SVG's <title> gives.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer.reports.svg import (
    Axis,
    escape,
    fill,
    frame,
    grid,
    label,
    legend,
    line_style,
    path,
    short,
    text_width,
    ticks,
    tips,
)

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """One curve. `hue`: index into the palette; `dots`: mark every point (sparse values)."""

    name: str
    points: Points
    hue: int = 0
    dots: bool = False


@dataclass(frozen=True)
class Plot:
    """The empty plot that curves or areas are drawn into: its parts and its two axes."""

    parts: list[str]
    x: Axis
    y: Axis


def plot(
    xs: Sequence[float],
    span: tuple[float, float],
    *,
    title: str,
    unit: str,
    key: tuple[str, int],
    size: tuple[int, int],
    x_label: str = "iteration",
) -> Plot:
    """Draw titles, legend (`key`: parts and the y where they end), grid and ticks."""
    (width, height), (legend, top) = size, key
    y_ticks = ticks(*span)
    left = 14 + max(text_width(short(t)) for t in y_ticks)
    x_ticks = ticks(min(xs), max(xs), count=max(2, width // 80), whole=True)
    x_lo, x_hi = (min(xs), max(xs)) if max(xs) > min(xs) else (min(xs) - 1, max(xs) + 1)
    x_axis = Axis(x_lo, x_hi, left, width - 12)
    y_axis = Axis(y_ticks[0], y_ticks[-1], height - 36, top + 13)
    parts = [label(2, 14, title, style="title"), label(2, 30, unit) if unit else "", legend]
    parts += grid(y_axis, y_ticks, left=left, right=width - 12)
    bottom = height - 21
    shown = [t for t in x_ticks if x_lo <= t <= x_hi]
    parts += [label(x_axis(t), bottom, short(t), anchor="middle") for t in shown]
    parts.append(label((left + width - 12) / 2, height - 5, x_label, anchor="middle"))
    return Plot(parts, x_axis, y_axis)


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    unit: str,
    x_label: str = "iteration",
    width: int = 360,
    height: int = 220,
    named: bool = True,
    least: float = 0.0,
) -> str:
    """Draw curves over an integer axis; a value far above the rest is cut, marked by a triangle.

    `named`: with a legend; `least`: a value that the axis reaches. What is nothing beside the axis
    (a rounding error) is 0.
    """
    whole = [s for s in series if s.points]
    if not whole:
        raise ValueError(f"expected at least one point for chart {title!r}, got none")
    series = [replace(s, points=_thin(s.points)) for s in whole]
    span = data_range(*([y for _, y in s.points] for s in series), least=least)
    nothing = max(1e-5 * max(map(abs, span)), 1e-4 * least)
    series = [_without(s, nothing) for s in series]
    key = _key([_without(s, nothing) for s in whole], width) if named else ("", 34)
    xs = [x for s in series for x, _ in s.points]
    made = plot(xs, span, title=title, unit=unit, x_label=x_label, key=key, size=(width, height))
    values: dict[float, list[str]] = {}
    for s in series:
        for x, y in s.points:
            values.setdefault(x, []).append(f"{s.name} {short(y)}")
    curves = [_curve(s, made.x, made.y) for s in series]
    body = [*made.parts, *tips(values, made.x, made.y, x_label=x_label), *curves]
    return frame("".join(body), width=width, height=height, title=title)


def _without(series: Series, nothing: float) -> Series:
    """Put 0 in place of values that are at most `nothing`."""
    points = [(x, y if abs(y) > nothing else 0.0) for x, y in series.points]
    return replace(series, points=points)


def stack_chart(
    series: Sequence[Series], *, title: str, unit: str, width: int = 360, height: int = 220
) -> str:
    """Draw values on top of each other, the first at the bottom; the legend has their shares.

    A series that lacks an iteration counts as 0 there.
    """
    held = [(s, dict(_thin(s.points))) for s in series if s.points]
    xs = sorted({x for _, values in held for x in values})
    if not xs:
        raise ValueError(f"expected at least one point for chart {title!r}, got none")
    totals = [sum(values.get(x, 0.0) for _, values in held) for x in xs]
    whole = sum(totals) or 1.0
    entries = [(s.hue, f"{s.name} {sum(values.values()) / whole:.0%}") for s, values in held]
    span = (0.0, data_range(totals)[1])
    key = legend(entries, width)
    made = plot(xs, span, title=title, unit=unit, key=key, size=(width, height))
    told = {
        x: [*(f"{s.name} {short(v[x])}" for s, v in held if x in v), f"all {short(total)}"]
        for x, total in zip(xs, totals, strict=True)
    }
    parts, floor = [*made.parts], [0.0] * len(xs)
    for s, values in held:
        roof = [low + values.get(x, 0.0) for x, low in zip(xs, floor, strict=True)]
        parts.append(f'<path class="area" {fill(s.hue)} d="{_area(xs, floor, roof, made)}"/>')
        floor = roof
    parts += tips(told, made.x, made.y)
    return frame("".join(parts), width=width, height=height, title=title)


def _area(xs: Sequence[float], floor: Sequence[float], roof: Sequence[float], made: Plot) -> str:
    """Return the outline between two curves; one point alone is as wide as the plot."""
    if len(xs) == 1:
        places = [made.x.start, made.x.stop]
        floor, roof = [*floor, *floor], [*roof, *roof]
    else:
        places = [made.x(x) for x in xs]
    there = [(x, made.y(v)) for x, v in zip(places, roof, strict=True)]
    back = [(x, made.y(v)) for x, v in zip(places, floor, strict=True)][::-1]
    return path([*there, *back]) + "Z"


def _key(series: Sequence[Series], width: int) -> tuple[str, int]:
    """Return the legend with the last values."""
    if len(series) == 1:
        value = short(series[0].points[-1][1])
        return label(width - 12, 14, value, anchor="end", style="value"), 34
    return legend(((s.hue, f"{s.name} {short(s.points[-1][1])}") for s in series), width)


def _curve(series: Series, x_axis: Axis, y_axis: Axis) -> str:
    place = [(x_axis(x), y_axis(y)) for x, y in series.points]
    stroke = f'style="{line_style(series.hue)}"'
    smooth = _smooth([min(y, y_axis.hi) for _, y in series.points]) if len(place) >= 40 else None
    parts = []
    if smooth:
        averaged = [(x, y_axis(v)) for (x, _), v in zip(place, smooth, strict=True)]
        parts.append(f'<path class="raw" {stroke} d="{path(place)}"/>')
        parts.append(f'<path class="line" {stroke} d="{path(averaged)}"/>')
    else:
        parts.append(f'<path class="line" {stroke} d="{path(place)}"/>')
    radius = 3.0 if series.dots or len(place) == 1 else 0.0
    for (x, y), (iteration, value) in zip(place, series.points, strict=True):
        if value > y_axis.hi:
            tip = escape(f"{series.name}, {iteration:g}: {short(value)}")
            shape = f'd="M{x - 4:g} {y}h8l-4 -7z" {fill(series.hue)}'
            parts.append(f"<path {shape}><title>{tip}</title></path>")
        elif radius:
            parts.append(f'<circle cx="{x}" cy="{y}" r="{radius:g}" {fill(series.hue)}/>')
    return "".join(parts)


def data_range(*curves: Sequence[float], least: float = 0.0) -> tuple[float, float]:
    """Choose what the y axis shows: 0 when near, but no few values far above a curve's rest.

    A curve that lies far above the others is shown.
    """
    lo, hi = min(map(min, curves)), max(map(_roof, curves))
    hi = max(hi, least) if least else hi
    # A rounding error below 0 is 0: it must not open a whole step of the axis.
    return (0.0 if -1e-3 * hi <= lo <= 0.6 * hi else lo), hi


def _roof(values: Sequence[float]) -> float:
    """Return the highest value of a curve, but for a few far above the rest."""
    hi = max(values)
    if len(values) < 10:
        return hi
    high = sorted(values)[int(0.9 * (len(values) - 1))]
    return 1.5 * high if high > 0 and hi > 5 * high else hi


def _smooth(values: Sequence[float]) -> list[float]:
    """Average each value with its neighbours: a tenth of the curve, centred."""
    half = len(values) // 20
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [math.fsum(window) / len(window) for window in windows]


def _thin(points: Points, *, most: int = 400) -> Points:
    """Average neighbours so that a curve of a long run stays small."""
    size = math.ceil(len(points) / most)
    if size <= 1:
        return points
    groups = (points[i : i + size] for i in range(0, len(points), size))
    return [(g[-1][0], sum(y for _, y in g) / len(g)) for g in groups]
