"""A policy after some steps, with its optimiser and its checkpoints."""

from pathlib import Path

import torch
from contracts import make_policy

from trainer.checkpoint import Checkpoints
from trainer.optimizer import make_optimizer
from trainer.runtime import Runtime


def step(policy, optimizer, seed: int) -> None:
    """Take one AdamW step on a loss of its own."""
    generator = torch.Generator().manual_seed(seed)
    loss = sum((p * torch.randn(p.shape, generator=generator)).sum() for p in weights(policy))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def weights(policy) -> list:
    return list(policy.model.parameters())


def make(folder: Path, *, steps: int = 0, **options):
    """Return a policy and optimiser after some steps, and their checkpoints."""
    policy = make_policy.__wrapped__()
    optimizer = make_optimizer(policy.model, lr=1e-3, weight_decay=0.1)
    for seed in range(steps):
        step(policy, optimizer, seed)
    return policy, optimizer, Checkpoints(Runtime(folder), policy, optimizer, **options)
