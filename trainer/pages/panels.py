"""Choose and draw the charts of a run; related metrics share a chart (panels.yaml)."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trainer.pages.chart import Points, Series, line_chart
from trainer.pages.formats import short
from trainer.runs.run_files import Run, dig, number

PARTS = "Reward parts"


@dataclass(frozen=True)
class Panel:
    """One chart; panels.yaml explains the fields."""

    title: str
    unit: str
    metrics: dict[str, str]
    healthy: str = ""
    least: float = 0.0
    swept: str = ""
    limits: dict[str, tuple[float, float]] = field(default_factory=dict)
    loses: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, str] = field(default_factory=dict)
    rules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    """A chart (SVG), the note below it, its metrics, and a warning: level and text.

    `flat`: all curves are constant.
    """

    chart: str
    note: str = ""
    metrics: Sequence[str] = ()
    warning: tuple[str, str] | None = None
    flat: bool = False


_PANELS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
MAIN, MORE = (tuple(Panel(**panel) for panel in _PANELS[name]) for name in ("main", "more"))


def figures(panels: Sequence[Panel], run: Run) -> list[Figure]:
    """Draw the panels whose metrics a run logs, each with its healthy range below."""
    names = run.names()
    return [
        Figure(
            chart,
            f"healthy: {healthy}" if (healthy := panel.healthy or _limits(panel, names)) else "",
            [name for name in panel.metrics if name in names],
            unhealthy(panel, run),
            all(
                _constant(run.series(_logged(metric, run)), panel.least) for metric in panel.metrics
            ),
        )
        for panel in panels
        if (chart := draw(panel, run))
    ]


def _limits(panel: Panel, names: Collection[str]) -> str:
    """Describe the limits of the metrics that a run logs."""
    known = {name: most for name, (_, most) in panel.limits.items() if name in names}
    return ", ".join(f"{panel.metrics[name]} below {most:g}" for name, most in known.items())


def unhealthy(panel: Panel, run: Run) -> tuple[str, str] | None:
    """Return level and text of the warning below a panel, by rules and limits; None if healthy.

    Open findings of the diagnosis come first, errors before warnings.
    """
    for note in open_notes(run):
        if note.get("rule") in panel.rules:
            return note["level"], f"{note['title']} (iteration {note['iteration']})"
    for metric, (low, high) in panel.limits.items():
        value = run.last_ten_mean(metric)
        if value is not None and not low <= value <= high:
            bound = f"below {low:g}" if value < low else f"above {high:g}"
            return "warn", f"{panel.metrics[metric]} {short(value)}, {bound}"
    for metric, most in panel.loses.items():
        values = [value for _, value in run.series(metric)]
        if values and values[0] - values[-1] > most:
            ends = f"{short(values[0])} at first, {short(values[-1])} now"
            return "warn", f"{panel.metrics[metric]} fell: {ends}"
    return None


def open_notes(run: Run) -> list[dict[str, Any]]:
    """List the open errors and warnings of a run."""
    return [note for note in notes_of(run) if note.get("until") is None]


def notes_of(run: Run) -> list[dict[str, Any]]:
    """List the findings of a run (diagnosis.py), errors first."""
    notes = run.status.get("notes", [])
    return [note for level in ("error", "warn") for note in notes if note["level"] == level]


def draw(panel: Panel, run: Run) -> str:
    """Draw a panel; "" if the run logs none of its metrics."""
    if "kl/coeff" in panel.metrics and not run.series("kl/ref"):
        return ""  # no KL is multiplied by the coefficient
    series: list[Series] = []
    for index, (metric, name) in enumerate(panel.metrics.items()):
        logged = _logged(metric, run)
        points = run.series(logged)
        # Leave out equal curves: the task reward if there is no KL part, SFT's only loss.
        if points and not any(_alike(points, s.points) for s in series):
            name = name if logged == metric else logged.rpartition("/")[2]
            series.append(Series(name, points, hue=index, dots=metric.startswith("eval/")))
    values = {name: number(dig(run.config, *key.split("."))) for key, name in panel.bounds.items()}
    bounds = {name: value for name, value in values.items() if value is not None}
    several = len(panel.metrics) > 1 or panel.title == PARTS
    which = f", {series[0].name}" if several and len(series) == 1 else ""
    about = {"title": panel.title, "unit": panel.unit + which}
    about |= {"least": panel.least, "bounds": bounds}
    return line_chart(series, **about) if series else ""


def shown(run: Run) -> tuple[list[Figure], list[Figure], list[str]]:
    """Draw the curves of a run: the shown ones, the folded ones, and the titles of empty ones.

    Custom metrics come after reward, KL and accuracy; flat and healthy curves are folded. A folded
    panel whose values are all 0 is not drawn.
    """
    ours = {metric.split("/")[0] for panel in (*MAIN, *MORE) for metric in panel.metrics}
    rest = others(run)
    custom = [panel for panel in rest if ours.isdisjoint(n.split("/")[0] for n in panel.metrics)]
    first = figures([*MAIN[:3], *custom, *MAIN[3:]], run)
    folded = [figure for figure in first if figure.flat and not figure.warning]
    last = [panel for panel in (*MORE, *rest) if panel not in custom]
    zero = [panel for panel in last if _always_zero(panel, run)]
    more = figures([panel for panel in last if panel not in zero], run)
    titles = [panel.title for panel in zero]
    return [figure for figure in first if figure not in folded], folded + more, titles


def others(run: Run) -> list[Panel]:
    """Return panels for the metrics of no other panel, reward parts together."""
    known = {_logged(metric, run) for panel in (*MAIN, *MORE) for metric in panel.metrics}
    rest = [n for n in run.names() if n not in known and not n.startswith("progress/")]
    parts = {n: n.removeprefix("reward_part/") for n in rest if n.startswith("reward_part/")}
    single = [Panel(n, "", {n: n}) for n in rest if n not in parts]
    return ([Panel(PARTS, "mean per response", parts)] if parts else []) + single


def _alike(points: Points, others: Points) -> bool:
    """Return whether two curves are equal, up to the rounding of a float32."""
    return len(points) == len(others) and all(
        a == b and math.isclose(x, y, rel_tol=1e-6)
        for (a, x), (b, y) in zip(points, others, strict=True)
    )


def _constant(points: Points, least: float) -> bool:
    """Return whether a curve is empty, or has at least three values, equal up to rounding."""
    values = [value for _, value in points] or [0.0] * 3
    rounding = 1e-6 * max(map(abs, values)) + 0.01 * least
    return len(values) > 2 and max(values) - min(values) <= rounding


def _always_zero(panel: Panel, run: Run) -> bool:
    """Return whether a run logs metrics of a panel, each 0 in every iteration."""
    values = {value for m in panel.metrics for _, value in run.series(_logged(m, run))}
    return values == {0.0}


def _logged(metric: str, run: Run) -> str:
    """Return the name by which a run logs a metric: eval/pass@8 for eval/pass@k."""
    stem, at, _ = metric.partition("@")
    return next((n for n in run.names() if at and n.startswith(stem + at)), metric)
