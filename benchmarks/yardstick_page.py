"""Render tables and picture of docs/yardstick.md from runs of benchmarks/yardstick.py."""

import os
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import psutil

from benchmarks.measure import markdown
from trainer.kl.frontier import ACCURACY, EVAL_KL, Frontier
from trainer.pages.chart import Series, line_chart

LIBRARIES = ("leash", "TRL")
Record = dict[str, Any]  # of a run: points, evaluation, seconds, memory


@dataclass(frozen=True)
class Case:
    """An experiment with overrides that both libraries train, and its evaluation.

    `window`: iterations averaged in a reward; `goal`: the reward to reach; `samples`, `frontier`:
    responses to each held-out prompt, of a model and of the reference; `peer`: the module that
    trains with TRL.
    """

    title: str
    words: str
    seeds: tuple[int, ...]
    threads: int
    samples: int
    frontier: int
    window: int
    goal: float
    peer: str = "benchmarks.yardstick_trl"


@dataclass(frozen=True)
class Point:
    """An iteration: seconds since the start and of processors, responses so far, mean reward."""

    seconds: float
    cpu: float
    responses: int
    reward: float


def points(
    rows: Sequence[dict[str, Any]], times: Sequence[tuple[float, float]], *, responses: int
) -> list[Point]:
    """Return the iterations of a log of either library, `responses` in each.

    >>> points([{"progress/iteration": 0}, {"reward/raw_mean": 0.5}], [(1, 1), (3, 2)], responses=8)
    [Point(seconds=3, cpu=2, responses=8, reward=0.5)]
    >>> points([{"step": 1, "reward": 0.5}, {"train_loss": 0.1}], [(2, 1), (3, 1)], responses=8)
    [Point(seconds=2, cpu=1, responses=8, reward=0.5)]
    """
    seen = [
        (at, row.get("reward/raw_mean", row.get("reward")))
        for row, at in zip(rows, times, strict=True)
    ]
    logged = [(at, reward) for at, reward in seen if reward is not None]
    return [Point(*at, (i + 1) * responses, reward) for i, (at, reward) in enumerate(logged)]


def logged_kl(rows: Sequence[dict[str, Any]], *, window: int) -> float:
    """Return k3 from a library's log in nats per response, a mean over the last iterations.

    Both log the mean over tokens (TRL weighted by the ratio, 1 on policy), here times the length.
    """
    names = ("kl/ref_k3", "response/length_mean"), ("kl", "completions/mean_length")
    values = [row[k3] * row[length] for row in rows for k3, length in names if k3 in row]
    return fmean(values[-window:])


def smooth(run: Record, window: int) -> list[Point]:
    """Return the points of a run, each reward averaged over the last `window`."""
    curve = [Point(**point) for point in run["points"]]
    rewards = [point.reward for point in curve]
    return [
        Point(p.seconds, p.cpu, p.responses, fmean(rewards[max(0, i + 1 - window) : i + 1]))
        for i, p in enumerate(curve)
    ]


def reached(run: Record, case: Case) -> Point | None:
    """Return the first point whose mean reward reaches the goal, else None."""
    return next((p for p in smooth(run, case.window) if p.reward >= case.goal), None)


def pace(run: Record, clock: str) -> float:
    """Return the mean seconds per iteration after the first, by a clock of `Point`.

    A median of single iterations would be a multiple of the measuring interval.

    >>> pace({"points": [{"cpu": at} for at in (9.0, 10.0, 12.0, 13.5)]}, "cpu")
    1.5
    """
    first, *_, last = (point[clock] for point in run["points"])
    return (last - first) / (len(run["points"]) - 1)


def spread(values: Sequence[float | None], form: str) -> str:
    """Return the mean of the seeds and their range, or the number of seeds with a value.

    >>> spread([0.5], ".2f"), spread([1.0, 3.0], ".1f"), spread([1.0, None], ".1f")
    ('0.50', '2.0 (1.0 to 3.0)', '1.0 (1 of 2 seeds)')
    """
    have = [value for value in values if value is not None]
    if not have:
        return "-"
    mean = format(fmean(have), form)
    if len(have) < len(values):
        return f"{mean} ({len(have)} of {len(values)} seeds)"
    ends = f" ({min(have):{form}} to {max(have):{form}})"
    return mean + ends * (len(have) > 1)


def table(case: Case, runs: Sequence[Record], frontier: Frontier) -> str:
    """Return the results of a case, a column per library."""

    def efficiency(run: Record) -> float | None:
        return frontier.efficiency(ACCURACY, run["eval"][ACCURACY], run["eval"][EVAL_KL])

    def at(field: str) -> Callable[[Record], float | None]:
        return lambda run: getattr(reached(run, case), field, None)

    before = runs[0]["before"]
    samples = f"{before['rows']} prompts x {case.samples}"
    lines: list[tuple[str, Callable[[Record], float | None], str]] = [
        (f"reward, last {case.window} iterations",
         lambda r: smooth(r, case.window)[-1].reward, ".3f"),
        (f"held-out accuracy, sampled, {samples} (before: {before[ACCURACY]:.3f})",
         lambda r: r["eval"][ACCURACY], ".3f"),
        (f"held-out accuracy, greedy (before: {before['greedy']:.3f})",
         lambda r: r["eval"]["greedy"], ".3f"),
        ("KL of these responses to the reference, nats per response",
         lambda r: r["eval"][EVAL_KL], ".2f"),
        ("KL efficiency (1: the least possible KL)", efficiency, ".2f"),
        (f"k3 in its own log, last {case.window} iterations, nats per response",
         lambda r: r["logged_kl"], ".2f"),
        (f"responses until the reward is {case.goal:g}", at("responses"), ",.0f"),
        (f"seconds until the reward is {case.goal:g}", at("seconds"), ".0f"),
        ("seconds per iteration, after the first", lambda r: pace(r, "seconds"), ".2f"),
        ("CPU seconds per iteration, after the first", lambda r: pace(r, "cpu"), ".2f"),
        ("seconds, start to end", lambda r: r["wall"], ".0f"),
        ("peak memory, MiB", lambda r: r["peak"] / 2**20, ",.0f"),
    ]  # fmt: skip
    rows = []
    for name, value, form in lines:
        cells = [
            spread([value(run) for run in runs if run["library"] == library], form)
            for library in LIBRARIES
        ]
        rows.append([name, *cells])
    return markdown([case.title, *LIBRARIES], rows)


def charts(case: Case, runs: Sequence[Record]) -> list[str]:
    """Return the reward of a case against seconds and against responses, means of the seeds."""
    curves = {}
    for library in LIBRARIES:
        each = [smooth(run, case.window) for run in runs if run["library"] == library]
        curves[library] = [
            Point(*(fmean(values) for values in zip(*(vars(p).values() for p in at), strict=True)))
            for at in zip(*each, strict=False)
        ]
    out = []
    for field, label in (
        ("seconds", "seconds since the start"),
        ("responses", "responses sampled"),
    ):
        series = [
            Series(library, [(getattr(p, field), p.reward) for p in curve], hue=hue)
            for hue, (library, curve) in enumerate(curves.items())
        ]
        unit = f"reward, mean of {case.window} iterations"
        out.append(line_chart(series, title=case.title, unit=unit, x_label=label))
    return out


def about(runs: Sequence[Record]) -> str:
    """Describe the versions and the machine of the runs.

    >>> import torch
    >>> from trainer.runs.versions import about_machine
    >>> theirs = dict.fromkeys(("trl", "torch", "transformers", "accelerate"), "1.2")
    >>> versions = about_machine(torch.device("cpu"), ranks=1), theirs
    >>> text = about([{"library": n, "versions": v} for n, v in zip(LIBRARIES, versions)])
    >>> text[:6], "TRL 1.2, torch 1.2, transformers 1.2, accelerate 1.2;" in text
    ('leash ', True)
    """
    ours, theirs = (next(r for r in runs if r["library"] == n)["versions"] for n in LIBRARIES)
    commit = ours.get("commit", "no commit")
    out = [f"leash {ours['leash-rl']} at `{commit}`", f"TRL {theirs['trl']}"]
    out += [f"{name} {theirs[name]}" for name in ("torch", "transformers", "accelerate")]
    cores = f"{os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, no GPU"
    return f"{', '.join(out)}; Python {platform.python_version()}; {cores}."


def fill(page: str, measured: str) -> str:
    """Replace the text between the two marks of a page.

    >>> fill("a <!-- measured --> old <!-- end --> b", "new")
    'a <!-- measured -->\\n\\nnew\\n\\n<!-- end --> b'
    """
    marks = "<!-- measured -->", "<!-- end -->"
    page = page if all(mark in page for mark in marks) else f"{page}{marks[0]}{marks[1]}\n"
    between = f"{marks[0]}\n\n{measured}\n\n{marks[1]}"
    return re.sub(f"{marks[0]}.*?{marks[1]}", lambda _: between, page, count=1, flags=re.S)
