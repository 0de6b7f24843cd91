"""Line charts as SVG text: small, readable, without dependencies or scripts.

Every chart carries its own title, unit, legend and ticks, so it stands in a page or in a file of
its own; colours follow the reader's light or dark scheme. Left out on purpose: interaction beyond
the tooltips that SVG's <title> gives.
"""

import html
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Points = Sequence[tuple[float, float]]
LIGHT = ("#2563c9", "#d4562a", "#12866a", "#8a4bc4", "#b07d00", "#c2377f", "#4d6b8a", "#6b8e23")
DARK = ("#78a9ff", "#ff9066", "#4cc9a4", "#c39bf0", "#e0b341", "#f584b9", "#a3bcd6", "#b5d46b")
_NAMES = ("--ink", "--muted", "--grid", "--paper")
_LIGHT_INK = ("#1c2530", "#5c6875", "#e3e7ec", "#ffffff")
_DARK_INK = ("#e8ecf1", "#9aa7b5", "#313a45", "#171c22")
_WIDE = set("mwMWGOQ@%")


def _variables(inks: Sequence[str], hues: Sequence[str]) -> str:
    pairs = [*zip(_NAMES, inks, strict=True), *((f"--hue{i}", hue) for i, hue in enumerate(hues))]
    return ";".join(f"{name}:{value}" for name, value in pairs)


CSS = (
    f":root{{{_variables(_LIGHT_INK, LIGHT)}}}\n"
    f"@media (prefers-color-scheme:dark){{:root{{{_variables(_DARK_INK, DARK)}}}}}\n"
    ".chart text{font:11px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}\n"
    ".chart text{fill:var(--muted)}\n"
    ".chart .title{font-size:13px;font-weight:600;fill:var(--ink)}\n"
    ".chart .value{font-size:12px;fill:var(--ink);font-variant-numeric:tabular-nums}\n"
    ".chart .grid{stroke:var(--grid);stroke-width:1}\n"
    ".chart .line{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}\n"
    ".chart .raw{fill:none;stroke-width:1;opacity:.35}\n"
    ".chart .paper{fill:var(--paper)}\n"
)


@dataclass(frozen=True)
class Series:
    """One curve. `hue`: index into the palette; `dots`: mark every point (sparse values)."""

    name: str
    points: Points
    hue: int = 0
    dots: bool = False


@dataclass(frozen=True)
class Axis:
    """Data from `lo` to `hi` onto pixels from `start` to `stop`; `warp` bends the scale."""

    lo: float
    hi: float
    start: float
    stop: float
    warp: Callable[[float], float] = float

    def __call__(self, value: float) -> float:
        lo, hi = self.warp(self.lo), self.warp(self.hi)
        share = (self.warp(min(max(value, self.lo), self.hi)) - lo) / (hi - lo)
        return round(self.start + share * (self.stop - self.start), 1)


def ticks(lo: float, hi: float, *, count: int = 4, whole: bool = False) -> list[float]:
    """Choose about `count` round numbers that enclose [lo, hi]; `whole` keeps to integers.

    >>> ticks(0.1, 0.72)
    [0.0, 0.2, 0.4, 0.6, 0.8]
    """
    if hi <= lo:
        pad = abs(lo) / 2 or 1.0
        lo, hi = lo - pad, hi + pad
    rough = (hi - lo) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(m for m in (1, 2, 5, 10) if rough <= m * power * 1.0001)
    step = max(1.0, step) if whole else step
    first, last = math.floor(lo / step + 1e-9), math.ceil(hi / step - 1e-9)
    return [float(f"{k * step:.10g}") for k in range(first, last + 1)]


def short(value: float) -> str:
    """Format a value with three significant digits.

    >>> [short(v) for v in (0, 0.12345, 1234.5, 45678, 2e-05)]
    ['0', '0.123', '1,234', '45.7k', '2e-5']
    """
    size = abs(value)
    if size >= 999_500:
        return f"{value / 1e6:.3g}M"
    if size >= 9_999.5:
        return f"{value / 1e3:.3g}k"
    if size >= 99.95:
        return f"{value:,.0f}"
    if 0 < size < 1e-3:
        mantissa, _, power = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(power)}"
    return f"{value:.3g}"


def text_width(text: str, *, size: float = 11.0) -> float:
    """Estimate the width in pixels of a text in the usual sans-serif fonts."""
    return size * sum(0.82 if c in _WIDE else 0.3 if c in "il.,:' |j" else 0.56 for c in text)


def label(x: float, y: float, text: str, *, anchor: str = "start", style: str = "") -> str:
    """Draw one escaped piece of text."""
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kind}>{html.escape(text)}</text>'


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    unit: str,
    x_label: str = "iteration",
    width: int = 360,
    height: int = 220,
    legend: bool = True,
) -> str:
    """Draw curves over an integer axis; a value far above the rest is cut, marked by a triangle."""
    series = [Series(s.name, _thin(s.points), s.hue, s.dots) for s in series if s.points]
    if not series:
        raise ValueError(f"expected at least one point for chart {title!r}, got none")
    key, top = _legend(series, width) if legend else ("", 34)
    xs = [x for s in series for x, _ in s.points]
    lo, hi = _range([y for s in series for _, y in s.points])
    y_ticks = ticks(lo, hi)
    left = 14 + max(text_width(short(t)) for t in y_ticks)
    x_ticks = ticks(min(xs), max(xs), count=max(2, width // 80), whole=True)
    x_lo, x_hi = (min(xs), max(xs)) if max(xs) > min(xs) else (min(xs) - 1, max(xs) + 1)
    x_axis = Axis(x_lo, x_hi, left, width - 12)
    y_axis = Axis(y_ticks[0], y_ticks[-1], height - 36, top + 13)
    parts = [label(2, 14, title, style="title"), label(2, 30, unit), key]
    parts += grid(y_axis, y_ticks, left=left, right=width - 12)
    bottom = height - 21
    shown = [t for t in x_ticks if x_lo <= t <= x_hi]
    parts += [label(x_axis(t), bottom, short(t), anchor="middle") for t in shown]
    parts.append(label((left + width - 12) / 2, height - 5, x_label, anchor="middle"))
    parts += [_curve(s, x_axis, y_axis) for s in series]
    return frame("".join(parts), width=width, height=height, title=title)


def frame(body: str, *, width: int, height: int, title: str) -> str:
    """Wrap drawn parts as an <svg> that scales to its box."""
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{html.escape(title)}" xmlns="http://www.w3.org/2000/svg">{body}</svg>'
    )


def standalone(charts: Sequence[str], *, width: int, height: int) -> str:
    """Put charts of one size side by side into an SVG document with its own colours and paper."""
    gap = 24
    full = len(charts) * width + (len(charts) - 1) * gap
    placed = (
        f'<g transform="translate({i * (width + gap)})">{c}</g>' for i, c in enumerate(charts)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-16 -12 {full + 32} {height + 24}" '
        f'width="{full + 32}" height="{height + 24}"><style>{CSS}</style>'
        f'<g class="chart"><rect class="paper" x="-16" y="-12" width="{full + 32}" '
        f'height="{height + 24}" rx="8"/></g>{"".join(placed)}</svg>\n'
    )


def grid(axis: Axis, values: Sequence[float], *, left: float, right: float) -> list[str]:
    """Draw the horizontal lines of a y axis with their values."""
    lines = []
    for value in values:
        y = axis(value)
        lines.append(f'<path class="grid" d="M{left:g} {y}H{right:g}"/>')
        lines.append(label(left - 6, y + 4, short(value), anchor="end"))
    return lines


def _legend(series: Sequence[Series], width: int) -> tuple[str, int]:
    """Return the legend with the last values, and the y where the plot may begin."""
    if len(series) == 1:
        value = short(series[0].points[-1][1])
        return label(width - 12, 14, value, anchor="end", style="value"), 34
    parts, x, y = [], 2.0, 47
    for s in series:
        text = f"{s.name} {short(s.points[-1][1])}"
        need = text_width(text) + 24
        if x > 2 and x + need > width:
            x, y = 2.0, y + 15
        parts.append(f'<rect x="{x:g}" y="{y - 8}" width="9" height="9" rx="2" {fill(s.hue)}/>')
        parts.append(label(x + 13, y, text))
        x += need
    return "".join(parts), y


def _curve(series: Series, x_axis: Axis, y_axis: Axis) -> str:
    place = [(x_axis(x), y_axis(y)) for x, y in series.points]
    stroke = f'style="stroke:var(--hue{series.hue % len(LIGHT)})"'
    smooth = _smooth([y for _, y in series.points]) if len(place) >= 40 else None
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
            parts.append(f'<path d="M{x - 4:g} {y}h8l-4 -7z" {fill(series.hue)}/>')
        elif radius:
            parts.append(f'<circle cx="{x}" cy="{y}" r="{radius:g}" {fill(series.hue)}/>')
        if len(place) <= 120 or value > y_axis.hi:
            tip = html.escape(f"{series.name}, {iteration:g}: {short(value)}")
            parts.append(
                f'<circle cx="{x}" cy="{y}" r="7" opacity="0"><title>{tip}</title></circle>'
            )
    return "".join(parts)


def path(place: Sequence[tuple[float, float]]) -> str:
    """Join pixels to the `d` of an SVG path."""
    return "M" + "L".join(f"{x} {y}" for x, y in place)


def fill(hue: int, what: str = "fill") -> str:
    """Return the style attribute that paints with a hue of the palette."""
    return f'style="{what}:var(--hue{hue % len(LIGHT)})"'


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Choose what the y axis shows: 0 when near, but not a few values far above the rest."""
    lo, hi = min(values), max(values)
    if len(values) >= 10:
        high = sorted(values)[int(0.9 * (len(values) - 1))]
        hi = 1.5 * high if high > 0 and hi > 5 * high else hi
    # A rounding error below 0 is 0: it must not open a whole step of the axis.
    return (0.0 if -1e-3 * hi <= lo <= 0.6 * hi else lo), hi


def _smooth(values: Sequence[float]) -> list[float]:
    """Take the median of each value and its neighbours: a tenth of the curve, centred."""
    half = len(values) // 20
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [statistics.median(window) for window in windows]


def _thin(points: Points, *, most: int = 400) -> Points:
    """Average neighbours so that a curve of a long run stays small."""
    size = math.ceil(len(points) / most)
    if size <= 1:
        return points
    groups = (points[i : i + size] for i in range(0, len(points), size))
    return [(g[-1][0], sum(y for _, y in g) / len(g)) for g in groups]
