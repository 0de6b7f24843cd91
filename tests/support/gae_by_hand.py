"""Advantage estimation as the paper writes it: a double loop in float64."""

import torch
from torch import Tensor

import trainer.gae


def slow(reward: Tensor, value: Tensor, mask: Tensor, gamma: float, lmbda: float) -> Tensor:
    """Return A_t = sum over l of (gamma lmbda)^l delta_(t+l), term by term over the kept tokens."""
    out = torch.zeros_like(value)
    for i in range(len(mask)):
        steps = [t for t in range(mask.shape[1]) if mask[i, t]]
        r, v = [float(reward[i, t]) for t in steps], [float(value[i, t]) for t in steps]
        v.append(0.0)  # the episode is over, by itself or by a limit
        for n, t in enumerate(steps):
            for k in range(n, len(steps)):
                delta = r[k] + gamma * v[k + 1] - v[k]
                out[i, t] += (gamma * lmbda) ** (k - n) * delta
    return out


def random_case(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return reward, value, mask [6, 12] with prompts, tool turns, padding and an empty row."""
    draw = torch.Generator().manual_seed(seed)
    reward, value = (torch.randn(6, 12, generator=draw, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(6, 12, generator=draw) < 0.6
    mask[0], mask[1] = True, False
    mask[2] = torch.tensor([0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0]).bool()
    return reward, value, mask


def agrees_with_the_paper() -> None:
    """Raise AssertionError unless gae is the sum of the paper over the kept tokens."""
    reward, value, mask = random_case()
    for gamma in (1.0, 0.9):
        for lmbda in (0.0, 0.5, 0.95, 1.0):
            got = trainer.gae.gae(reward, value, mask, gamma=gamma, lmbda=lmbda)
            want = slow(reward, value, mask, gamma, lmbda)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
