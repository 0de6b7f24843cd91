"""What is wrong with a run, in words, from its metrics alone.

A rule is a pure function of the past: it returns what to say and what to do, or None. Each is said
once until it has been quiet for `QUIET` iterations. There is no state to save: a resumed run reads
its metrics.jsonl again. Thresholds stand where healthy runs of docs/metrics.md never come.
Left out on purpose: rules that stop a run or change it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean, median, variance
from typing import Any

from trainer.observer import Observer
from trainer.runs.run_files import ITERATION, number, read_lines

QUIET = 10  # iterations without a finding until it counts as gone: no flapping at a threshold
KEPT = 200  # iterations that the rules look back on
BASE = 10  # first iterations, which a run is compared with
SAID = {"info": ("note", ""), "warn": ("warning", "yellow"), "error": ("error", "red")}


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
    """The trained iterations so far: the first `BASE` and the last `KEPT`. None is not finite."""

    def __init__(self) -> None:
        self.first: list[dict[str, float | None]] = []
        self.lines: deque[dict[str, float | None]] = deque(maxlen=KEPT)
        self.count = 0

    def add(self, metrics: Mapping[str, Any]) -> None:
        line = {name: number(value) for name, value in metrics.items()}
        self.lines.append(line)
        self.first += [line] if self.count < BASE else []
        self.count += 1

    def last(self, name: str, size: int) -> list[float]:
        """List the latest `size` values of a metric; [] when an iteration among them lacks it."""
        found = [line.get(name) for line in list(self.lines)[-size:]]
        values = [value for value in found if value is not None]
        return values if len(values) == size else []

    def all_above(self, name: str, limit: float, size: int) -> bool:
        values = self.last(name, size)
        return bool(values) and min(values) > limit


def equal_rewards(past: Past) -> str | None:
    """All replies to a prompt (of a batch, without groups) got one reward, 10 iterations long."""
    flat, std = (past.last(n, 10) for n in ("group/zero_variance_fraction", "reward/std"))
    same = min(flat) == 1 if flat else bool(std) and max(std) < 1e-6  # rounding of a variance
    if not same:
        return None
    mean = (past.last("reward/raw_mean", 1) or [0.0])[0]
    which, variety = (
        ("all replies to a prompt", " or algorithm.group_size") if flat else ("all replies", "")
    )
    return (
        f"{which} got the same reward for 10 iterations (mean {mean:.3g}): there is nothing to "
        "learn from. Read transcripts.jsonl: if the replies differ in quality, the reward function "
        "does not see it; if none succeeds, take easier prompts or start from SFT; if all do, take "
        f"harder ones; a higher policy.temperature{variety} adds variety"
    )


def mostly_truncated(past: Past) -> str | None:
    """More than 90 % of the replies were cut, three times: the reward judges unfinished text."""
    if not past.all_above("response/truncated_fraction", 0.9, 3):
        return None
    share = past.last("response/truncated_fraction", 1)[0]
    return (
        f"{share:.0%} of the replies were cut by a length or turn limit: the reward judges "
        "unfinished replies. Raise policy.max_new_tokens or env.max_turns; if replies go on for "
        "ever, see whether the chat template ends a turn with a token that the model stops at"
    )


def kl_exploding(past: Past) -> str | None:
    """3 nats per token (to the reference one is e^3 = 20 times less likely), or a fivefold jump.

    The jump is that of three iterations over the median of 20, and beyond the healthy 20 nats.
    """
    per_reply = past.last("kl/ref_sequence", 1)
    if past.all_above("kl/ref", 3.0, 3) and per_reply:
        what = f"is {past.last('kl/ref', 1)[0]:.1f} nats per token ({per_reply[0]:.0f} per reply)"
    else:
        values = past.last("kl/ref_sequence", 23)
        usual = median(values[:20]) if values else 0.0
        if not values or min(values[20:]) <= max(5 * usual, 20.0):
            return None
        what = f"went from {usual:.1f} to {values[-1]:.0f} nats per reply"
    return (
        f"the KL to the reference {what}: the policy leaves the language of the reference, most "
        "often to please the reward with nonsense. Read the replies; raise kl.coeff, lower "
        "optimizer.lr or optimizer.max_grad_norm, go back to an earlier checkpoint"
    )


def entropy_collapsed(past: Past) -> str | None:
    """Below 0.01 nats per token (of two, one has 0.9987) all replies to a prompt are the same."""
    values = past.last("policy/entropy", 5)
    if not values or max(values) >= 0.01:
        return None
    return (
        f"the entropy is {values[-1]:.2g} nats per token: the policy always says the same and "
        "explores no more. If the reward is what you want, stop here; else go back to an earlier "
        "checkpoint with a lower optimizer.lr, a larger kl.coeff or a higher policy.temperature"
    )


def engine_mismatch(past: Past) -> str | None:
    """Above 0.1 nats per token with unchanged weights, twice what bfloat16 explains."""
    if not past.all_above("kl/mismatch", 0.1, 2):
        return None
    value = past.last("kl/mismatch", 1)[0]
    return (
        f"on the first minibatch the ratio is far from 1 (kl/mismatch {value:.2g} nats per token): "
        "what samples and what trains compute different log-probabilities for the same weights. "
        "Look for another dtype, temperature, chat template or attention in the engine, for stale "
        "weights (time/sync_s) and for dropout; policy.dtype=float32 shows whether it is rounding"
    )


def not_finite(past: Past) -> str | None:
    """A loss, gradient, reward or KL that is no number is never healthy."""
    groups = ("loss/", "optim/", "reward/", "kl/", "policy/")
    names = [n for n, v in past.lines[-1].items() if v is None and n.startswith(groups)]
    if not names:
        return None
    return (
        f"{', '.join(names)} is not finite. Steps with such a gradient are left out, so the "
        "weights are as before. Look for rewards that are not finite; lower optimizer.lr, set "
        "optimizer.max_grad_norm, or take policy.dtype=float32"
    )


def skipped_steps(past: Past) -> str | None:
    """Healthy runs leave out no step."""
    counts = [line.get("optim/skipped_steps") or 0.0 for line in list(past.lines)[-2:]]
    new = counts[-1] - (counts[0] if len(counts) > 1 else 0.0)
    if new <= 0 or not_finite(past):
        return None
    return (
        f"{new:.0f} optimiser steps of this iteration were left out: no token counted in them. "
        "Look at response/length_mean and at what empties the loss mask (filters of truncated "
        "replies, prompts that leave no room for a reply, reward/dropped_fraction)"
    )


def falling(past: Past) -> str | None:
    """Half of what was gained is lost again, or more than that, by three standard errors."""
    name, values = _signal(past)
    first = _values(past.first, name)
    if past.count < 3 * BASE or len(values) < 2 * BASE or not first:
        return None
    means = [sum(values[i : i + BASE]) / BASE for i in range(len(values) - BASE + 1)]
    start, now = fmean(first), means[-1]
    best = max(means)
    peak = values[means.index(best) :][:BASE]
    noise = 3 * ((variance(peak) + variance(values[-BASE:])) / BASE) ** 0.5
    lost = best - start > noise and best - now > max(noise, (best - start) / 2)
    if not lost and start - now <= noise:
        return None
    return (
        f"{name} gets worse ({_shown(name, start)} at first, {_shown(name, best)} at best, "
        f"{_shown(name, now)} now). Go back to a checkpoint from before the fall "
        "(checkpoint.keep_best) with a lower optimizer.lr or a larger kl.coeff"
    )


def stalled(past: Past) -> str | None:
    """The last 20 of at least 40 iterations are not above the first 10 by one standard error."""
    name, values = _signal(past)
    first, last = _values(past.first, name), values[-20:]
    if past.count < 40 or len(first) < BASE or len(last) < 20 or equal_rewards(past):
        return None
    error = (variance(first) / len(first) + variance(last) / len(last)) ** 0.5
    if fmean(last) > fmean(first) + error or falling(past):
        return None
    return (
        f"{name} is where it began ({_shown(name, fmean(first))} at first, "
        f"{_shown(name, fmean(last))} now, after {past.count} iterations). Look at "
        "group/zero_variance_fraction (are there prompts that teach?) and at kl/ref_sequence: if "
        "it stays near 0, raise optimizer.lr or lower kl.coeff; if it grows, the reward is mostly "
        "noise"
    )


def loss_near_zero(past: Past) -> str | None:
    """Group advantages have mean 0 and the ratio is 1 at the first step: so has the loss."""
    loss = past.last("loss/policy", 1)
    if not loss or abs(loss[0]) > 0.1 or not past.last("reward/raw_mean", 1):
        return None
    return (
        "a loss near 0 is right here: at ratio 1 the policy loss is the mean advantage, which "
        "says little; what it moves is the gradient. Watch reward/mean and kl/ref_sequence"
    )


Rule = Callable[[Past], str | None]
RULES: dict[str, tuple[str, Rule]] = {  # title of the alert: level, rule
    "Rewards all equal": ("warn", equal_rewards),
    "Replies truncated": ("warn", mostly_truncated),
    "KL explodes": ("error", kl_exploding),
    "Entropy collapsed": ("warn", entropy_collapsed),
    "Engine mismatch": ("error", engine_mismatch),
    "Not finite": ("error", not_finite),
    "Steps skipped": ("warn", skipped_steps),
    "Training diverges": ("error", falling),
    "Training stalls": ("warn", stalled),
    "Loss near 0": ("info", loss_near_zero),
}


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
        iteration = int(metrics.get(ITERATION) or 0)
        if iteration < 1:
            return []
        self._past.add(metrics)
        new = []
        for title, (level, rule) in RULES.items():
            name, text = rule.__name__, rule(self._past)
            latest = next((f for f in reversed(self.findings) if f.rule == name), None)
            if latest is None or latest.until is not None:
                new += [Finding(name, level, title, text, iteration)] if text else []
            elif not text and level != "info" and iteration - self._seen[name] >= QUIET:
                latest.until = iteration  # what only explains is explained once for ever
            if text:
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
            self._diagnosis = Diagnosis(
                line for line in lines if line.get(ITERATION, 0) < iteration
            )
        for found in self._diagnosis.see(metrics):
            word, style = SAID[found.level]
            text = f"{word} at iteration {found.iteration}: {found.text}"
            self._everyone.say(text, style=style)
            if found.level != "info":
                self._everyone.alert(found.title, found.text, error=found.level == "error")
        if self._diagnosis.findings:
            notes = [asdict(found) for found in self._diagnosis.findings]
            if notes != self._runtime.status.get("notes"):
                self._runtime.write_status(notes=notes)


def _signal(past: Past) -> tuple[str, list[float]]:
    """Return the name of what should rise, and its values: the reward, else minus the loss."""
    # not of the last line alone: the one whose replies were all dropped has no reward
    rewarded = any("reward/raw_mean" in line for line in past.lines)
    name = "reward/raw_mean" if rewarded else "loss/total"
    return name, _values(past.lines, name)


def _values(lines: Iterable[Mapping[str, float | None]], name: str) -> list[float]:
    sign = -1.0 if name.startswith("loss/") else 1.0
    return [sign * value for line in lines if (value := line.get(name)) is not None]


def _shown(name: str, value: float) -> str:
    return f"{-value if name.startswith('loss/') else value:.3g}"
