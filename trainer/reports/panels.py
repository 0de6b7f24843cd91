"""Which charts a run has: metrics that belong together share one (panels.yaml)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from trainer.reports.chart import Points, Series, escape, line_chart, stack_chart
from trainer.runs.run_files import Run


@dataclass(frozen=True)
class Panel:
    """One chart; panels.yaml explains the fields."""

    title: str
    unit: str
    metrics: dict[str, str]
    healthy: str = ""
    stacked: bool = False
    least: float = 0.0
    swept: str = ""


_FOUND = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
MAIN, MORE = (tuple(Panel(**panel) for panel in _FOUND[name]) for name in ("main", "more"))


def figures(panels: Sequence[Panel], run: Run) -> list[str]:
    """Draw those panels that the run logs something of, each with what is healthy below (HTML)."""
    drawn = ((panel, draw(panel, run)) for panel in panels)
    names = run.names()
    return [
        figure(chart, panel.healthy, [name for name in panel.metrics if name in names])
        for panel, chart in drawn
        if chart
    ]


def figure(chart: str, healthy: str, metrics: Sequence[str]) -> str:
    """Put what is healthy below a chart; a tooltip names the metrics."""
    if not healthy:
        return chart
    names = escape(f"{', '.join(metrics)} (docs/metrics.md)")
    note = f'<figcaption title="{names}">healthy: {escape(healthy)}</figcaption>'
    return f"<figure>{chart}{note}</figure>"


def draw(panel: Panel, run: Run) -> str:
    """Draw a panel, or return "" if the run logs nothing of it."""
    if "kl/coeff" in panel.metrics and not run.series("kl/ref"):
        return ""  # there is no KL to be a factor of
    series: list[Series] = []
    for index, (metric, name) in enumerate(panel.metrics.items()):
        logged = _logged(metric, run)
        points = run.series(logged)
        # an equal curve says nothing new: the task reward without a KL part, SFT's only loss
        if points and (panel.stacked or not any(_alike(points, s.points) for s in series)):
            name = name if logged == metric else logged.rpartition("/")[2]
            series.append(Series(name, points, hue=index, dots=metric.startswith("eval/")))
    series = _parts(series, run) if panel.stacked else series
    if not series:
        return ""
    if panel.stacked:
        return stack_chart(series, title=panel.title, unit=panel.unit)
    return line_chart(series, title=panel.title, unit=panel.unit, least=panel.least)


def others(run: Run) -> list[Panel]:
    """Make panels of what no other panel shows, reward parts together."""
    known = {_logged(metric, run) for panel in (*MAIN, *MORE) for metric in panel.metrics}
    known.add("time/iteration_s")  # the height of the stacked times
    rest = [n for n in run.names() if n not in known and not n.startswith("progress/")]
    parts = {n: n.removeprefix("reward_part/") for n in rest if n.startswith("reward_part/")}
    single = [Panel(n, "", {n: n}) for n in rest if n not in parts]
    return ([Panel("Reward parts", "mean per reply", parts)] if parts else []) + single


def _parts(series: Sequence[Series], run: Run) -> list[Series]:
    """Leave out times of at most half a percent, and add what none of them counts."""
    sums = [sum(value for _, value in s.points) for s in series]
    large = [s for s, total in zip(series, sums, strict=True) if total > 0.005 * sum(sums)]
    held = [dict(s.points) for s in large]
    rest = [
        (x, max(whole - sum(part.get(x, 0.0) for part in held), 0.0))
        for x, whole in run.series("time/iteration_s")
    ]
    return large + [Series("rest", rest, hue=6)] * bool(large and rest)


def _alike(points: Points, others: Points) -> bool:
    """Return whether two curves are one, up to the rounding of a float32."""
    pairs = zip(points, others, strict=False)
    same = all(a == b and math.isclose(x, y, rel_tol=1e-6) for (a, x), (b, y) in pairs)
    return same and len(points) == len(others)


def _logged(metric: str, run: Run) -> str:
    """Return the name under which a run logs a metric: eval/pass@k as eval/pass@8."""
    stem, at, _ = metric.partition("@")
    return next((n for n in run.names() if at and n.startswith(stem + at)), metric)
