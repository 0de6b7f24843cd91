"""docs/overoptimisation.svg: accuracy and reward against KL, a colour for each size of proxy."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from benchmarks.overoptimisation_runs import (
    Points,
    Proxy,
    all_coeffs,
    best_points,
    fit_of,
    having,
    mean_points,
    mean_way,
    near_peak,
    points,
)
from trainer.reports.chart import Chart, colour, standalone
from trainer.reports.frontier import kl_axes

WIDTH, HEIGHT, MOST = 380, 330, 9.0  # of a panel in pixels; nats shown
DASHED, THIN = ";stroke-dasharray:5 4", ";stroke-width:1;opacity:.75"


def draw(sizes: Mapping[int, Sequence[Proxy]]) -> str:
    """Return the picture: a panel for each question, the second only where a penalty was tried."""
    tried = [leash(sizes)] if len(all_coeffs(sizes)) > 1 else []
    return standalone([race(sizes), *tried, best(sizes)], width=WIDTH, height=HEIGHT)


def race(sizes: Mapping[int, Sequence[Proxy]]) -> str:
    """Draw gold, its fit and the proxy of the free policies."""
    notes = ["lines: accuracy; thin: the fit of Gao et al."]
    notes += ["dashed: the proxy's reward, from its start (bottom) to its end (top)"]
    chart = panel("Let loose: accuracy turns, reward does not", sizes, MOST, notes)
    top = highest(sizes)
    for hue, found in enumerate(sizes.values()):
        stroke, first = f"stroke:{colour(hue)}", found[0].coeffs[0]
        line(chart, mean_way(found, first), stroke)
        proxy = mean_way(found, first, "proxy")
        low, high = proxy[0][1], max(value for _, value in proxy)
        line(chart, [(kl, top * (v - low) / (high - low)) for kl, v in proxy], stroke + DASHED)
        held = near_peak(points(found, first))
        curve, begin = fit_of(held), start(found)
        end = max(kl for kl, _ in held)
        fitted = [(x, begin + curve(x)) for x in (end * (i / 60) ** 2 for i in range(61))]
        line(chart, fitted, stroke + THIN)
    return chart.svg()


def leash(sizes: Mapping[int, Sequence[Proxy]]) -> str:
    """Draw accuracy with and without a penalty."""
    coeff = all_coeffs(sizes)[-1]
    notes = [f"dots: kl.coeff={coeff}, evaluation by evaluation", "lines: without, as on the left"]
    chart = panel("On a leash: the same KL buys more", sizes, MOST / 2, notes)
    for hue, found in enumerate(sizes.values()):
        line(chart, mean_way(found, found[0].coeffs[0]), f"stroke:{colour(hue)}")
        dots(chart, mean_way(having(found, coeff), coeff), hue)
    return chart.svg()


def best(sizes: Mapping[int, Sequence[Proxy]]) -> str:
    """Draw accuracy of best-of-n by the proxy."""
    notes = ["dots: n = 2, 4 ... 128, at their exact KL", "lines: RL without a leash"]
    chart = panel("Best of n replies of the reference, by the proxy", sizes, MOST / 2, notes)
    for hue, found in enumerate(sizes.values()):
        line(chart, mean_way(found, found[0].coeffs[0]), f"stroke:{colour(hue)}")
        begin = start(found)
        each = mean_points([best_points([proxy]) for proxy in found])
        dots(chart, [(kl, begin + gain) for kl, gain in each], hue)
    return chart.svg()


def panel(
    title: str, sizes: Mapping[int, Sequence[Proxy]], most: float, notes: Sequence[str]
) -> Chart:
    """Return an empty panel with its legend and axes."""
    chart = Chart(
        title,
        "held-out accuracy, by the width of the proxy",
        width=WIDTH,
        height=HEIGHT,
    )
    chart.legend((hue, f"width {width}") for hue, width in enumerate(sizes))
    for note in notes:
        chart.top += 15
        chart.text(2, chart.top, note)
    kl_axes(chart, most, [0.0, highest(sizes)])
    return chart


def highest(sizes: Mapping[int, Sequence[Proxy]]) -> float:
    """Return the highest accuracy of all."""
    ways = [
        mean_way(having(found, coeff), coeff)
        for found in sizes.values()
        for coeff in found[0].coeffs
    ]
    best = [start(found) + gain for found in sizes.values() for _, gain in best_points(found)]
    return max([value for way in ways for _, value in way] + best)


def start(found: Sequence[Proxy]) -> float:
    return fmean(float(proxy.limit.success.mean()) for proxy in found)


def inside(chart: Chart, way: Points) -> Points:
    """Return the points within the axis, and one on its end where a line crosses it."""
    kept = [point for point in way if point[0] <= chart.x.hi]
    if len(kept) < len(way) and kept:
        (x, y), (beyond, other) = kept[-1], way[len(kept)]
        d, e, f = (math.sqrt(max(v, 0.0)) for v in (x, beyond, chart.x.hi))
        kept.append((chart.x.hi, y + (other - y) * (f - d) / (e - d)))
    return kept


def line(chart: Chart, way: Points, style: str) -> None:
    chart.path(inside(chart, way), style)


def dots(chart: Chart, way: Points, hue: int) -> None:
    for kl, value in way:
        if kl <= chart.x.hi:
            chart.dot(kl, value, f"fill:{colour(hue)};stroke:var(--paper)", radius=3.5)
