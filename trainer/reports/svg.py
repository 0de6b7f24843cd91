"""Pieces of charts as SVG text: scales, ticks, labels, colours.

Colours follow the reader's light or dark scheme, and are those of Okabe and Ito made darker or
lighter, which the colour-blind tell apart too.
"""

import html
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

LIGHT = ("#0069a8", "#cc5500", "#008a65", "#b0558a", "#b07b00", "#3d97cf", "#5b6673", "#7d7400")
DARK = ("#6bb5ec", "#ff9152", "#3fcca2", "#e79fc8", "#f0bb45", "#a5d8f5", "#aab5c1", "#ddd45e")
_NAMES = ("--ink", "--muted", "--grid", "--paper")
_LIGHT_INK = ("#1c2530", "#5c6875", "#e3e7ec", "#ffffff")
_DARK_INK = ("#e8ecf1", "#9aa7b5", "#313a45", "#171c22")
_DASHES = ("", "5 3", "1.5 3", "8 3 1.5 3")  # of the curves that share a chart, beside their hues
_WIDE = set("mwMWGOQ@%")
MOST_TIPS = 120
_NO_TEXT = re.compile("[^\n\t -\ufffd\U00010000-\U0010ffff]")  # control characters and the like


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
    ".chart .line,.chart .raw{fill:none;pointer-events:none}\n"
    ".chart .line{stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}\n"
    ".chart .raw{stroke-width:1;opacity:.35}\n"
    ".chart .area{stroke:var(--paper);stroke-width:.7}\n"
    ".chart .paper{fill:var(--paper)}\n"
    ".chart .tip{opacity:0}.chart .tip:hover{opacity:.08;fill:var(--ink)}\n"
)


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
    close = 1e-9 if whole else 1e-3  # equal to the digits that a tick shows
    if hi - lo <= close * max(abs(lo), abs(hi)):
        lo, hi = (lo - abs(lo) / 2, hi + abs(hi) / 2) if lo else (0.0, 1.0)
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


def escape(text: object) -> str:
    """Escape a text for HTML and XML; what neither may hold becomes the replacement character.

    >>> escape("<b>\x1b")
    '&lt;b&gt;\ufffd'
    """
    return html.escape(_NO_TEXT.sub("\ufffd", str(text)))


def text_width(text: str, *, size: float = 11.0) -> float:
    """Estimate the width in pixels of a text in the usual sans-serif fonts."""
    return size * sum(0.82 if c in _WIDE else 0.3 if c in "il.,:' |j" else 0.62 for c in text)


def label(x: float, y: float, text: str, *, anchor: str = "start", style: str = "") -> str:
    """Draw one escaped piece of text."""
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'


def tips(
    values: dict[float, list[str]], x_axis: Axis, y_axis: Axis, *, x_label: str = "iteration"
) -> list[str]:
    """Draw a column per iteration that tells its values; of a long run every n-th."""
    xs = sorted(values)[:: -(-len(values) // MOST_TIPS)]
    places = [x_axis(x) for x in xs]
    edges = [(a + b) / 2 for a, b in pairwise(places)]
    top, bottom = min(y_axis.start, y_axis.stop), max(y_axis.start, y_axis.stop)
    out = []
    for x, lo, hi in zip(
        xs, [x_axis.start, *edges], [*edges, max(x_axis.stop, x_axis.start + 1)], strict=True
    ):
        text = escape(f"{x_label} {x:g}: {', '.join(values[x])}")
        box = f'x="{lo:g}" y="{top:g}" width="{hi - lo:g}" height="{bottom - top:g}"'
        out.append(f'<rect class="tip" {box}><title>{text}</title></rect>')
    return out


def frame(body: str, *, width: int, height: int, title: str) -> str:
    """Wrap drawn parts as an <svg> that scales to its box."""
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg">{body}</svg>'
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


def legend(entries: Iterable[tuple[int, str]], width: int) -> tuple[str, int]:
    """Return the drawn legend of (hue, text) pairs, and the y where the plot may begin."""
    parts, x, y = [], 2.0, 47
    for hue, text in entries:
        need = text_width(text) + 24
        if x > 2 and x + need > width:
            x, y = 2.0, y + 15
        parts.append(f'<rect x="{x:g}" y="{y - 8}" width="9" height="9" rx="2" {fill(hue)}/>')
        parts.append(label(x + 13, y, text))
        x += need
    return "".join(parts), y


def path(place: Sequence[tuple[float, float]]) -> str:
    """Join pixels to the `d` of an SVG path."""
    return "M" + "L".join(f"{x} {y}" for x, y in place)


def fill(hue: int, what: str = "fill") -> str:
    """Return the style attribute that paints with a hue of the palette."""
    return f'style="{what}:var(--hue{hue % len(LIGHT)})"'


def line_style(hue: int) -> str:
    """Return the CSS of a curve; those beyond the palette repeat its hues, dashed."""
    dash = _DASHES[hue // len(LIGHT) % len(_DASHES)]
    return f"stroke:var(--hue{hue % len(LIGHT)})" + (f";stroke-dasharray:{dash}" if dash else "")
