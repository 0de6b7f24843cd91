"""What is wrong with a run, in words, from its metrics alone.

A rule is a pure function of the past: it returns the values for its text, or None; diagnosis.yaml
has the texts, and rules that are a threshold. Each is said once until quiet for `QUIET` iterations.
A resumed run reads its metrics.jsonl again. Thresholds stand where healthy runs never come.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import yaml

from trainer.observer import Observer
from trainer.runs.run_files import ITERATION, number, read_lines

QUIET = 10  # iterations without a finding until it counts as gone: no flapping at a threshold
KEPT = 200  # iterations that the rules look back on
BASE = 10  # first iterations, which a run is compared with
ACCURACIES = ("eval/sampled_accuracy", "eval/greedy_accuracy")
SAID = {"warn": ("warning", "yellow"), "error": ("error", "red")}
WORDS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
Values = dict[str, Any] | None


@dataclass
class Finding:
    """What a rule said. `level`: info, warn or error; `until`: iteration at which it was gone."""

    rule: str
    level: str
    title: str
    text: str
    iteration: int
    until: int | None = None


class Past:
    """All iterations and all evaluations so far; None: not finite."""

    def __init__(self) -> None:
        self.evaluated: list[dict[str, Any]] = []
        self.lines: list[dict[str, float | None]] = []

    def add(self, metrics: Mapping[str, Any]) -> None:
        line = {name: number(value) for name, value in metrics.items()}
        self.evaluated += [line] if line.get("eval/reward") is not None else []
        self.lines += [line] if line[ITERATION] else []

    def last(self, name: str, size: int) -> list[float]:
        """List the latest `size` values of a metric; [] when an iteration among them lacks it."""
        values = [v for line in self.lines[-size:] if (v := line.get(name)) is not None]
        return values if len(values) == size else []

    def beyond(self, metric: str, *, times: int, above=-math.inf, below=math.inf) -> Values:
        """Return the latest value of a metric that was so high, or so low, so many times."""
        values = self.last(metric, times)
        found = values and above < min(values) and max(values) < below
        return {"value": values[-1]} if found else None

    def signal(self) -> tuple[str, float, list[float], list[float]]:
        """Return the reward, else the loss: name, sign that makes it rise, first and latest."""
        rewarded = any("reward/raw_mean" in line for line in self.lines[-KEPT:])
        name, sign = ("reward/raw_mean", 1.0) if rewarded else ("loss/total", -1.0)
        first, last = (
            [sign * value for line in lines if (value := line.get(name)) is not None]
            for lines in (self.lines[:BASE], self.lines[-KEPT:])
        )
        return name, sign, first, last


def not_finite(past: Past) -> Values:
    """A loss, gradient, reward or KL that is no number is never healthy."""
    groups = ("loss/", "optim/", "reward/", "kl/", "policy/")
    names = [n for n, v in past.lines[-1].items() if v is None and n.startswith(groups)]
    return {"names": ", ".join(names)} if names else None


def falling(past: Past) -> Values:
    """Half of what was gained is lost again, or more than that, by three standard errors."""
    name, sign, first, values = past.signal()
    if len(past.lines) < 3 * BASE or len(values) < 2 * BASE or not first:
        return None
    means = [fmean(values[i : i + BASE]) for i in range(len(values) - BASE + 1)]
    start, best, now = fmean(first), max(means), means[-1]
    noise = 3 * _error(values[means.index(best) :][:BASE], values[-BASE:])
    lost = best - start > noise and best - now > max(noise, (best - start) / 2)
    if not lost and start - now <= noise:
        return None
    return {"name": name, "first": sign * start, "best": sign * best, "now": sign * now}


def reward_hacked(past: Past) -> Values:
    """Held-out replies earn more than those of the best evaluation and fewer of them are right.

    By a third and 5 points in one accuracy, in all of them by something; three standard errors of
    the reward in training. Replies that are right less often do not earn more by chance.
    """
    (name, _, first, values), seen = past.signal(), past.evaluated
    kinds = [k for k in ACCURACIES if all(line.get(k) is not None for line in seen)]
    last = values[-min(BASE, len(values) // 2) :]
    if name != "reward/raw_mean" or not (seen and kinds) or min(len(first), len(last)) < 3:
        return None
    now, best = seen[-1], max(seen, key=lambda line: line[kinds[0]])
    ends = {"first": best["eval/reward"], "now": now["eval/reward"]}
    rises = fmean(last) - fmean(first) > 3 * _error(first, last) and ends["now"] > ends["first"]
    lost = [kind for kind in kinds if best[kind] - now[kind] >= max(0.05, best[kind] / 3)]
    if not rises or not lost or any(now[kind] >= best[kind] for kind in kinds):
        return None
    kl = "".join(f" at {v:.1f} nats per reply" for v in past.last("kl/ref_sequence", 1))
    return {**ends, "before": best[lost[0]], "after": now[lost[0]], "kl": kl}


def stalled(past: Past) -> Values:
    """The last 20 of at least 40 iterations are not above the first 10 by one standard error."""
    name, sign, first, values = past.signal()
    last = values[-20:]
    if len(past.lines) < 40 or len(first) < BASE or len(last) < 20:
        return None
    if fmean(last) > fmean(first) + _error(first, last) or falling(past):
        return None
    ends = {"first": sign * fmean(first), "now": sign * fmean(last)}
    return {"name": name, "count": len(past.lines), **ends}


def loss_near_zero(past: Past) -> Values:
    """Group advantages have mean 0 and the ratio is 1 at the first step: so has the loss."""
    loss = past.last("loss/policy", 1)
    return {} if loss and abs(loss[0]) <= 0.1 and past.last("reward/raw_mean", 1) else None


def _error(first: Sequence[float], last: Sequence[float]) -> float:
    """Return the standard error of the difference of two means."""
    return (variance(first) / len(first) + variance(last) / len(last)) ** 0.5


RULES = {name: globals()[name] for name, words in WORDS.items() if "when" not in words}


class Diagnosis:
    """Follow the metrics of a run; `findings` is all that was said so far.

    >>> sick = Diagnosis()
    >>> line = {"response/truncated_fraction": 0.95}
    >>> [[found.rule for found in sick.see({ITERATION: i, **line})] for i in (1, 2, 3, 4)]
    [[], [], ['mostly_truncated'], []]
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self.findings: list[Finding] = []
        self._past = Past()
        self._seen: dict[str, int] = {}  # rule: latest iteration at which it had something to say
        for line in lines:
            self.see(line)

    def see(self, metrics: Mapping[str, Any]) -> list[Finding]:
        """Return what is new at this iteration; the evaluation before training says nothing."""
        iteration, new = int(metrics[ITERATION]), []
        self._past.add(metrics)
        said = {found.rule: found for found in self.findings if found.until is None}
        for name, words in WORDS.items() if iteration else ():
            values = RULES[name](self._past) if name in RULES else None
            for when in words.get("when", []):
                values = values or self._past.beyond(**when)
            if values is not None:
                self._seen[name] = iteration
                if name not in said:
                    text = words["text"].format(**values)
                    new.append(Finding(name, words["level"], words["title"], text, iteration))
            elif iteration - self._seen.get(name, iteration) >= QUIET and name in said:
                said[name].until = iteration
        self.findings += new
        return new


class Diagnose(Observer):
    """Say what is new to `everyone` who watches, and in the status of the run."""

    def __init__(self, runtime: Any, everyone: Observer) -> None:
        self._runtime, self._everyone = runtime, everyone
        self._diagnosis: Diagnosis | None = None

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        if self._diagnosis is None:  # a resumed run has lines already; their findings were said
            lines = read_lines(self._runtime.folder / "metrics.jsonl")
            self._diagnosis = Diagnosis(line for line in lines if line[ITERATION] < iteration)
        for found in self._diagnosis.see(metrics):
            if found.level != "info":  # what only explains stands in the report
                word, style = SAID[found.level]
                self._everyone.say(f"{word} at iteration {iteration}: {found.text}", style=style)
                self._everyone.alert(found.title, found.text, error=found.level == "error")
        notes = [asdict(finding) for finding in self._diagnosis.findings]
        if notes and notes != self._runtime.status.get("notes"):
            self._runtime.write_status(notes=notes)
