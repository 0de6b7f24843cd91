"""AdamW, with weight decay on matrices only."""

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

    Norms and biases (fewer than two dimensions) are not decayed.
    """
    kept = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in kept if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in kept if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=lr, betas=tuple(betas), eps=eps, fused=True)
