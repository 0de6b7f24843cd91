"""What the runs of benchmarks/overoptimisation.py left, as points of gold or proxy against KL."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.gao import Fit, Form, best_of, fit, kl_of_best_of, reweighted
from trainer.limit import FILE, Limit, read_limit
from trainer.metric_names import ACCURACY, HELD_KL, HELD_REWARD
from trainer.runs.run_files import load_run

KS = (2, 4, 8, 16, 32, 64, 128)  # of best-of-n
Points = list[tuple[float, float]]  # KL, value


@dataclass(frozen=True)
class Way:
    """What one policy went through, evaluation by evaluation: KL, gold and proxy."""

    kl: list[float]
    gold: list[float]
    proxy: list[float]

    @classmethod
    def of(cls, folder: Path) -> "Way":
        """Read a run."""
        run = load_run(folder)
        columns = ([v for _, v in run.series(name)] for name in (HELD_KL, ACCURACY, HELD_REWARD))
        return cls(*columns)


@dataclass(frozen=True)
class Proxy:
    """A proxy of one size on one seed, and the policies trained against it, by coefficient."""

    width: int
    seed: int
    base: Path
    coeffs: Sequence[str]

    @property
    def name(self) -> str:
        return f"{self.width}_{self.seed}"

    @cached_property
    def ways(self) -> dict[str, Way]:
        return {coeff: Way.of(self.run(coeff)) for coeff in self.coeffs}

    @cached_property
    def limit(self) -> Limit:
        """Return what the reference's replies are worth: `reward` proxy, `success` gold."""
        path = self.run(self.coeffs[0]) / FILE
        limit = read_limit(path)
        if limit is None:
            raise ValueError(f"{path} is damaged; remove it")
        return limit

    def run(self, coeff: str) -> Path:
        return self.base / f"coeff_{coeff}" / self.name

    @property
    def model(self) -> Path:
        return self.base / "proxies" / self.name / "model"


def all_coeffs(sizes: Mapping[int, Sequence[Proxy]]) -> Sequence[str]:
    """Return the coefficients of the size that has most of them."""
    return max((found[0].coeffs for found in sizes.values()), key=len)


def having(found: Sequence[Proxy], coeff: str) -> list[Proxy]:
    """Return the proxies, one a seed, against which a policy was trained at a coefficient."""
    return [proxy for proxy in found if coeff in proxy.coeffs]


def points(found: Sequence[Proxy], coeff: str) -> Points:
    """Return (KL, gold - gold before) of all seeds, evaluation by evaluation."""
    return [
        (kl, gold - float(proxy.limit.success.mean()))
        for proxy in found
        for kl, gold in zip(proxy.ways[coeff].kl, proxy.ways[coeff].gold, strict=True)
    ]


def best_points(found: Sequence[Proxy]) -> Points:
    """Return (KL, gold - gold before) of best-of-n, n = 2, 4 ...; the KL is exact."""
    out = []
    for proxy in found:
        reward, success = proxy.limit.reward, proxy.limit.success
        for k in KS:
            kl = kl_of_best_of(reward, k)
            out.append((kl, best_of(reward, success, k) - float(success.mean())))
    return out


def mean_way(found: Sequence[Proxy], coeff: str, what: str = "gold") -> Points:
    """Return (KL, value) of each evaluation, means over the seeds."""
    ways = [proxy.ways[coeff] for proxy in found]
    return mean_points([[*zip(way.kl, getattr(way, what), strict=True)] for way in ways])


def near_peak(measured: Points) -> Points:
    """Return the points where accuracy is not below the start, after a fall and a rise too."""
    return [point for point in measured if point[1] >= 0]


def fit_of(measured: Points, form: Form = "rl") -> Fit:
    kls, gains = zip(*measured, strict=True)
    return fit(kls, gains, form)


def tilted(proxy: Proxy) -> Points:
    """Return (KL, gold) of the reference reweighted by exp(proxy / c), as far as samples carry."""
    reward, success = proxy.limit.reward, proxy.limit.success
    coeffs = np.geomspace(30, 0.2, 25) * float(reward.std(1).mean())
    return [reweighted(reward, success, c) for c in coeffs]


def mean_points(several: Sequence[Points]) -> Points:
    """Return the means over seeds of points that belong together."""
    return [
        (fmean(k for k, _ in same), fmean(v for _, v in same))
        for same in zip(*several, strict=True)
    ]
