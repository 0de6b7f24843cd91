"""What is wrong with a run, in words, from its metrics alone.

A rule is a pure function of the past: it returns the values for its text, or None; diagnosis.yaml
has the texts, and rules that are a threshold. Each is said once until quiet for `QUIET` iterations.
A resumed run reads its metrics.jsonl again. Thresholds stand where healthy runs never come.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any

import yaml

from trainer.observer import Observer
from trainer.runs.run_files import ITERATION, number, read_lines

QUIET = 10  # iterations without a finding until it counts as gone: no flapping at a threshold
KEPT = 200  # iterations that the rules look back on
BASE = 10  # first iterations, which a run is compared with
ACCURACIES = ("eval/sampled_accuracy", "eval/greedy_accuracy")
SAID = {"info": ("note", ""), "warn": ("warning", "yellow"), "error": ("error", "red")}
WORDS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


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
    """All evaluations; of the iterations the first `BASE`, the last `KEPT`. None: not finite."""

    def __init__(self) -> None:
        self.evaluated: list[dict[str, Any]] = []
        self.first: list[dict[str, float | None]] = []
        self.lines: deque[dict[str, float | None]] = deque(maxlen=KEPT)
        self.count = 0

    def add(self, metrics: Mapping[str, Any]) -> None:
        line = {name: number(value) for name, value in metrics.items()}
        self.evaluated += [line] if line.get("eval/reward") is not None else []
        if (line.get(ITERATION) or 0) >= 1:
            self.lines.append(line)
            self.first += [line] if self.count < BASE else []
            self.count += 1

    def last(self, name: str, size: int) -> list[float]:
        """List the latest `size` values of a metric; [] when an iteration among them lacks it."""
        values = [v for line in list(self.lines)[-size:] if (v := line.get(name)) is not None]
        return values if len(values) == size else []

    def beyond(self, metric: str, *, times: int, above=-math.inf, below=math.inf) -> "Values":
        """Return the latest value of a metric that was so high, or so low, so many times."""
        values = [v for v in self.last(metric, times) if above < v < below]
        return {"value": values[-1]} if len(values) == times else None

    def signal(self) -> tuple[str, float, list[float], list[float]]:
        """Return the reward, else the loss: name, sign that makes it rise, `first` and `lines`."""
        # not of the last line alone: the one whose replies were all dropped has no reward
        rewarded = any("reward/raw_mean" in line for line in self.lines)
        name, sign = ("reward/raw_mean", 1.0) if rewarded else ("loss/total", -1.0)
        first, last = (
            [sign * value for line in lines if (value := line.get(name)) is not None]
            for lines in (self.first, self.lines)
        )
        return name, sign, first, last


Values = dict[str, Any] | None


def equal_rewards(past: Past) -> Values:
    """All replies to 99 % of the prompts (of a batch, without groups) got one reward, 10 times."""
    flat, std = (past.last(n, 10) for n in ("group/zero_variance_fraction", "reward/std"))
    varied = 0.01 * len(flat)  # one group that differs in one iteration of ten is forgiven
    same = len(flat) - sum(flat) < varied if flat else bool(std) and max(std) < 1e-6  # rounding
    mean = (past.last("reward/raw_mean", 1) or [0.0])[0]
    which = "all replies to a prompt" if flat else "all replies"
    variety = " or algorithm.group_size" if flat else ""
    return {"which": which, "mean": mean, "variety": variety} if same else None


def kl_exploding(past: Past) -> Values:
    """3 nats per token (to the reference one is e^3 = 20 times less likely), or a fivefold jump.

    The jump is that of three iterations over the median of 20, and beyond the healthy 20 nats.
    """
    per_reply = past.last("kl/ref_sequence", 1)
    if (high := past.beyond("kl/ref", times=3, above=3.0)) and per_reply:
        return {"what": f"is {high['value']:.1f} nats per token ({per_reply[0]:.0f} per reply)"}
    values = past.last("kl/ref_sequence", 23)
    usual = median(values[:20]) if values else 0.0
    if not values or min(values[20:]) <= max(5 * usual, 20.0):
        return None
    return {"what": f"went from {usual:.1f} to {values[-1]:.0f} nats per reply"}


def not_finite(past: Past) -> Values:
    """A loss, gradient, reward or KL that is no number is never healthy."""
    groups = ("loss/", "optim/", "reward/", "kl/", "policy/")
    names = [n for n, v in past.lines[-1].items() if v is None and n.startswith(groups)]
    return {"names": ", ".join(names)} if names else None


def skipped_steps(past: Past) -> Values:
    """Healthy runs leave out no step."""
    counts = [line.get("optim/skipped_steps") or 0.0 for line in list(past.lines)[-2:]]
    new = counts[-1] - (counts[0] if len(counts) > 1 else 0.0)
    return {"new": new} if new > 0 and not not_finite(past) else None


def falling(past: Past) -> Values:
    """Half of what was gained is lost again, or more than that, by three standard errors."""
    name, sign, first, values = past.signal()
    if past.count < 3 * BASE or len(values) < 2 * BASE or not first:
        return None
    means = [sum(values[i : i + BASE]) / BASE for i in range(len(values) - BASE + 1)]
    start, best, now = fmean(first), max(means), means[-1]
    peak = values[means.index(best) :][:BASE]
    noise = 3 * ((variance(peak) + variance(values[-BASE:])) / BASE) ** 0.5
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
    noise = 3 * (variance(first) / len(first) + variance(last) / len(last)) ** 0.5
    now, best = seen[-1], max(seen, key=lambda line: line[kinds[0]])
    ends = {"first": best["eval/reward"], "now": now["eval/reward"]}
    rises = fmean(last) - fmean(first) > noise and ends["now"] > ends["first"]
    lost = [kind for kind in kinds if best[kind] - now[kind] >= max(0.05, best[kind] / 3)]
    if not rises or not lost or any(now[kind] >= best[kind] for kind in kinds):
        return None
    kl = "".join(f" at {v:.1f} nats per reply" for v in past.last("kl/ref_sequence", 1))
    return {**ends, "before": best[lost[0]], "after": now[lost[0]], "kl": kl}


def stalled(past: Past) -> Values:
    """The last 20 of at least 40 iterations are not above the first 10 by one standard error."""
    name, sign, first, values = past.signal()
    last = values[-20:]
    if past.count < 40 or len(first) < BASE or len(last) < 20 or equal_rewards(past):
        return None
    error = (variance(first) / len(first) + variance(last) / len(last)) ** 0.5
    if fmean(last) > fmean(first) + error or falling(past):
        return None
    ends = {"first": sign * fmean(first), "now": sign * fmean(last)}
    return {"name": name, "count": past.count, **ends}


def loss_near_zero(past: Past) -> Values:
    """Group advantages have mean 0 and the ratio is 1 at the first step: so has the loss."""
    loss = past.last("loss/policy", 1)
    return {} if loss and abs(loss[0]) <= 0.1 and past.last("reward/raw_mean", 1) else None


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
        iteration, new = int(metrics.get(ITERATION) or 0), []
        self._past.add(metrics)
        for name, words in WORDS.items() if iteration else ():
            when = words.get("when")
            values = self._past.beyond(**when) if when else RULES[name](self._past)
            latest = next((f for f in reversed(self.findings) if f.rule == name), None)
            if values is None:  # what only explains is explained once for ever
                gone = iteration - self._seen.get(name, iteration) >= QUIET
                if latest and latest.until is None and gone and words["level"] != "info":
                    latest.until = iteration
                continue
            if latest is None or latest.until is not None:
                text = words["text"].format(**values)
                new.append(Finding(name, words["level"], words["title"], text, iteration))
            self._seen[name] = iteration
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
            self._diagnosis = Diagnosis(x for x in lines if x.get(ITERATION, 0) < iteration)
        for found in self._diagnosis.see(metrics):
            word, style = SAID[found.level]
            if found.level != "info":  # what only explains stands in the report
                self._everyone.say(f"{word} at iteration {iteration}: {found.text}", style=style)
                self._everyone.alert(found.title, found.text, error=found.level == "error")
        notes = [asdict(finding) for finding in self._diagnosis.findings]
        if notes and notes != self._runtime.status.get("notes"):
            self._runtime.write_status(notes=notes)
