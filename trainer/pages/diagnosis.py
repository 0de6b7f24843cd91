"""Diagnose the problems of a run from its metrics.

A rule is a pure function of the past metrics: it returns the values for its text, or None.
diagnosis.yaml has the texts and the threshold rules. A finding is repeated only after `QUIET`
iterations without it. A resumed run rereads its metrics.jsonl.
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

QUIET = 10  # iterations without a finding until it ends, so that it is not repeated
LEARNT = "loss/policy"  # only runs that learn from rewards log it; distillation does not
WINDOW = 200  # iterations that the rules read
BASE = 10  # the first iterations, with which later ones are compared
RIGHT_BY = ("eval/right_by_normalised", "eval/right_by_words")
ACCURACIES = ("eval/sampled_accuracy", "eval/greedy_accuracy")
STYLES = {"warn": ("warning", "yellow"), "error": ("error", "red")}
WORDS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
Values = dict[str, Any] | None


@dataclass
class Finding:
    """The result of a rule. `level`: warn or error; `until`: iteration at which it ended."""

    rule: str
    level: str
    title: str
    text: str
    iteration: int
    until: int | None = None


class Past:
    """The metrics of all iterations and evaluations so far; a value that is not finite is None."""

    def __init__(self) -> None:
        self.evaluated: list[dict[str, Any]] = []
        self.lines: list[dict[str, float | None]] = []

    def add(self, metrics: Mapping[str, Any]) -> None:
        line = {name: number(value) for name, value in metrics.items()}
        self.evaluated += [line] if line.get("eval/reward") is not None else []
        self.lines += [line] if line[ITERATION] else []

    def last(self, name: str, size: int) -> list[float]:
        """List the latest `size` values of a metric; [] if one of these iterations lacks it."""
        values = [v for line in self.lines[-size:] if (v := line.get(name)) is not None]
        return values if len(values) == size else []

    def beyond(
        self, metric: str, *, times: int, above=-math.inf, below=math.inf, beside: str | None = None
    ) -> Values:
        """Return the latest value of a metric if its last `times` values are beyond a threshold.

        Return None if they are not, or if the last iteration lacks the metric `beside`.
        """
        values = self.last(metric, times) if beside is None or self.last(beside, 1) else []
        exceeded = values and above < min(values) and max(values) < below
        return {"value": values[-1]} if exceeded else None

    def signal(self) -> tuple[str, float, list[float], list[float]]:
        """Return name, sign to maximise, first and latest values of the reward, or of the loss.

        It is the loss if the policy does not learn from rewards.
        """
        lines = self.lines[-WINDOW:]
        rewarded = any({LEARNT, "reward/raw_mean"} <= line.keys() for line in lines)
        name, sign = ("reward/raw_mean", 1.0) if rewarded else ("loss/total", -1.0)
        first, last = (
            [sign * value for line in lines if (value := line.get(name)) is not None]
            for lines in (self.lines[:BASE], self.lines[-WINDOW:])
        )
        return name, sign, first, last


def not_finite(past: Past) -> Values:
    """Report losses, gradients, rewards and KLs that are not finite."""
    groups = ("loss/", "optim/", "reward/", "kl/", "policy/")
    names = [n for n, v in past.lines[-1].items() if v is None and n.startswith(groups)]
    return {"names": ", ".join(names)} if names else None


def other_match(past: Past) -> Values:
    """Report another env.match by which more than twice as many responses would be right."""
    line = past.evaluated[-1] if past.evaluated else {}
    now = next((value for kind in ACCURACIES if (value := line.get(kind)) is not None), 0.0)
    best = max(RIGHT_BY, key=lambda name: line.get(name) or 0.0)
    share = line.get(best) or 0.0
    match = best.rpartition("_")[2]
    return {"now": now, "share": share, "match": match} if share > 2 * now else None


def calls_fail(past: Past) -> Values:
    """Report that 9 of 10 tool calls fail in each of the last three iterations."""
    calls, failures = past.last("tools/calls", 3), past.last("tools/failures", 3)
    shares = [failed / total for failed, total in zip(failures, calls, strict=False) if total]
    return {"failed": shares[-1]} if len(shares) == 3 and min(shares) >= 0.9 else None


def falling(past: Past) -> Values:
    """Report a run that lost half of its gain, or fell below its start, by five standard errors.

    Three standard errors are too few, because the best of many means is high by chance.
    """
    name, sign, first, values = past.signal()
    if len(past.lines) < 3 * BASE or len(values) < 2 * BASE or not first:
        return None
    means = [fmean(values[i : i + BASE]) for i in range(len(values) - BASE + 1)]
    start, best, now = fmean(first), max(means), means[-1]
    noise = 5 * _error(values[means.index(best) :][:BASE], values[-BASE:])
    lost = best - start > noise and best - now > max(noise, (best - start) / 2)
    if not lost and start - now <= noise:
        return None
    return {"name": name, "first": sign * start, "best": sign * best, "now": sign * now}


def reward_hacked(past: Past) -> Values:
    """Report a held-out reward above the reward of the most accurate evaluation.

    Conditions: one accuracy fell by a third and by 5 points, all accuracies fell, and the training
    reward rose by three standard errors.
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
    kl = "".join(f" at {v:.1f} nats per response" for v in past.last("kl/ref_sequence", 1))
    return {**ends, "before": best[lost[0]], "after": now[lost[0]], "kl": kl}


def stalled(past: Past) -> Values:
    """Report that the last 20 of at least 40 iterations are within one error of the first 10."""
    name, sign, first, values = past.signal()
    last = values[-20:]
    if len(past.lines) < 40 or len(first) < BASE or len(last) < 20:
        return None
    if fmean(last) > fmean(first) + _error(first, last) or falling(past):
        return None
    ends = {"first": sign * fmean(first), "now": sign * fmean(last)}
    return {"name": name, "count": len(past.lines), **ends}


def _error(first: Sequence[float], last: Sequence[float]) -> float:
    """Return the standard error of the difference of two means."""
    return (variance(first) / len(first) + variance(last) / len(last)) ** 0.5


RULES = {name: globals()[name] for name, words in WORDS.items() if "when" not in words}


class Diagnosis:
    """Apply the rules to the metrics of a run; `findings`: all findings so far.

    >>> sick = Diagnosis()
    >>> line = {"response/truncated_fraction": 0.95}
    >>> [[found.rule for found in sick.see({ITERATION: i, **line})] for i in (1, 2, 3, 4)]
    [[], [], ['mostly_truncated'], []]
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self.findings: list[Finding] = []
        self._past = Past()
        self._seen: dict[str, int] = {}  # rule -> latest iteration with a finding
        for line in lines:
            self.see(line)

    def see(self, metrics: Mapping[str, Any]) -> list[Finding]:
        """Return the new findings of an iteration; 0, before training, has other rules."""
        iteration, new = int(metrics[ITERATION]), []
        self._past.add(metrics)
        active = {finding.rule: finding for finding in self.findings if finding.until is None}
        for name, words in WORDS.items():
            if not iteration and "before" not in words:
                continue
            values = RULES[name](self._past) if name in RULES else None
            for when in words.get("when", []):
                values = values or self._past.beyond(**when)
            if values is not None:
                self._seen[name] = iteration
                if name not in active:
                    text = words["text"].format(**values)
                    new.append(Finding(name, words["level"], words["title"], text, iteration))
            elif iteration - self._seen.get(name, iteration) >= QUIET and name in active:
                active[name].until = iteration
        self.findings += new
        return new


class Diagnose(Observer):
    """Report new findings to the observers `everyone` and in the status of the run."""

    def __init__(self, runtime: Any, everyone: Observer) -> None:
        self._runtime, self._everyone = runtime, everyone
        self._diagnosis: Diagnosis | None = None

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        if self._diagnosis is None:  # findings of the lines before a resume are already reported
            lines = read_lines(self._runtime.folder / "metrics.jsonl")
            self._diagnosis = Diagnosis(line for line in lines if line[ITERATION] < iteration)
        for finding in self._diagnosis.see(metrics):
            word, style = STYLES[finding.level]
            self._everyone.say(f"{word} at iteration {iteration}: {finding.text}", style=style)
            self._everyone.alert(finding.title, finding.text, error=finding.level == "error")
        notes = [asdict(finding) for finding in self._diagnosis.findings]
        if notes and notes != self._runtime.status.get("notes"):
            self._runtime.write_status(notes=notes)
