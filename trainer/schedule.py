"""Learning rates as a pure function of the optimiser step, so that resuming needs no state."""

import math
from collections.abc import Callable


def schedule(kind: str, *, lr: float, warmup: int = 0, total: int) -> Callable[[int], float]:
    """Return step (0-based) -> learning rate: constant, linear or cosine to 0, after a warm-up.

    >>> rate = schedule("linear", lr=1.0, warmup=2, total=6)
    >>> [round(rate(s), 2) for s in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    shapes: dict[str, Callable[[float], float]] = {
        "constant": lambda x: 1.0,
        "linear": lambda x: 1.0 - x,
        "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)),
    }
    if kind not in shapes:
        raise ValueError(f"expected optimizer.schedule in {sorted(shapes)}, got {kind!r}")

    def rate(step: int) -> float:
        if step < warmup:
            return lr * (step + 1) / warmup
        done = (step - warmup) / max(total - warmup, 1)
        return lr * shapes[kind](min(done, 1.0))

    return rate
