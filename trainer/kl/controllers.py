"""KL controllers, which set the coefficient of the KL penalty. Torch-free.

`update` takes unscaled KL values in nats per sequence and returns the next coefficient. Only
`AdaptiveKLController` takes KL rewards, -coeff * KL, as in TorchRL; no value of kl.controller uses
it. To add a controller, add a class and its row in CONTROLLERS. Your own controller is a subclass
of `KLControllerBase`: kl.controller={_target_: my_kl.Mine}.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

MAX_ERROR = 0.2  # the relative error is clipped to +-0.2 (Ziegler et al. 2019)


class KLControllerBase:
    """Hold the coefficient; subclasses decide how it follows the measured KL.

    If `model` is given, its attribute `kl_coef` follows the coefficient.
    """

    follows_kl = False  # the coefficient depends on the measured KL
    takes_rewards = False  # `update` takes KL rewards, -coeff * KL, not KL values
    k3_weight = 0.0  # the controller follows (1 - k3_weight) k1 + k3_weight k3

    def __init__(self, coeff: float, *, model: Any = None) -> None:
        if not 0 <= coeff < math.inf:
            raise ValueError(f"expected a finite KL coefficient >= 0, got {coeff}")
        if model is not None and not hasattr(model, "kl_coef"):
            raise AttributeError(f"expected a model with kl_coef, {type(model).__name__} has none")
        self.model = model
        self._set(float(coeff))

    @property
    def coef(self) -> float:
        """Return the coefficient (TorchRL's name)."""
        return self.coeff

    def update(self, kl_values: Sequence[float]) -> float:
        """Return the next coefficient from the KL (nats) of each sequence of an iteration.

        Without values, a coefficient that follows the KL does not change.
        """
        raise NotImplementedError(f"{type(self).__name__} has no update: override it")

    def follow(self, kl: float | None, *, sequences: int) -> float:
        """Return the next coefficient from the mean KL (nats) of this many sequences.

        The loop calls it once per iteration: `update` uses only the mean and the number of its
        values, the n of Ziegler et al. kl=None means that the KL was not measured.

        >>> round(TargetKLController(0.1, target=6.0, horizon=10).follow(12.0, sequences=5), 6)
        0.11
        """
        if kl is None:
            return self.update([])
        return self.update([-self.coeff * kl if self.takes_rewards else kl] * sequences)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"coeff": self.coeff}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._set(float(state["coeff"]))

    def _set(self, coeff: float) -> float:
        self.coeff = coeff
        if self.model is not None:
            self.model.kl_coef = coeff
        return coeff


class ConstantKLController(KLControllerBase):
    """Keep the coefficient constant; by default the model's `kl_coef`.

    >>> ConstantKLController(kl_coef=0.1).update([3.0])
    0.1
    """

    def __init__(self, *, kl_coef: float | None = None, model: Any = None) -> None:
        super().__init__(model.kl_coef if kl_coef is None else kl_coef, model=model)

    def update(self, kl_values: Sequence[float] | None = None) -> float:
        """Return the coefficient unchanged."""
        return self._set(self.coeff)


class LinearKLController(KLControllerBase):
    """Change linearly from `coeff` in the first of `total` iterations to `end` in the last.

    >>> control = LinearKLController(0.2, end=0.0, total=3)
    >>> [control.coeff, control.update([]), control.update([]), control.update([])]
    [0.2, 0.1, 0.0, 0.0]
    """

    def __init__(self, coeff: float, *, end: float, total: int, model: Any = None) -> None:
        super().__init__(coeff, model=model)
        self.start, self.end = float(coeff), float(end)
        self.total, self.done = total, 0

    def update(self, kl_values: Sequence[float]) -> float:
        """Return the coefficient of the next iteration."""
        self.done += 1
        return self._at()

    def _at(self) -> float:
        fraction = min(self.done / max(self.total - 1, 1), 1.0)
        return self._set(self.start + (self.end - self.start) * fraction)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the number of iterations done."""
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint; with a larger `total` the slope is flatter."""
        self.done = int(state["done"])
        self._at()


class TargetKLController(KLControllerBase):
    """Multiply the coefficient to bring the KL to `target` (nats per sequence).

    n values with mean KL give coeff *= 1 + clip(KL / target - 1, +-0.2) * n / horizon (Ziegler et
    al. 2019, arXiv 1909.08593, section 2.2). As in their code n is the batch size, so `horizon`
    counts sequences. `responses`: sequences per iteration. For 5 sequences of twice the target:

    >>> round(TargetKLController(0.1, target=6.0, horizon=10).update([12.0] * 5), 6)
    0.11
    """

    follows_kl = True

    def __init__(
        self,
        coeff: float,
        *,
        target: float,
        horizon: float,
        responses: int = 0,
        model: Any = None,
    ) -> None:
        if not coeff > 0:  # a product with 0 stays 0
            raise ValueError(f"expected kl.coeff > 0 of a controller that multiplies, got {coeff}")
        if horizon <= MAX_ERROR * responses:  # the coefficient could become negative
            least = f"{MAX_ERROR * responses:g}, a fifth of an iteration's {responses} responses"
            raise ValueError(f"expected kl.horizon > {least}, got {horizon:g}")
        super().__init__(coeff, model=model)
        self.target, self.horizon = float(target), float(horizon)

    def update(self, kl_values: Sequence[float]) -> float:
        """Return the next coefficient; without values it does not change."""
        if not (values := floats(kl_values)):
            return self.coeff
        error = sum(values) / len(values) / self.target - 1
        error = min(max(error, -MAX_ERROR), MAX_ERROR)
        return self._set(self.coeff * (1 + error * len(values) / self.horizon))


class AdaptiveKLController(TargetKLController):
    """`TargetKLController` with TorchRL's convention: `update` takes KL rewards, -coeff * KL.

    `target` has the unit of this KL.

    >>> control = AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=10)
    >>> round(control.update([-0.1 * 12.0] * 5), 6)
    0.11
    """

    takes_rewards = True

    def __init__(
        self, *, init_kl_coef: float, target: float, horizon: float, model: Any = None
    ) -> None:
        super().__init__(init_kl_coef, target=target, horizon=horizon, model=model)

    def update(self, kl_values: Sequence[float]) -> float:
        """Return the next coefficient from KL rewards; without rewards it does not change."""
        return super().update([-value / self.coeff for value in floats(kl_values)])


class BudgetKLController(KLControllerBase):
    """Bring the KL to `target` nats per sequence quickly and hold it there.

    With e = clip(log(KL / target), +-1) of an iteration's mean KL, and s the exponential mean (0.5)
    of its differences,

        level *= exp(0.07 e)    coeff = level exp(0.6 e + 2 s)

    This is a PID controller of log coeff; Stooke et al. 2020 (arXiv 2007.03964, section 4) control
    the coefficient itself. The level finds the right coefficient; the other terms damp
    oscillation, since the policy follows with a delay. Gains are per iteration, not per sequence,
    because an optimiser step moves the KL at any batch size.

    The level starts at max(coeff, 1 / sqrt(2 target)): with this coefficient the best policy has
    about the KL `target` if rewards have standard deviation 1. The level stays within a factor of
    100 of its start.

    >>> control = BudgetKLController(0.1, target=4.0)
    >>> round(control.coeff, 4), round(control.update([5.0, 7.0]), 4)  # e = log 1.5
    (0.3536, 0.4639)
    """

    follows_kl = True
    SUM, ERROR = 0.07, 0.6
    SLOPE, RANGE = 2.0, 100.0

    def __init__(self, coeff: float, *, target: float, model: Any = None) -> None:
        super().__init__(coeff, model=model)
        self.target, self.start = float(target), max(self.coeff, (2 * target) ** -0.5)
        self.level = self._set(self.start)
        self.last: float | None = None  # last e
        self.slope = 0.0

    @property
    def k3_weight(self) -> float:
        """Return w = 2 t / (e^2t - 1), the weight of k3 in the followed KL, k1 + w (k3 - k1).

        Every weight gives the KL in the mean, because k1 and k3 have the same mean. This weight has
        the smallest variance if the KL t = `target` is in one token with a normal log-ratio.
        """
        twice = min(2 * self.target, 700.0)
        return twice / math.expm1(twice)

    def update(self, kl_values: Sequence[float]) -> float:
        """Return the next coefficient; without values it does not change."""
        if not (values := floats(kl_values)):
            return self.coeff
        ratio = max(sum(values) / len(values) / self.target, math.exp(-1))
        error = min(math.log(ratio), 1.0)
        if self.last is not None:
            self.slope += 0.5 * (error - self.last - self.slope)
        self.last = error
        level = self.level * math.exp(self.SUM * error)
        self.level = min(max(level, self.start / self.RANGE), self.start * self.RANGE)
        return self._set(self.level * math.exp(self.ERROR * error + self.SLOPE * self.slope))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"coeff": self.coeff, "level": self.level, "last": self.last, "slope": self.slope}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        super().load_state_dict(state)
        self.level, self.last, self.slope = state["level"], state["last"], state["slope"]


def constant(coeff: float) -> ConstantKLController:
    """Return the controller of kl.controller=constant."""
    return ConstantKLController(kl_coef=coeff)


# The values of kl.controller. A controller gets the keys of kl.* that are its arguments, `total`
# (iterations) and `responses` (of an iteration); an argument without a default is required.
CONTROLLERS: dict[str, Callable[..., KLControllerBase]] = {
    "constant": constant,
    "budget": BudgetKLController,
    "adaptive": TargetKLController,
    "linear": LinearKLController,
}


def floats(values: Sequence[float]) -> list[float]:
    """Return the values as floats; raise ValueError unless all are finite."""
    if values is None:
        raise ValueError("expected kl_values, got None; give the KL of each sequence, or []")
    out = [float(value) for value in values]
    if not all(map(math.isfinite, out)):
        raise ValueError(f"expected finite KL values, got {out}")
    return out
