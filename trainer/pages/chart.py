"""Charts as SVG text: axes, ticks, legends and curves, alone or in a page.

Colours (chart.css) follow the reader's light or dark scheme; curves beyond the palette are dashed.
A chart contains the values of its curves, so that script.js can zoom and show them.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from trainer.pages.formats import short

CSS = Path(__file__).with_name("chart.css").read_text(encoding="utf-8")
HUES = 8  # number of hues in chart.css
MOST_POINTS = 4000  # largest number of points per chart; a curve has at most a tenth of them
_DASHES = ("", "5 3", "1.5 3", "8 3 1.5 3")
_WIDE = set("mwMWGOQ@%")
Points = Sequence[tuple[float, float]]
Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels


@dataclass(frozen=True)
class Series:
    """One curve. `hue`: index into the palette; `dots`: mark every point (for sparse values)."""

    name: str
    points: Points
    hue: int = 0
    dots: bool = False


@dataclass(frozen=True)
class Axis:
    """A map from data in [lo, hi] to pixels in [start, stop]; `warp` transforms the data."""

    lo: float
    hi: float
    start: float
    stop: float
    warp: Callable[[float], float] = float

    def __call__(self, value: float) -> float:
        lo, hi = self.warp(self.lo), self.warp(self.hi)
        share = (self.warp(min(max(value, self.lo), self.hi)) - lo) / (hi - lo)
        return round(self.start + share * (self.stop - self.start), 1)


class Chart:
    """A drawing of fixed size: title and unit, then a legend, the axes and their content.

    `parts`: the SVG elements so far; `head`: those above the plot. `axes` sets `x` and `y`, which
    map data to pixels. `curves`: name, style, kind and points of the curves for script.js.
    """

    x: Axis
    y: Axis
    head: str

    def __init__(self, title: str, unit: str, *, width: int = 360, height: int = 220) -> None:
        self.title, self.width, self.height = title, width, height
        self.parts: list[str] = []
        self.curves: list[tuple[str, str, str, Points]] = []
        self.top = 34.0  # bottom of the text above the plot
        self.text(2, 14, title, style="title")
        self.text(2, 30, unit)

    def text(self, x: float, y: float, text: str, anchor: str = "start", style: str = "") -> None:
        """Draw one piece of text, which may be empty."""
        if not text:
            return
        look = f' class="{style}"' if style else ""
        element = f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{look}>{escape(text)}</text>'
        self.parts.append(element)

    def legend(self, entries: Iterable[tuple[int, str]]) -> None:
        """Draw (hue, text) pairs on as many lines as they need."""
        x, self.top = 2.0, 47
        for hue, text in entries:
            need = text_width(text) + 24
            if x > 2 and x + need > self.width:
                x, self.top = 2.0, self.top + 15
            box = f'x="{x:g}" y="{self.top - 8}" width="9" height="9" rx="2"'
            self.parts.append(f'<rect {box} style="fill:{colour(hue)}"/>')
            self.text(x + 13, self.top, text)
            x += need

    def axes(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        x_label: str = "iteration",
        x_ticks: Callable[[Axis], Sequence[float]] | None = None,
        warp: Callable[[float], float] = float,
        inset: tuple[float, float] = (0, 0),
    ) -> None:
        """Draw grid and ticks for data in the ranges `x` and `y`.

        The default ticks of x are integers. `inset`: pixels left free at the sides.
        """
        self.x_label, self.head = x_label, "".join(self.parts)
        self.parts.clear()
        y_ticks = ticks(*y, count=max(4, self.height // 64))
        left, right = 14 + max(text_width(short(t)) for t in y_ticks), self.width - 12
        lo, hi = x if x[1] > x[0] else (x[0] - 1, x[1] + 1)
        self.x = Axis(lo, hi, left + inset[0], right - inset[1], warp)
        self.y = Axis(y_ticks[0], y_ticks[-1], self.height - 36, self.top + 13)
        for tick in y_ticks:
            self.parts.append(f'<path class="grid" d="M{left:g} {self.y(tick)}H{right:g}"/>')
            self.text(left - 6, self.y(tick) + 4, short(tick), anchor="end")
        marks = x_ticks(self.x) if x_ticks else ticks(*x, count=self.width // 80, integers=True)
        for tick in (t for t in marks if lo <= t <= hi):
            self.parts.append(f'<path class="grid" d="M{self.x(tick)} {self.height - 36}v4"/>')
            centre = min(self.x(tick), self.width - text_width(short(tick)) / 2)  # inside
            self.text(centre, self.height - 21, short(tick), anchor="middle")
        self.text((left + right) / 2, self.height - 5, x_label, anchor="middle")

    def path(self, points: Iterable[tuple[float, float]], style: str, kind: str = "line") -> None:
        """Draw a line through points of the data."""
        placed = "L".join(f"{self.x(x)} {self.y(y)}" for x, y in points)
        self.parts.append(f'<path class="{kind}" style="{style}" d="M{placed}"/>')

    def dot(self, x: float, y: float, style: str, *, radius: float = 3, tip: str = "") -> None:
        """Draw a point of the data."""
        title = f"<title>{escape(tip)}</title>" if tip else ""
        where = f'cx="{self.x(x)}" cy="{self.y(y)}" r="{radius:g}"'
        self.parts.append(f'<circle {where} style="{style}">{title}</circle>')

    def curve(self, points: Points, style: str, kind: str = "line", *, name: str = "") -> None:
        """Draw a line, and record it for script.js, which shows named curves."""
        self.path(points, style, kind)
        rounded = [(x, float(f"{y:.4g}")) for x, y in points]
        self.curves.append((name, style, kind, rounded))

    def svg(self) -> str:
        """Return the drawing as an <svg> that scales to its box."""
        wide, high = self.width, self.height
        size = f'viewBox="0 0 {wide} {high}" width="{wide}" height="{high}"'
        name = f'role="img" aria-label="{escape(self.title)}" xmlns="http://www.w3.org/2000/svg"'
        payload = {"label": self.x_label, "curves": self.curves}
        payload |= {k: [a.lo, a.hi, a.start, a.stop] for k, a in (("x", self.x), ("y", self.y))}
        text = escape(json.dumps(payload, separators=(",", ":")), quote=False).replace("'", "&#39;")
        data = f" data-plot='{text}'" if self.curves else ""
        plot = f'<g class="plot">{"".join(self.parts)}</g>'
        return f'<svg class="chart" {size} {name}{data}>{self.head}{plot}</svg>'


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
    bounds: Mapping[str, float] | None = None,
) -> str:
    """Draw curves; a triangle marks a value that is clipped because it is far above the rest.

    `named`: with a legend; `least`: a value that the axis includes; `bounds`: horizontal lines.
    """
    curves = [(s, _thin(s.points, len(series))) for s in series]
    bounds = bounds or {}
    least = max(least, *bounds.values(), 0.0)
    span = data_range(*([y for _, y in points] for _, points in curves), least=least)
    chart = Chart(title, unit, width=width, height=height)
    if named and len(series) == 1:
        chart.text(width - 12, 14, short(series[0].points[-1][1]), anchor="end", style="value")
    elif named:
        chart.legend((s.hue, f"{s.name} {short(s.points[-1][1])}") for s in series)
    xs = [x for _, points in curves for x, _ in points]
    chart.axes((min(xs), max(xs)), span, x_label=x_label)
    for name, value in bounds.items():
        across = [(chart.x.lo, value), (chart.x.hi, value)]
        chart.curve(across, "stroke-dasharray:6 4", "bars", name=name)
        chart.text(chart.x.start + 4, chart.y(value) - 4, f"{name} {short(value)}")
    for s, points in curves:
        _draw_curve(chart, s, points)
    return chart.svg()


def _draw_curve(chart: Chart, series: Series, points: Points) -> None:
    """Draw a curve; if it is long, thin, with a thick moving average over a tenth of its points."""
    style, most = line_style(series.hue), chart.y.hi
    if len(points) >= 40:
        half = len(points) // 20
        chart.curve(points, style, "raw", name=series.name)
        cut = [min(y, most) for _, y in points]
        near = [cut[max(0, i - half) : i + half + 1] for i in range(len(cut))]
        smooth = [math.fsum(values) / len(values) for values in near]
        chart.curve([*zip((x for x, _ in points), smooth, strict=True)], style)
    else:
        chart.curve(points, style, name=series.name)
    fill = f"fill:{colour(series.hue)}"
    for x, y in points:
        if y > most:
            tip = escape(f"{series.name}, {x:g}: {short(y)}")
            shape = f'd="M{chart.x(x) - 4:g} {chart.y(y)}h8l-4 -7z" style="{fill}"'
            chart.parts.append(f"<path {shape}><title>{tip}</title></path>")
        elif series.dots or len(points) == 1:
            chart.dot(x, y, fill)


def standalone(rows: Sequence[Sequence[str]], *, width: int = 360, height: int = 220) -> str:
    """Put rows of charts of one size into an SVG document with style sheet and background."""
    wide, high = max(map(len, rows)) * (width + 24) + 8, len(rows) * (height + 20) + 4
    size = f'width="{wide}" height="{high}"'
    paper = f'<g class="chart"><rect class="paper" x="-16" y="-12" {size} rx="8"/></g>'
    placed = (
        f'<g transform="translate({j * (width + 24)} {i * (height + 20)})">{chart}</g>'
        for i, row in enumerate(rows)
        for j, chart in enumerate(row)
    )
    charts = re.sub(r" data-plot='[^']*'", "", "".join(placed))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-16 -12 {wide} {high}" '
        f"{size}><style>{CSS}</style>{paper}{charts}</svg>\n"
    )


def ticks(lo: float, hi: float, *, count: int = 4, integers: bool = False) -> list[float]:
    """Choose about `count` round numbers, or `integers`, that enclose [lo, hi].

    >>> ticks(0.1, 0.72)
    [0.0, 0.2, 0.4, 0.6, 0.8]
    >>> ticks(1.0, 1.0015)
    [1.0, 1.01]
    """
    size = max(abs(lo), abs(hi))
    if hi - lo <= (1e-9 if integers else 1e-3) * size:  # equal in the digits of a tick
        lo, hi = (lo - abs(lo) / 2, hi + abs(hi) / 2) if lo else (0.0, 1.0)
    rough = (hi - lo) / max(count, 2)
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(m for m in (1, 2, 5, 10) if rough <= m * power * 1.0001)
    # no finer than the three digits of a tick
    step = max(step, 1.0 if integers else 10.0 ** (math.floor(math.log10(size or 1.0)) - 2))
    first, last = math.floor(lo / step + 1e-9), math.ceil(hi / step - 1e-9)
    return [float(f"{k * step:.10g}") for k in range(first, last + 1)]


def data_range(*curves: Sequence[float], least: float = 0.0) -> tuple[float, float]:
    """Choose the range of the y axis: with 0 if it is near, without outliers of a curve.

    A full curve far above the others is included.

    >>> data_range([-0.03, 1.0, 4.0]), data_range([-0.5, 4.0])  # the noise of a KL at its start
    ((0.0, 4.0), (-0.5, 4.0))
    """
    lo, hi = min(map(min, curves)), least or -math.inf
    for values in curves:
        high = sorted(values)[int(0.9 * (len(values) - 1))]
        spiky = len(values) >= 10 and 0 < high < max(values) / 5
        hi = max(hi, 1.5 * high if spiky else max(values))
    # A value just below 0 counts as 0, because it would add a tick to the axis.
    return (0.0 if -1e-2 * hi <= lo <= 0.6 * hi else lo), hi


def _thin(points: Points, curves: int) -> Points:
    """Average neighbours, so that all curves of a chart have at most MOST_POINTS points."""
    size = math.ceil(len(points) * max(curves, 10) / MOST_POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(g[-1][0], sum(y for _, y in g) / len(g)) for g in groups]


def text_width(text: str, *, size: float = 11.0) -> float:
    """Estimate the width in pixels of a text in the usual sans-serif fonts."""
    return size * sum(0.82 if c in _WIDE else 0.3 if c in "il.,:' |j" else 0.62 for c in text)


def colour(hue: int) -> str:
    """Return a colour of the palette as CSS."""
    return f"var(--hue{hue % HUES})"


def line_style(hue: int) -> str:
    """Return the CSS of a curve; curves beyond the palette reuse its colours, dashed."""
    dash = _DASHES[hue // HUES % len(_DASHES)]
    return f"stroke:{colour(hue)}" + (f";stroke-dasharray:{dash}" if dash else "")
