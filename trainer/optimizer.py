"""AdamW with weight decay on matrices only, and learning-rate schedules.

Half-precision weights are updated in float32: bfloat16 has 8 bits, so a step of less than 1/256 of
a weight, as with lr=1e-6, would round to 0.
"""

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
) -> "MasterAdamW":
    """Return fused AdamW (see `MasterAdamW`) on the parameters that require a gradient.

    Norms and biases (fewer than two dimensions) are not decayed. A scorer's critic has separate
    groups; trainer/update.py reads "scale" and "since" of a group.
    """
    critic = getattr(model, "critic", None)
    of_critic = set() if critic is None else set(critic.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    both: list[dict[str, Any]] = [{"params": [p for p in trained if p not in of_critic]}]
    if critic is not None:
        both[0]["since"] = critic.warmup
        both.append({"params": [p for p in trained if p in of_critic], "scale": critic.lr_scale})
    groups = []
    for group in both:
        matrices = [p for p in group["params"] if p.ndim > 1]
        others = [p for p in group["params"] if p.ndim <= 1]
        parts = ((matrices, weight_decay), (others, 0.0))
        groups += [{**group, "params": p, "weight_decay": decay} for p, decay in parts if p]
    return MasterAdamW(groups, lr=lr, betas=tuple(betas), eps=eps, fused=True)


class MasterAdamW(torch.optim.AdamW):
    """AdamW with a float32 copy ("master") of each half-precision weight in its state.

    The weight is the rounded master. The moments are float32 too: 12 bytes per weight, in addition
    to the weight's 2; float32 weights have no copy.

    >>> weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    >>> optimizer = MasterAdamW([weight], lr=1e-3, weight_decay=0.0)
    >>> for _ in range(8):
    ...     weight.grad = torch.ones_like(weight)
    ...     optimizer.step()
    >>> weight.item(), round(optimizer.state[weight]["master"].item(), 4)  # 0.999 is no bfloat16
    (0.9921875, 0.992)
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step; it removes the gradients of half-precision weights."""
        half = [
            (group["params"], i, p)
            for group in self.param_groups
            for i, p in enumerate(group["params"])
            if p.grad is not None and p.dtype.itemsize < 4
        ]
        # The masters replace the weights during the step. Assigning another dtype to a weight's
        # `data` would make autograd create a new gradient accumulator without DDP's hooks: no
        # gradient would be reduced from the next step on.
        for params, i, p in half:
            state = self.state.pop(p, {})
            master = nn.Parameter(state.pop("master", p.float()))
            master.grad, p.grad = p.grad.float(), None
            params[i] = master
            if state:
                self.state[master] = state
        masters = [params[i] for params, i, _ in half]
        super().step(closure)
        for (params, i, p), master in zip(half, masters, strict=True):
            params[i] = p
            self.state[p] = {**self.state.pop(master), "master": master.data}
            p.copy_(master)


def make_schedule(
    schedule: str = "constant", *, lr: float, warmup: int = 0, total: int
) -> Callable[[int], float]:
    """Return the function step (0-based) -> learning rate: constant, or linear or cosine to 0.

    >>> rate = make_schedule("linear", lr=1.0, warmup=2, total=6)
    >>> [round(rate(s), 2) for s in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    shapes: dict[str, Callable[[float], float]] = {
        "constant": lambda x: 1.0,
        "linear": lambda x: 1.0 - x,
        "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)),
    }

    def rate(step: int) -> float:
        if step < warmup:
            return lr * (step + 1) / warmup
        done = (step - warmup) / max(total - warmup, 1)
        return lr * shapes[schedule](min(done, 1.0))

    return rate
