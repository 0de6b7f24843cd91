"""The arithmetic of Gao et al. 2022, Scaling Laws for Reward Model Overoptimization (2210.10760).

With d the root of the KL to the reference, and gold what is meant where a proxy is trained on:

    RL           gold(d) - gold(0) = d (alpha - beta log d)     highest at d = exp(alpha / beta - 1)
    best-of-n    gold(d) - gold(0) = d (alpha - beta d)         highest at d = alpha / (2 beta)

Both are linear in alpha and beta, so a fit is one least-squares problem. What a reference's own
replies say of its best-of-n and of its reweighting by a proxy needs no training.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trainer.limit import optimum

Array = NDArray[np.float64]
Form = Literal["rl", "best_of"]


@dataclass(frozen=True)
class Fit:
    """A fitted curve of gold(d) - gold(0), and how far the points lie from it."""

    form: Form
    alpha: float
    beta: float
    rmse: float
    largest: float  # distance of a point
    r2: float  # share of the points' variance that the curve explains

    def __call__(self, kl: float) -> float:
        """Return gold(d) - gold(0) at a KL in nats."""
        d = math.sqrt(kl)
        bend = d if self.form == "best_of" else math.log(d) if d else 0.0
        return d * (self.alpha - self.beta * bend)

    @property
    def peak(self) -> float | None:
        """Return the KL of the highest gold; None of a curve that never falls."""
        if self.beta <= 0:
            return None
        if self.form == "best_of":
            return max(self.alpha / (2 * self.beta), 0.0) ** 2
        return math.exp(min(2 * (self.alpha / self.beta - 1), 700.0))


def fit(kl: Sequence[float], gain: Sequence[float], form: Form = "rl") -> Fit:
    """Fit alpha and beta to gold(d) - gold(0) by least squares; what has not moved says nothing.

    >>> kl = np.array([0.25, 1.0, 4.0])
    >>> found = fit(kl, np.sqrt(kl) * (0.5 - 0.4 * np.log(np.sqrt(kl))))
    >>> round(found.alpha, 6), round(found.beta, 6), round(found.rmse, 6)
    (0.5, 0.4, 0.0)
    """
    moved = np.asarray(kl) > 0
    if moved.sum() < 2:
        raise ValueError(f"expected at least two points with a KL > 0, got {moved.sum()}")
    d, y = np.sqrt(np.asarray(kl)[moved]), np.asarray(gain)[moved]
    bend = np.log(d) if form == "rl" else d
    (alpha, beta), *_ = np.linalg.lstsq(np.stack([d, -d * bend], 1), y, rcond=None)
    off = y - d * (alpha - beta * bend)
    squares, spread = float(off @ off), float(((y - y.mean()) ** 2).sum())
    r2 = 1 - squares / spread if spread else math.nan
    rmse = math.sqrt(squares / len(off))
    return Fit(form, float(alpha), float(beta), rmse, float(np.abs(off).max()), r2)


def best_of(proxy: Array, gold: Array, k: int) -> float:
    """Return the mean gold of the reply that a proxy likes best of k, from n >= k [prompts, n].

    The mean over all ways to pick k of n, replies of one proxy in random order: the i-th smallest
    is the best of comb(i - 1, k - 1) of them.

    >>> best_of(np.array([[1.0, 2.0, 3.0]]), np.array([[0.0, 1.0, 0.0]]), 2)  # 2 of {1, 2}, else 3
    0.3333333333333333
    """
    count = proxy.shape[1]
    if not 1 <= k <= count:
        raise ValueError(f"expected 1 <= k <= {count} samples, got {k}")
    shares = np.array([math.comb(i, k - 1) / math.comb(count, k) for i in range(count)])
    order = np.argsort(proxy, 1, kind="stable")
    ranked, worth = (np.take_along_axis(side, order, 1) for side in (proxy, gold))
    total = 0.0
    for values, gained in zip(ranked, worth, strict=True):
        _, tie = np.unique(values, return_inverse=True)  # which of a tie is taken is chance
        total += shares @ (np.bincount(tie, gained) / np.bincount(tie))[tie]
    return float(total / len(proxy))


def kl_of_best_of(proxy: Array, k: int) -> float:
    """Return the KL in nats of best-of-k to a reference that says each of these n replies equally.

    Replies of one proxy count as one reply, so it is exact for the n that were drawn, and below
    ln k - (k - 1) / k, the bound that is often called the KL, wherever replies come more than once.

    >>> round(kl_of_best_of(np.array([[0.0, 1.0]]), 2), 4)  # 1/4 and 3/4 for 1/2 and 1/2
    0.1308
    """
    total = 0.0
    for values in proxy:
        _, counts = np.unique(values, return_counts=True)
        below = np.concatenate([[0.0], np.cumsum(counts) / len(values)])
        said, chosen = np.diff(below), np.diff(below**k)
        here = chosen > 0
        total += float(chosen[here] @ np.log(chosen[here] / said[here]))
    return total / len(proxy)


def reweighted(proxy: Array, gold: Array, coeff: float) -> tuple[float, float]:
    """Return KL and mean gold of the reference times exp(proxy / coeff): where RL would end.

    >>> kl, gold = reweighted(np.array([[0.0, 1.0]]), np.array([[1.0, 0.0]]), 1.0)
    >>> round(kl, 3), math.isclose(gold, 1 / (1 + math.e))
    (0.111, True)
    """
    raised = np.exp((proxy - proxy.max(1, keepdims=True)) / coeff)
    share = raised / raised.sum(1, keepdims=True)  # [prompts, n]
    return optimum(proxy, coeff)[0], float((share * gold).sum(1).mean())


def apart(path: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> list[float]:
    """Return path - other at each KL of the first that the second passes; (KL, value) each.

    >>> apart([(1.0, 0.5), (9.0, 0.0)], [(0.0, 0.0), (2.0, 0.6)])
    [0.2]
    """
    xs, ys = zip(*sorted(other), strict=True)
    return [float(y - np.interp(x, xs, ys)) for x, y in path if xs[0] < x <= xs[-1]]
