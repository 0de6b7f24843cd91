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
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.metric_names import ACCURACY, HELD_KL, HELD_REWARD

FILE = "limit.json"  # of a run or a sweep: samples of the reference
Array = NDArray[np.float64]
BENDS = 40  # points of a curve


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
    """Return KL and mean reward of the best policy at this coefficient; `rewards` [P, n].

    >>> kl, reward = optimum(np.array([[0.0, 1.0]]), 1.0)  # a reference that is right half the time
    >>> math.isclose(reward, math.e / (1 + math.e)), round(kl, 3)
    (True, 0.111)
    """
    if coeff <= 0:
        raise ValueError(f"expected a coefficient > 0, got {coeff}")
    middle = rewards.mean(1, keepdims=True)  # [P, 1]; a KL is that of differences alone
    scaled = (rewards - middle) / coeff  # [P, n]
    top = scaled.max(1, keepdims=True)
    raised = np.exp(scaled - top)
    mean = (raised * scaled).sum(1) / raised.sum(1)  # [P]
    log_z = np.log(raised.mean(1)) + top[:, 0]
    return float((mean - log_z).mean()), float((mean * coeff + middle[:, 0]).mean())


def least_kl(rewards: Array, reward: float) -> float | None:
    """Return the KL of the best policy with this mean reward; None where no sample shows one.

    0 for what the reference itself reaches. Of a 0/1 reward, an accuracy.

    >>> least_kl(np.array([[0.0, 1.0]]), 0.5), least_kl(np.array([[0.0, 0.0]]), 0.1)
    (0.0, None)
    """
    if reward <= rewards.mean():
        return 0.0
    spread = float(np.ptp(rewards, axis=1).max())
    best = rewards.max(1).mean()
    if spread == 0 or reward >= best:
        return None
    low, high = spread / 700, spread * 1e6  # of the coefficient: exp(700) is the largest double
    for _ in range(64):
        middle = math.sqrt(low * high)  # more reward at smaller ones
        low, high = (middle, high) if optimum(rewards, middle)[1] > reward else (low, middle)
    kl, got = optimum(rewards, high)
    return kl if math.isclose(got, reward, rel_tol=1e-6, abs_tol=1e-9) else None


def curve(rewards: Array, *, draws: int = 100, seed: int = 0) -> Curve:
    """Draw the limit from the reference itself to where the samples end.

    n replies to a prompt say nothing of what lies beyond e^KL = n; the curve ends a factor of e
    before (KL = ln n - 1), or at the best sample of each prompt where that is nearer. The band is
    the basic bootstrap interval (Davison and Hinkley 1997, eq. 5.6) of replies that are drawn again
    `draws` times, the prompts as they are: it leans to the side to which few samples err, down.
    """
    count = rewards.shape[1]
    spread = float(np.ptp(rewards, axis=1).max())
    if spread == 0:
        return Curve(np.zeros(1), *(np.full(1, rewards.mean()) for _ in range(3)))
    coeffs = spread * np.geomspace(30.0, 1 / 300, BENDS)
    points = np.array([(0.0, rewards.mean())] + [optimum(rewards, c) for c in coeffs])
    further = np.diff(points[:, 0], prepend=-1.0) > 1e-9  # no longer once each best one has it all
    points = points[further & (points[:, 0] <= max(math.log(count) - 1, 0.0))]
    kl, value = points[:, 0], points[:, 1]
    draws = min(draws, int(1e8 / (rewards.size * len(coeffs))))  # some seconds, whatever its size
    if draws < 20:
        return Curve(kl, value, value, value)
    random = np.random.default_rng(seed)
    drawn = np.empty((draws, len(kl)))
    for i in range(draws):
        again = np.take_along_axis(rewards, random.integers(count, size=rewards.shape), 1)
        path = [(0.0, again.mean())] + [optimum(again, c) for c in coeffs]
        drawn[i] = np.interp(kl, *np.array(path).T)
    below, above = np.quantile(drawn, (0.05, 0.95), axis=0)
    most = 1.0 if np.isin(rewards, (0, 1)).all() else np.inf  # of an accuracy
    return Curve(kl, value, 2 * value - above, np.minimum(2 * value - below, most))


def best_of(rewards: Array, k: int) -> float:
    """Return the mean reward of the best of k replies of the reference, from n >= k samples.

    The mean over all ways to pick k of n: sum of r_(i) C(i - 1, k - 1) / C(n, k) over the sorted
    rewards; of a 0/1 reward it is pass@k (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    >>> round(best_of(np.array([[0.0, 1.0, 2.0]]), 2), 3)
    1.667
    """
    count = rewards.shape[1]
    if not 1 <= k <= count:
        raise ValueError(f"expected 1 <= k <= {count} samples, got {k}")
    places = np.arange(count - 1, 0, -1)  # C(i - 1, k - 1) = C(i, k - 1) (i - k + 1) / i
    falling = np.cumprod(np.maximum(places - k + 1, 0) / places)
    shares = k / count * np.append(1.0, falling)[::-1]
    return float((np.sort(rewards, 1) @ shares).mean())


def most_kl_of_best_of(k: int) -> float:
    """Return an upper bound of the KL of best-of-k to the reference: ln k - (k - 1) / k, nats.

    Beirami et al. 2024 (arXiv 2401.01879): it is no equality, as often said, but a bound.
    """
    return math.log(k) - (k - 1) / k


def unsolved(success: Array) -> int:
    """Count the prompts that no sample solves: what can be reached there is unknown.

    >>> unsolved(np.array([[0.0, 0.0], [0.0, 1.0]]))
    1
    """
    return int((success.max(1) == 0).sum())


@dataclass(frozen=True)
class Limit:
    """What replies of the reference to the held-out prompts are worth, [prompts, replies] each."""

    reward: Array
    success: Array
    asked: int | None = None  # prompts, those that the task dropped included

    @classmethod
    def of_samples(cls, found: Any) -> "Limit | None":
        """Return that of a limit.json's contents; None if they are damaged.

        What is 0 beside any reward (below 1e-100) counts as 0; one above 1e100 is damage.
        """
        try:
            made = [np.array(found[name], dtype=np.float64) for name in ("reward", "success")]
        except (TypeError, KeyError, ValueError, OverflowError):
            return None
        sound = made[0].shape == made[1].shape and made[0].ndim == 2 and made[0].size
        if not sound or not (np.abs(made) < 1e100).all() or not np.isin(made[1], (0, 1)).all():
            return None
        return cls(np.where(np.abs(made[0]) < 1e-100, 0.0, made[0]), made[1], found.get("asked"))

    def of(self, metric: str) -> Array:
        """Return the values of which a metric is the mean."""
        return self.success if metric == ACCURACY else self.reward

    def efficiency(self, metric: str, value: float, kl: float) -> float | None:
        """Return the least KL for a value / that which was spent; None where either is unknown.

        The samples do not tell the KL of what hardly any of them reaches.
        """
        least = least_kl(self.of(metric), value)
        return None if least is None or not kl > 1e-3 else least / kl

    def efficiency_of(self, scores: Mapping[str, float]) -> float | None:
        """Return the efficiency of an evaluation by its metrics."""
        metric = ACCURACY if self.success.any() else HELD_REWARD
        known = metric in scores and HELD_KL in scores
        return self.efficiency(metric, scores[metric], scores[HELD_KL]) if known else None

    def about(self) -> str:
        """Say what it was drawn from."""
        prompts, replies = self.success.shape
        text = f"{replies} replies of the reference to each of {prompts} held-out prompts"
        if self.success.any():
            text += f", of which {self.success.mean():.2f} are right"
            text += f"; on {none} prompts none is" if (none := unsolved(self.success)) else ""
        return text

    def ends(self) -> str:
        """Say where its line ends, and where more is said."""
        more = 8 * self.success.shape[1]
        return f"the line ends where these do (--limit {more} for more): docs/kl.md, The limit"


def read_limit(path: Path) -> Limit | None:
    """Read a limit.json, None of a damaged one."""
    try:
        return Limit.of_samples(json.loads(path.read_text(encoding="utf-8", errors="replace")))
    except (ValueError, RecursionError):  # torn, or nested without end
        return None
