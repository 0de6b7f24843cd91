"""The controller that spends a budget of KL; a file of its own, since few runs have one."""

import math
from collections.abc import Sequence
from typing import Any

from trainer.kl_control import KLControllerBase, floats


class BudgetKLController(KLControllerBase):
    """Spend `target` nats a sequence: come to that KL soon, and end there.

    With e = clip(log(KL / target), +-1) of each iteration's mean KL, and s its slope, a mean
    of its differences, half of it the last,

        level *= exp(0.07 e)    coeff = level exp(0.6 e + 2 s)

    a proportional-integral-derivative controller of log coeff (Stooke et al. 2020, arXiv
    2007.03964, section 4, there of the coefficient itself). The level finds the price; the rest
    damps it, since a policy follows a coefficient with a delay. In iterations, not in sequences: a
    step of the optimiser moves the KL however many replies it is of.

    The level starts at 1 / sqrt(2 target), the price at which the best policy for rewards of
    standard deviation 1 is about `target` away if that is small, or at `coeff` if that is more. It
    stays within 100 times of it: what it adds up while nothing can be done is taken back in time.

    >>> control = BudgetKLController(0.1, target=4.0)
    >>> round(control.coeff, 4), round(control.update([5.0, 7.0]), 4)  # e = log 1.5
    (0.3536, 0.4639)
    """

    SUM, ERROR, SLOPE, RANGE = 0.07, 0.6, 2.0, 100.0

    def __init__(self, coeff: float, *, target: float, model: Any = None) -> None:
        if not 0 < target < math.inf:
            raise ValueError(f"expected a finite target > 0, got {target}")
        super().__init__(coeff, model=model)
        self.target, self.start = float(target), max(self.coeff, (2 * target) ** -0.5)
        self.level = self._set(self.start)
        self.last: float | None = None  # error
        self.slope = 0.0

    @property
    def k3_share(self) -> float:
        """Return 2 t / (e^2t - 1), the share of k3 in what it follows, k1 + share (k3 - k1).

        That of the least noise where one token of a reply carries the whole target t and its
        log-ratio is normal. Spread over tokens, k3 could have more; but its tail is heavier than
        that, and a mean of few has mostly less than the KL. Any share has the KL as its mean.
        """
        twice = min(2 * self.target, 700.0)
        return twice / math.expm1(twice)

    def update(self, kl_values: Sequence[float]) -> float:
        """Return the next coefficient; without values it stays."""
        if not (values := floats(kl_values)):
            return self.coeff
        share = max(sum(values) / len(values) / self.target, math.exp(-1))
        error = min(math.log(share), 1.0)
        if self.last is not None:
            self.slope += 0.5 * (error - self.last - self.slope)
        self.last = error
        level = self.level * math.exp(self.SUM * error)
        self.level = min(max(level, self.start / self.RANGE), self.start * self.RANGE)
        return self._set(self.level * math.exp(self.ERROR * error + self.SLOPE * self.slope))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs: the level, the last error and its slope too."""
        return {"coeff": self.coeff, "level": self.level, "last": self.last, "slope": self.slope}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where a checkpoint stopped; that of another controller has a coefficient."""
        self._set(float(state["coeff"]))
        self.level = float(state.get("level", self.coeff))
        self.last, self.slope = state.get("last"), float(state.get("slope", 0.0))
