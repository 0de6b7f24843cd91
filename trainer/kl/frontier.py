"""The optimal frontier of reward against KL, estimated from samples of the reference.

The best policy at coefficient c, which maximises E[r] - c KL, is the reweighted reference
ref * exp(r / c) / Z (Korbak et al. 2022, arXiv 2205.11275, section 3). With n responses of the
reference per prompt, `rewards` [P, n],

    weights = softmax(r / c)            self-normalised
    log Z   = logmeanexp(r / c)
    KL      = E*[r] / c - log Z         >= 0, at most ln n

per prompt, then averaged. For rewards of 0 or 1 the frontier follows from the pass rates p: the
best policy is right with probability a = p e^l / (1 - p + p e^l), l = 1 / c, and no policy with its
mean accuracy has a smaller KL than the mean of kl_Bernoulli(a || p).

The estimate is biased: samples contain too few rare responses, so the KL is too high at large
rewards. A bootstrap resamples the responses to estimate this bias, which is subtracted (Davison and
Hinkley 1997, section 2.1).
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

ACCURACY, EVAL_REWARD, EVAL_KL = "eval/sampled_accuracy", "eval/reward", "eval/kl_ref_sequence"
Array = NDArray[np.float64]
NUM_POINTS = 80  # points per curve
COEFFS = np.geomspace(30.0, 1 / 300, NUM_POINTS)  # coefficients of the points / rewards' spread
MIN_KL = 1e-3  # nats; no efficiency is computed for a smaller KL
MAX_MISSING = 0.1  # a value is unsupported if more than this share of the resamples ends below it


@dataclass(frozen=True)
class Curve:
    """Reward (or accuracy) against KL, in order of KL.

    `kl` in nats per response, `value` [N]; `low` and `high` are a 90 % confidence band.
    """

    kl: Array
    value: Array
    low: Array
    high: Array


def _optimum_by_prompt(rewards: Array, coeff: float) -> tuple[Array, Array]:
    """Return KL and reward of the best policy at a coefficient, each [P]."""
    centre = rewards.mean(1, keepdims=True)  # [P, 1]; the KL depends on differences only
    scaled = (rewards - centre) / coeff  # [P, n]
    top = scaled.max(1, keepdims=True)
    weights = np.exp(scaled - top)
    mean = (weights * scaled).sum(1) / weights.sum(1)  # [P]
    log_z = np.log(weights.mean(1)) + top[:, 0]
    return mean - log_z, mean * coeff + centre[:, 0]


def least_kl(rewards: Array, reward: float) -> float | None:
    """Return the KL of the best policy with this mean reward; None if no sample reaches it.

    It is 0 if `reward` is at most the reference's mean reward. It is not bias-corrected.

    >>> least_kl(np.array([[0.0, 1.0]]), 0.5), least_kl(np.array([[0.0, 0.0]]), 0.1)
    (0.0, None)
    """
    if reward <= rewards.mean():
        return 0.0
    spread = float(np.ptp(rewards, axis=1).max())
    tops = rewards.max(1, keepdims=True)  # [P, 1]
    best = float(tops.mean())
    if spread > 0 and math.isclose(reward, best, rel_tol=1e-9):  # only the best responses remain
        return float(-np.log((rewards == tops).mean(1)).mean())
    if spread == 0 or not reward < best:
        return None
    low, high = spread / 700, spread * 1e6  # bounds of the coefficient; exp(700) nearly overflows
    binary = bool(np.isin(rewards, (0, 1)).all())
    data = rewards.mean(1) if binary else rewards
    for _ in range(64):
        coeff = math.sqrt(low * high)  # a smaller coefficient gives more reward
        _, (_, got) = optima(data, np.array([coeff]))
        low, high = (coeff, high) if got > reward else (low, coeff)
    (_, kl), (_, got) = optima(data, np.array([high]))
    return kl if math.isclose(got, reward, rel_tol=1e-6, abs_tol=1e-9) else None


class ConfidenceBand:
    """Bias-corrected frontier from samples `rewards` [P, n], up to the KL that they support.

    Each of `draws` bootstrap sets of responses gives a frontier. The samples support a value if at
    least 90 % of these frontiers reach it.
    """

    def __init__(self, rewards: Array, *, draws: int = 100) -> None:
        count = rewards.shape[1]
        self.rewards, self.count = rewards, count
        spread = float(np.ptp(rewards, axis=1).max())
        coeffs = spread * COEFFS
        self.binary = bool(np.isin(rewards, (0, 1)).all())
        data = rewards.mean(1) if self.binary else rewards  # pass rates [P], or rewards [P, n]
        self.kl, self.value = (
            optima(data, coeffs) if spread else (np.zeros(1), rewards.mean()[None])
        )
        self.resampled: list[tuple[Array, Array]] = []
        random = np.random.default_rng(0)
        draws = min(draws, max(20, int(1e8 / (data.size * NUM_POINTS)))) if spread else 0  # seconds
        for _ in range(draws):
            if self.binary:
                sample = random.binomial(count, data) / count
            else:
                sample = np.take_along_axis(data, random.integers(count, size=data.shape), 1)
            self.resampled.append(optima(sample, coeffs))

    def least_kl(self, value: float) -> float | None:
        """Return the least KL for a mean reward; None if the samples do not support it."""
        plain = least_kl(self.rewards, value)
        if not plain or not self.resampled:
            return plain
        least = [
            _kl_at(value, values, kls) for kls, values in self.resampled if value <= values[-1]
        ]
        if len(least) < (1 - MAX_MISSING) * len(self.resampled):
            return None
        error = fmean(least) - _kl_at(value, self.value, self.kl)
        return plain - error if error < plain / 2 else None  # a large bias: too few samples

    def curve(self) -> Curve:
        """Return the frontier from the reference to the largest supported KL.

        With n responses per prompt the largest measurable KL is ln n. The curve ends at ln n - 1
        (ln n - ln 10 if rewards are not 0 or 1), or before, where fewer than 90 % of the resamples
        reach it. The band is the basic bootstrap interval (Davison and Hinkley 1997, eq. 5.6).
        """
        kl, value = self.kl, self.value
        if not self.resampled:
            return Curve(kl, value, value, value)
        curves = np.array([np.interp(kl, kls, values) for kls, values in self.resampled])
        ends = np.array([values[-1] for _, values in self.resampled])
        most = 1.0 if self.binary else np.inf  # largest accuracy
        gain = (curves - curves[:, :1]).mean(0)  # the reference's mean needs no correction
        line = np.minimum(2 * value - value[0] - gain, most)
        below, above = np.quantile(curves, (0.05, 0.95), axis=0)
        keep = kl <= max(math.log(self.count / (math.e if self.binary else 10)), 0.0)
        keep &= (ends[:, None] >= value).mean(0) >= 1 - MAX_MISSING
        keep &= np.diff(np.maximum.accumulate(line), prepend=-np.inf) > 0
        keep &= np.diff(kl, prepend=-1.0) > 1e-9  # the curve ends where the KL stops growing
        keep[0] = True  # the reference itself
        low, high = 2 * value - above, np.minimum(2 * value - below, most)
        return Curve(*(side[keep] for side in (kl, line, low, high)))


def optima(rewards: Array, coeffs: Array) -> tuple[Array, Array]:
    """Return KL and mean reward of the reference, then of the optimum at each coefficient.

    `rewards` [P, n], or pass rates [P] if rewards are 0 or 1.

    >>> kl, reward = optima(np.array([[0.0, 1.0]]), np.array([1.0]))  # right half the time
    >>> math.isclose(reward[1], math.e / (1 + math.e)), round(float(kl[1]), 3)
    (True, 0.111)
    """
    kl, value = optima_by_prompt(rewards, coeffs)
    return np.maximum(kl.mean(1), 0.0), value.mean(1)  # rounding may leave -1e-17


def optima_by_prompt(rewards: Array, coeffs: Array) -> tuple[Array, Array]:
    """Return KL and reward of `optima` per prompt, each [N, P]."""
    if rewards.ndim == 2:
        reference = np.zeros(len(rewards)), rewards.mean(1)
        kl, value = zip(reference, *(_optimum_by_prompt(rewards, c) for c in coeffs), strict=True)
        return np.array(kl), np.array(value)
    log_odds = np.append(0.0, 1 / coeffs)[:, None]  # [N, 1]
    right = rewards * np.exp(log_odds)
    share = right / (1 - rewards + right)  # [N, P]
    return share * log_odds - np.log(1 - rewards + right), share


def _kl_at(value: float, values: Array, kls: Array) -> float:
    """Return the KL where a curve reaches `value`; sqrt(KL) is interpolated linearly."""
    return float(np.interp(value, values, np.sqrt(kls)) ** 2)


def efficiency_error(samples: Array, value: Array, kl: Array) -> float:
    """Return the standard error of an efficiency: its deviation over 200 resampled sets of prompts.

    `samples` [P, n] are rewards of the reference, `value` and `kl` [P] means of the policy's
    responses to the same prompts. A resampled prompt keeps its responses, so the error includes
    the noise of few responses (Davison and Hinkley 1997, section 3.8).
    """
    binary = bool(np.isin(samples, (0, 1)).all())
    spread = float(np.ptp(samples, axis=1).max()) or 1.0
    data = samples.mean(1) if binary else samples
    kls, values = optima_by_prompt(data, spread * COEFFS)  # [N, P]
    count = len(samples)
    draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), 200)
    shares = draws / count  # [200, P]
    means = zip(shares @ value, shares @ kl, shares @ values.T, shares @ kls.T, strict=True)
    ratios = [
        _kl_at(reward, rewards, np.maximum(least, 0.0)) / spent
        for reward, spent, rewards, least in means
    ]
    return float(np.std(ratios, ddof=1))


def best_of(rewards: Array, k: int) -> float:
    """Return the mean reward of the best of k responses of the reference, from n >= k samples.

    Mean over all ways to pick k of n: sum of r_(i) C(i - 1, k - 1) / C(n, k) over the sorted
    rewards; for a 0/1 reward it is pass@k (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    >>> round(best_of(np.array([[0.0, 1.0, 2.0]]), 2), 3)
    1.667
    """
    count = rewards.shape[1]
    subsets = math.comb(count, k)
    shares = np.array([math.comb(i, k - 1) / subsets for i in range(count)])
    return float((np.sort(rewards, 1) @ shares).mean())


def most_kl_of_best_of(k: int) -> float:
    """Return ln k - (k - 1) / k, an upper bound of the KL of best-of-k to the reference, nats.

    Source: Beirami et al. 2024 (arXiv 2401.01879).
    """
    return math.log(k) - (k - 1) / k


@dataclass(frozen=True)
class Frontier:
    """Reward and success [prompts, responses] of the reference on held-out prompts."""

    reward: Array
    success: Array
    num_prompts: int | None = None  # all prompts, also dropped ones
    rows: list[int] | None = None  # rows of the prompts that were not dropped
    bands: dict[str, ConfidenceBand] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of_samples(cls, content: Any) -> "Frontier | None":
        """Return the frontier in the contents of a frontier.json; None if they are damaged."""
        try:
            reward, success = (np.array(content[n], np.float64) for n in ("reward", "success"))
        except (TypeError, KeyError, ValueError):
            return None
        sound = reward.shape == success.shape and reward.ndim == 2 and reward.size
        if not sound or not np.isfinite(reward).all():
            return None
        return cls(reward, success, content.get("asked"), content.get("rows"))

    @property
    def metric(self) -> str:
        """Return the metric of the frontier: accuracy if any response is right, else reward."""
        return ACCURACY if self.success.any() else EVAL_REWARD

    def of(self, metric: str) -> Array:
        """Return the values [P, n] whose mean is the metric."""
        return self.success if metric == ACCURACY else self.reward

    def band(self, metric: str) -> ConfidenceBand:
        """Return the frontier of a metric, computed once."""
        if metric not in self.bands:
            self.bands[metric] = ConfidenceBand(self.of(metric))
        return self.bands[metric]

    def efficiency(self, metric: str, value: float, kl: float) -> float | None:
        """Return (least KL for a value) / KL; None if unknown or if KL is about 0."""
        least = self.band(metric).least_kl(value) if kl > MIN_KL else None
        return None if least is None else least / kl

    def efficiency_of(self, scores: Mapping[str, float]) -> float | None:
        """Return the efficiency of an evaluation from its metrics."""
        known = self.metric in scores and EVAL_KL in scores
        return self.efficiency(self.metric, scores[self.metric], scores[EVAL_KL]) if known else None

    def about(self) -> str:
        """Describe the samples behind the line, and how to extend it."""
        prompts, responses = self.success.shape
        text = f"The line comes from {responses} responses of the reference to each of {prompts} "
        text += f"held-out prompts, and --frontier {8 * responses} extends it (docs/kl.md)."
        if self.success.any():
            none = int((self.success.max(1) == 0).sum())  # their frontier is unknown
            text += f" {self.success.mean():.0%} of the responses are right"
            text += f"; prompts without a right response: {none}." if none else "."
        return text


def read_frontier(path: Path) -> Frontier | None:
    """Read a frontier.json; return None if it is damaged."""
    try:
        return Frontier.of_samples(json.loads(path.read_text(encoding="utf-8")))
    except ValueError:  # truncated file
        return None
