"""KL control: one object owns the coefficient of the leash.

`update` takes KL values in nats per sequence, unscaled, and returns the coefficient to use next.
"""

from collections.abc import Sequence
from typing import Any


class KLControllerBase:
    """Own the coefficient; subclasses decide how it follows the measured KL."""

    def __init__(self, coeff: float) -> None:
        if not coeff >= 0:
            raise ValueError(f"expected a KL coefficient >= 0, got {coeff}")
        self.coeff = float(coeff)

    def update(self, kl_values: Sequence[float]) -> float:
        """Return the next coefficient, given the KL (nats per sequence) of the last iterations."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {"coeff": self.coeff}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where a checkpoint stopped."""
        self.coeff = float(state["coeff"])


class ConstantKLController(KLControllerBase):
    """Keep the coefficient.

    >>> ConstantKLController(kl_coef=0.1).update([3.0])
    0.1
    """

    def __init__(self, *, kl_coef: float) -> None:
        super().__init__(kl_coef)

    def update(self, kl_values: Sequence[float]) -> float:
        """Return the coefficient unchanged."""
        return self.coeff
