"""The entropy bonus: what keeps a policy from settling on one reply too early.

Left out on purpose: masks on high-entropy tokens.
"""

import math
from typing import Any

from torch import Tensor

from policies.scorer import Scores

STEP, MOST = 0.005, 1.0  # of the coefficient: an iteration's step, and its bound


class EntropyBonus:
    """Add -coeff * entropy of the policy being trained to the loss of each token.

    With `target` (nats per token) the coefficient is steered, after Skywork-OR1 (arXiv 2505.22312):
    an iteration whose entropy is at most the target adds `step`, one above subtracts it, within
    [0, most]; above the target no bonus is paid.

    >>> bonus = EntropyBonus(0.01, target=1.0)
    >>> [round(bonus.update(entropy), 3) for entropy in (0.8, 0.9, 1.2, 0.7)]
    [0.015, 0.02, 0.0, 0.02]
    """

    def __init__(
        self,
        coeff: float = 0.0,
        *,
        target: float | None = None,
        step: float = STEP,
        most: float = MOST,
    ) -> None:
        if not 0 <= coeff < math.inf or (target is not None and coeff > most):
            raise ValueError(f"expected an entropy coefficient from 0 to {most}, got {coeff}")
        self.steered, self.target, self.step, self.most = coeff, target, step, most
        self.pays = True  # whether the last entropy was at most the target

    @property
    def coeff(self) -> float:
        """Return the weight of the entropy now."""
        return self.steered if self.pays else 0.0

    def __call__(self, scores: Scores) -> dict[str, Tensor]:
        """Return the loss term [B, T] by its name, none at coefficient 0."""
        if self.coeff == 0:
            return {}
        assert scores.entropy is not None
        return {"entropy": -self.coeff * scores.entropy}

    def update(self, entropy: float) -> float:
        """Return the next coefficient, given the entropy of this iteration (nats per token)."""
        if self.target is not None:
            self.pays = entropy <= self.target
            moved = self.steered + (self.step if self.pays else -self.step)
            self.steered = min(max(moved, 0.0), self.most)
        return self.coeff

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {"coeff": self.steered, "pays": self.pays}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where a checkpoint stopped."""
        self.steered, self.pays = float(state["coeff"]), bool(state["pays"])
