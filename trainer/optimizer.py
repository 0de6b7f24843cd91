"""AdamW with weight decay on matrices only, and the learning rate as a function of the step."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def make_optimizer(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """Return fused AdamW on the parameters that require a gradient.

    Norms and biases (fewer than two dimensions) are not decayed. A scorer's critic has groups of
    its own; what "scale" and "since" mean in a group is in trainer/update.py.
    """
    critic = getattr(model, "critic", None)
    theirs = set() if critic is None else set(critic.parameters())
    kept = [p for p in model.parameters() if p.requires_grad]
    policy: dict[str, Any] = {"params": [p for p in kept if p not in theirs]}
    both = [policy]
    if critic is not None:
        policy["since"] = critic.warmup
        own = [p for p in kept if p in theirs]
        both.append({"params": own, "scale": critic.lr_scale})
    groups = [part for group in both for part in _by_decay(group, weight_decay)]
    return torch.optim.AdamW(groups, lr=lr, betas=tuple(betas), eps=eps, fused=True)


def _by_decay(group: dict[str, Any], weight_decay: float) -> list[dict[str, Any]]:
    """Return a parameter group as its matrices, which are decayed, and the rest; none is empty."""
    matrices = [p for p in group["params"] if p.ndim > 1]
    others = [p for p in group["params"] if p.ndim <= 1]
    parts = ((matrices, weight_decay), (others, 0.0))
    return [{**group, "params": p, "weight_decay": decay} for p, decay in parts if p]


def make_schedule(
    schedule: str = "constant", *, lr: float, warmup: int = 0, total: int
) -> Callable[[int], float]:
    """Return step (0-based) -> learning rate: constant, linear or cosine to 0, after a warm-up.

    >>> rate = make_schedule("linear", lr=1.0, warmup=2, total=6)
    >>> [round(rate(s), 2) for s in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    shapes: dict[str, Callable[[float], float]] = {
        "constant": lambda x: 1.0,
        "linear": lambda x: 1.0 - x,
        "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)),
    }
    if schedule not in shapes:
        raise ValueError(f"expected optimizer.schedule in {sorted(shapes)}, got {schedule!r}")

    def rate(step: int) -> float:
        if step < warmup:
            return lr * (step + 1) / warmup
        done = (step - warmup) / max(total - warmup, 1)
        return lr * shapes[schedule](min(done, 1.0))

    return rate
