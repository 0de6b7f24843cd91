"""Which charts a run has: metrics that belong together share one. Names: docs/metrics.md."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.reports import charts, page
from trainer.runs.run_files import Run


@dataclass(frozen=True)
class Panel:
    """One chart: metric names and what the legend calls them.

    `healthy`: what a good run shows (docs/metrics.md); `stacked`: parts of a whole; `least`: the
    axis reaches this value, so that rounding errors do not fill the chart.
    """

    title: str
    unit: str
    metrics: dict[str, str]
    healthy: str = ""
    stacked: bool = False
    least: float = 0.0


MAIN = (
    Panel(
        "Reward",
        "mean per reply",
        {"reward/raw_mean": "task", "reward/mean": "with KL"},
        "rises, then levels off",
    ),
    Panel(
        "KL to the reference",
        "nats per reply (k1)",
        {"kl/ref_sequence": "kl"},
        "from 0 to at most 20; a steady climb asks for a larger kl.coeff",
    ),
    Panel(
        "Accuracy on held-out prompts",
        "share of replies",
        {
            "eval/sampled_accuracy": "sampled",
            "eval/greedy_accuracy": "greedy",
            "eval/pass@k": "pass@k",
        },
        "sampled rises, greedy does not fall",
    ),
    Panel(
        "KL per token",
        "nats per token",
        {"kl/ref": "k1", "kl/ref_k3": "k3", "kl/ref_full": "full"},
        "from 0 to between 0.01 and 1",
    ),
    Panel(
        "KL to the sampler",
        "nats per token",
        {
            "kl/behaviour": "drift in the update",
            "kl/behaviour_k3": "drift k3",
            "kl/mismatch": "engine mismatch",
        },
        "drift below 0.05; mismatch below 1e-3, in bfloat16 below 0.05",
        least=1e-3,
    ),
    Panel(
        "KL coefficient",
        "factor of the KL",
        {"kl/coeff": "coeff"},
        "as configured; an adaptive one settles",
    ),
    Panel(
        "Policy entropy",
        "nats per token",
        {"policy/entropy": "entropy"},
        "falls slowly; near 0 nothing is explored",
    ),
    Panel(
        "Reply length",
        "tokens",
        {"response/length_mean": "mean", "response/length_max": "max"},
        "no drift that the task does not ask for",
    ),
    Panel(
        "Shares to watch",
        "share of replies, groups, tokens",
        {
            "response/truncated_fraction": "cut replies",
            "group/zero_variance_fraction": "equal groups",
            "policy/clip_fraction": "clipped",
            "policy/importance_limited": "weights limited",
        },
        "cut and clipped below 0.2, equal groups below 0.8, weights limited below 0.01",
    ),
    Panel(
        "Loss",
        "mean of the last epoch's steps",
        {
            "loss/total": "total",
            "loss/policy": "policy",
            "loss/kl": "kl",
            "loss/value": "value",
            "loss/entropy": "entropy",
            "loss/preference": "preference",
        },
        "near 0 in RL, where it says little; falls in SFT",
    ),
    Panel(
        "Gradient norm",
        "before clipping",
        {"optim/grad_norm": "norm"},
        "steady; spikes are cut at optimizer.max_grad_norm",
    ),
    Panel(
        "Critic",
        "share of the returns' variance explained",
        {"value/explained_variance": "explained"},
        "above 0.3; 0 knows nothing, below 0 misleads",
    ),
    Panel(
        "Time per iteration",
        "seconds",
        {
            "time/collect_s": "collect",
            "time/score_s": "score",
            "time/update_s": "update",
            "time/sync_s": "sync",
        },
        "collect and update are the largest parts",
        stacked=True,
    ),
)
MORE = (  # folded
    Panel("Learning rate", "mean of the last epoch's steps", {"optim/lr": "lr"}, "as scheduled"),
    Panel("Speed", "tokens per second", {"perf/tokens_per_s": "tokens"}, "steady"),
    Panel(
        "Reward on held-out prompts",
        "mean per reply",
        {"eval/reward": "reward"},
        "follows the reward; a gap is over-fitting",
    ),
    Panel("Largest ratio", "policy / sampler, one token", {"policy/ratio_max": "ratio"}, "1 to 10"),
    Panel(
        "Spread of the reward",
        "standard deviation",
        {"reward/std": "std"},
        "above 0; at 0 there is nothing to learn",
    ),
    Panel(
        "Peak memory",
        "GiB of the rank that needs most",
        {"perf/peak_memory_gib": "peak"},
        "levels off after two iterations",
    ),
    Panel("Steps left out", "optimiser steps so far", {"optim/skipped_steps": "steps"}, "0"),
    Panel("Values clipped", "share of tokens", {"value/clip_fraction": "clipped"}, "below 0.3"),
)


def figures(panels: Sequence[Panel], run: Run) -> list[str]:
    """Draw those panels that the run logs something of, each with what is healthy below (HTML)."""
    drawn = ((panel, draw(panel, run)) for panel in panels)
    return [figure(chart, panel, run.names()) for panel, chart in drawn if chart]


def figure(chart: str, panel: Panel, names: Sequence[str]) -> str:
    """Put what is healthy below a chart; a tooltip names its metrics."""
    known = [name for name in panel.metrics if name in names]
    return page.figure(chart, panel.healthy, ", ".join(known))


def draw(panel: Panel, run: Run) -> str:
    """Draw a panel, or return "" if the run logs nothing of it."""
    if panel.stacked:
        return _stack(panel, run)
    if "kl/coeff" in panel.metrics and not run.series("kl/ref"):
        return ""  # there is no KL to be a factor of
    series: list[charts.Series] = []
    for index, (metric, name) in enumerate(panel.metrics.items()):
        logged = _logged(metric, run)
        points = run.series(logged)
        # an equal curve says nothing new: the task reward without a KL part, SFT's only loss
        if points and not any(_alike(points, other.points) for other in series):
            dots = metric.startswith("eval/")
            name = name if logged == metric else logged.rpartition("/")[2]
            series.append(charts.Series(name, points, hue=index, dots=dots))
    if not series:
        return ""
    return charts.line_chart(series, title=panel.title, unit=panel.unit, least=panel.least)


def others(run: Run) -> list[Panel]:
    """Make panels of what no other panel shows, reward parts together."""
    known = {_logged(metric, run) for panel in (*MAIN, *MORE) for metric in panel.metrics}
    known.add("time/iteration_s")  # the height of the stacked times
    rest = [n for n in run.names() if n not in known and not n.startswith("progress/")]
    parts = {n: n.removeprefix("reward_part/") for n in rest if n.startswith("reward_part/")}
    single = [Panel(n, "", {n: n}) for n in rest if n not in parts]
    return ([Panel("Reward parts", "mean per reply", parts)] if parts else []) + single


def _stack(panel: Panel, run: Run) -> str:
    """Draw the times of an iteration on top of each other, and what none of them counts."""
    held = [run.series(metric) for metric in panel.metrics]
    sums = [sum(value for _, value in points) for points in held]
    series = [
        charts.Series(name, points, hue=index)
        for index, (name, points) in enumerate(zip(panel.metrics.values(), held, strict=True))
        if sums[index] > 0.005 * sum(sums)
    ]
    if not series:
        return ""
    parts = [dict(s.points) for s in series]
    rest = [
        (x, max(whole - sum(part.get(x, 0.0) for part in parts), 0.0))
        for x, whole in run.series("time/iteration_s")
    ]
    series += [charts.Series("rest", rest, hue=6)] if rest else []
    return charts.stack_chart(series, title=panel.title, unit=panel.unit)


def _alike(points: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> bool:
    """Return whether two curves are one, up to the rounding of a float32."""
    pairs = zip(points, others, strict=False)
    same = all(a == b and math.isclose(x, y, rel_tol=1e-6) for (a, x), (b, y) in pairs)
    return same and len(points) == len(others)


def _logged(metric: str, run: Run) -> str:
    """Return the name under which a run logs a metric: eval/pass@k as eval/pass@8."""
    stem, at, _ = metric.partition("@")
    return next((n for n in run.names() if at and n.startswith(stem + at)), metric)
