"""The limit: what no policy can pass, from samples of the reference alone.

The best policy at coefficient c is the reference reweighted, ref * exp(r / c) / Z: the largest
E[r] - c KL there is (Korbak et al. 2022, arXiv 2205.11275, section 3). With n replies of the
reference to a prompt, `rewards` [P, n],

    weights = softmax(r / c)            self-normalised
    log Z   = logmeanexp(r / c)
    KL      = E*[r] / c - log Z         >= 0, at most ln n

per prompt, then averaged. A reward of 0 or 1 makes it a function of the pass rates p alone: at odds
raised by e^l the best policy is right with a = p e^l / (1 - p + p e^l), l = 1 / c, and no policy
with its mean accuracy has a smaller KL than the mean of kl_Bernoulli(a || p).

Samples err to one side: near their end what is rare is seen too seldom, so the KL comes out too
high. How far, a bootstrap says: replies are drawn again from the samples, and what that changes on
average is taken off (Davison and Hinkley 1997, section 2.1).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

ACCURACY, HELD_REWARD, HELD_KL = "eval/sampled_accuracy", "eval/reward", "eval/kl_ref_sequence"
FILE = "frontier.json"  # of a run or a sweep: samples of the reference
Array = NDArray[np.float64]
BENDS = 80  # points of a curve
FALL_SHORT = 0.1  # of the redraws at most, of what is still judged


@dataclass(frozen=True)
class Curve:
    """A line in the picture of reward (or accuracy) against KL, in order of KL.

    `kl` in nats per reply, `value` [N]; between `low` and `high` is the truth nine times of ten.
    """

    kl: Array
    value: Array
    low: Array
    high: Array


def optimum(rewards: Array, coeff: float) -> tuple[float, float]:
    """Return KL and mean reward of the best policy at this coefficient > 0; `rewards` [P, n].

    >>> kl, reward = optimum(np.array([[0.0, 1.0]]), 1.0)  # a reference that is right half the time
    >>> math.isclose(reward, math.e / (1 + math.e)), round(kl, 3)
    (True, 0.111)
    """
    middle = rewards.mean(1, keepdims=True)  # [P, 1]; a KL is that of differences alone
    scaled = (rewards - middle) / coeff  # [P, n]
    top = scaled.max(1, keepdims=True)
    raised = np.exp(scaled - top)
    mean = (raised * scaled).sum(1) / raised.sum(1)  # [P]
    log_z = np.log(raised.mean(1)) + top[:, 0]
    return float((mean - log_z).mean()), float((mean * coeff + middle[:, 0]).mean())


def least_kl(rewards: Array, reward: float) -> float | None:
    """Return the KL of the best policy with this mean reward; None where no sample shows one.

    0 for what the reference itself reaches; nothing is corrected for bias.

    >>> least_kl(np.array([[0.0, 1.0]]), 0.5), least_kl(np.array([[0.0, 0.0]]), 0.1)
    (0.0, None)
    """
    if reward <= rewards.mean():
        return 0.0
    spread = float(np.ptp(rewards, axis=1).max())
    tops = rewards.max(1, keepdims=True)  # [P, 1]
    best = float(tops.mean())
    if spread > 0 and math.isclose(reward, best, rel_tol=1e-9):  # only the best replies are left
        return float(-np.log((rewards == tops).mean(1)).mean())
    if spread == 0 or not reward < best:
        return None
    low, high = spread / 700, spread * 1e6  # of the coefficient: exp(700) is the largest double
    binary = bool(np.isin(rewards, (0, 1)).all())
    few = rewards.mean(1) if binary else rewards
    for _ in range(64):
        middle = math.sqrt(low * high)  # more reward at smaller ones
        _, (_, got) = path(few, np.array([middle]))
        low, high = (middle, high) if got > reward else (low, middle)
    (_, kl), (_, got) = path(few, np.array([high]))
    return kl if math.isclose(got, reward, rel_tol=1e-6, abs_tol=1e-9) else None


class Bounds:
    """The bias-corrected limit by samples `rewards` [P, n], up to the KL that they support.

    Each of `draws` bootstrap sets of a prompt's replies gives another limit. A value that more than
    a tenth of them cannot reach is beyond what the samples show.
    """

    def __init__(self, rewards: Array, *, draws: int = 100, seed: int = 0) -> None:
        count = rewards.shape[1]
        self.rewards, self.count = rewards, count
        spread = float(np.ptp(rewards, axis=1).max())
        coeffs = spread * np.geomspace(30.0, 1 / 300, BENDS)
        self.binary = bool(np.isin(rewards, (0, 1)).all())
        few = rewards.mean(1) if self.binary else rewards  # of right and wrong, rates are enough
        self.kl, self.value = path(few, coeffs) if spread else (np.zeros(1), rewards.mean()[None])
        self.again: list[tuple[Array, Array]] = []
        random = np.random.default_rng(seed)
        draws = min(draws, max(20, int(1e8 / (few.size * BENDS)))) if spread else 0  # some seconds
        for _ in range(draws):
            if self.binary:
                drawn = random.binomial(count, few) / count
            else:
                drawn = np.take_along_axis(few, random.integers(count, size=few.shape), 1)
            self.again.append(path(drawn, coeffs))

    def least_kl(self, value: float) -> float | None:
        """Return the least KL for a mean reward; None of one that the samples do not support."""
        plain = least_kl(self.rewards, value)
        if not plain or not self.again:
            return plain
        found = [_at(value, values, kls) for kls, values in self.again if value <= values[-1]]
        if len(found) < (1 - FALL_SHORT) * len(self.again):
            return None
        error = fmean(found) - _at(value, self.value, self.kl)
        return plain - error if error < plain / 2 else None  # else the samples are too few

    def curve(self) -> Curve:
        """Draw the limit from the reference itself to where the samples end.

        n replies to a prompt show nothing beyond e^KL = n; the curve ends a factor of e before (of
        10 if the reward is not 0 or 1), or where redraws fall short, if that is nearer. The band is
        the basic bootstrap interval (Davison and Hinkley 1997, eq. 5.6).
        """
        kl, value = self.kl, self.value
        if not self.again:
            return Curve(kl, value, value, value)
        drawn = np.array([np.interp(kl, kls, values) for kls, values in self.again])
        ends = np.array([values[-1] for _, values in self.again])
        most = 1.0 if self.binary else np.inf  # of an accuracy
        gain = (drawn - drawn[:, :1]).mean(0)  # the reference's own mean does not err
        line = np.minimum(2 * value - value[0] - gain, most)
        below, above = np.quantile(drawn, (0.05, 0.95), axis=0)
        keep = kl <= max(math.log(self.count / (math.e if self.binary else 10)), 0.0)
        keep &= (ends[:, None] >= value).mean(0) >= 1 - FALL_SHORT
        keep &= np.diff(np.maximum.accumulate(line), prepend=-np.inf) > 0
        keep &= np.diff(kl, prepend=-1.0) > 1e-9  # no longer once each best one has it all
        keep[0] = True  # the reference itself
        low, high = 2 * value - above, np.minimum(2 * value - below, most)
        return Curve(*(side[keep] for side in (kl, line, low, high)))


def path(rewards: Array, coeffs: Array) -> tuple[Array, Array]:
    """Return KL and mean reward of the reference, then of the optima at each coefficient.

    Of rewards [P, n], or of the pass rates [P] of what is right or wrong.
    """
    if rewards.ndim == 2:
        points = [(0.0, float(rewards.mean())), *(optimum(rewards, c) for c in coeffs)]
        kl, value = np.array(points).T
        return np.maximum(kl, 0.0), value  # rounding may leave -1e-17
    log_odds = np.append(0.0, 1 / coeffs)[:, None]  # [N, 1]
    raised = rewards * np.exp(log_odds)
    share = raised / (1 - rewards + raised)  # [N, P]
    kl = (share * log_odds - np.log(1 - rewards + raised)).mean(1)
    return np.maximum(kl, 0.0), share.mean(1)


def _at(value: float, values: Array, kls: Array) -> float:
    """Return the KL at a value of a path; between two points its root is a line."""
    return float(np.interp(value, values, np.sqrt(kls)) ** 2)


def best_of(rewards: Array, k: int) -> float:
    """Return the mean reward of the best of k replies of the reference, from n >= k samples.

    The mean over all ways to pick k of n: sum of r_(i) C(i - 1, k - 1) / C(n, k) over the sorted
    rewards; of a 0/1 reward it is pass@k (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    >>> round(best_of(np.array([[0.0, 1.0, 2.0]]), 2), 3)
    1.667
    """
    count = rewards.shape[1]
    picks = math.comb(count, k)
    shares = np.array([math.comb(i, k - 1) / picks for i in range(count)])
    return float((np.sort(rewards, 1) @ shares).mean())


def most_kl_of_best_of(k: int) -> float:
    """Return ln k - (k - 1) / k, an upper bound of the KL of best-of-k to the reference, nats.

    Source: Beirami et al. 2024 (arXiv 2401.01879).
    """
    return math.log(k) - (k - 1) / k


@dataclass(frozen=True)
class Limit:
    """What replies of the reference to the held-out prompts are worth, [prompts, replies] each."""

    reward: Array
    success: Array
    asked: int | None = None  # prompts, those that the task dropped included
    made: dict[str, Bounds] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of_samples(cls, found: Any) -> "Limit | None":
        """Return that of a frontier.json's contents; None if they are damaged."""
        try:
            reward, success = (np.array(found[n], np.float64) for n in ("reward", "success"))
        except (TypeError, KeyError, ValueError):
            return None
        sound = reward.shape == success.shape and reward.ndim == 2 and reward.size
        if not sound or not np.isfinite(reward).all():
            return None
        return cls(reward, success, found.get("asked"))

    @property
    def metric(self) -> str:
        """Return what is judged: the accuracy where any reply is right, else the reward."""
        return ACCURACY if self.success.any() else HELD_REWARD

    def of(self, metric: str) -> Array:
        """Return the values of which a metric is the mean."""
        return self.success if metric == ACCURACY else self.reward

    def bounds(self, metric: str) -> Bounds:
        """Return the limit of a metric; made once."""
        if metric not in self.made:
            self.made[metric] = Bounds(self.of(metric))
        return self.made[metric]

    def efficiency(self, metric: str, value: float, kl: float) -> float | None:
        """Return the least KL for a value / the KL spent; None where either is unknown."""
        least = self.bounds(metric).least_kl(value) if kl > 1e-3 else None
        return None if least is None else least / kl

    def efficiency_of(self, scores: Mapping[str, float]) -> float | None:
        """Return the efficiency of an evaluation by its metrics."""
        known = self.metric in scores and HELD_KL in scores
        return self.efficiency(self.metric, scores[self.metric], scores[HELD_KL]) if known else None

    def about(self) -> str:
        """Return a sentence on the samples that it was drawn from."""
        prompts, replies = self.success.shape
        text = f"{replies} replies of the reference to each of {prompts} held-out prompts"
        if self.success.any():
            none = int((self.success.max(1) == 0).sum())  # what can be reached there is unknown
            text += f", of which {self.success.mean():.2f} are right"
            text += f"; none on {none} of them" if none else ""
        return text

    def ends(self) -> str:
        """Return where its line ends, and how to extend it."""
        more = 8 * self.success.shape[1]
        return f"the line ends where these do (--frontier {more} for more): docs/kl.md"


def read_limit(path: Path) -> Limit | None:
    """Read a frontier.json, None of a damaged one."""
    try:
        return Limit.of_samples(json.loads(path.read_text(encoding="utf-8")))
    except ValueError:  # torn
        return None
