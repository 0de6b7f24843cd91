"""The live lines at a terminal: progress, the reward so far as bars, the latest metrics."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from trainer.reports.display import KL, in_lines, named, signal, whole
from trainer.reports.formats import duration

LATEST = {
    "kl/ref": "{:z.3f} nats per token",
    "policy/entropy": "entropy {:.3f}",
    "response/length_mean": "length {:.0f}",
    "perf/tokens_per_s": "{:,.0f} tok/s",
    "time/iteration_s": "{:.1f} s",
}
BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def draw(
    title: str,
    latest: Mapping[str, float],
    *,
    done: tuple[int, int],
    times: str,
    curve: Sequence[float],
    width: int,
    unicode: bool,
) -> list[str]:
    """Return the lines: iterations `done` of all, what was logged last, the `curve` so far."""
    told = f"{done[0]}/{done[1]} {times}"
    size = min(max(width - len(f"{title} {told}") - 2, 4), 24)
    full, empty = "\u2588\u2591" if unicode else "#-"
    filled = size * done[0] // max(done[1], 1)
    values = [*signal(latest), *named(latest, KL | LATEST), split_of_time(latest)]
    if len(curve) > 1:
        values.insert(0, sparkline(curve, unicode=unicode))
    bar = f"{title} {full * filled}{empty * (size - filled)} {told}"
    return [bar, *(line.plain for line in in_lines(whole(values, "  "), width))]


def so_far(share: float, seconds: float, *, hint: bool) -> str:
    """Say how far an evaluation is, with the time left; a `hint` if that is minutes."""
    left = seconds / share - seconds if share else 0.0
    told = f"{share:.0%}, {duration(seconds)}" + (f", about {duration(left)} left" if share else "")
    return told + "; fewer rows: eval.max_rows=<n>" * (hint and left > 180)


def sparkline(values: Sequence[float], *, most: int = 24, unicode: bool = True) -> str:
    """Draw values as a row of bars from lowest to highest; more than `most` are averaged.

    >>> sparkline([0, 1, 2], unicode=False), sparkline([0, 0, 1, 3, 4, 4], most=3, unicode=False)
    ('.=#', '.=#')
    """
    levels = BLOCKS if unicode else ".:-=+*#"
    finite = [v for v in values if abs(v) < float("inf")]
    bars = min(len(finite), most)
    edges = [i * len(finite) // bars for i in range(bars + 1)] if finite else []
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    lo, hi = min(means, default=0.0), max(means, default=0.0)
    return "".join(levels[round((v - lo) / (hi - lo or 1.0) * (len(levels) - 1))] for v in means)


def split_of_time(metrics: Mapping[str, float]) -> str:
    """Return which share of an iteration each phase of at least 1 % took.

    >>> split_of_time({"time/iteration_s": 4.0, "time/collect_s": 3.0, "time/update_s": 1.0})
    'collect 75% update 25%'
    """
    whole = metrics.get("time/iteration_s", 0.0)
    return " ".join(
        f"{name.removeprefix('time/').removesuffix('_s')} {value / whole:.0%}"
        for name, value in metrics.items()
        if name.startswith("time/") and name != "time/iteration_s" and value >= whole / 100 > 0
    )
