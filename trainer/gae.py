"""Generalised advantage estimation over the tokens of chats, a pure function.

Source: Schulman et al. 2016 (arXiv 1506.02438) eq. 16. Only kept tokens are steps: the next step of
a token is the next kept one, over whatever a user or a tool says in between. The episode ends with
the last kept token, by itself or by a limit. Letters: B rows, T tokens.
"""

import math

import torch
from torch import Tensor


def gae(
    reward: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lmbda: float = 0.95,
    done: Tensor | None = None,
) -> Tensor:
    """Return A_t = sum over l of (gamma lmbda)^l delta_(t+l), 0 outside the mask; all [B, T].

    delta_t = reward_t + gamma V_(t+1) - V_t, where t + 1 is the next kept token and V is 0 after
    the last. Rewards outside the mask do not count. Where `done`, an episode ends inside a row.

    >>> reward, value = torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[0.5, 9.0, 0.25]])
    >>> gae(reward, value, torch.tensor([[True, False, True]]), lmbda=0.5).tolist()
    [[0.125, 0.0, 0.75]]
    """
    check_shares(gamma, lmbda)
    out = torch.zeros_like(value)
    after = advantage = torch.zeros_like(value[:, 0])  # [B] V and A of the next kept token
    for t in mask.any(0).nonzero().squeeze(-1).flip(0).tolist():
        keep = mask[:, t]
        if done is not None:
            ends = done[:, t] & keep
            after, advantage = after.masked_fill(ends, 0), advantage.masked_fill(ends, 0)
        delta = reward[:, t] + gamma * after - value[:, t]
        advantage = torch.where(keep, delta + gamma * lmbda * advantage, advantage)
        after = torch.where(keep, value[:, t], after)
        out[:, t] = advantage * keep
    return out


def check_shares(gamma: float, lmbda: float) -> None:
    if not 0 <= gamma <= 1 or not 0 <= lmbda <= 1:
        raise ValueError(f"expected gamma and lmbda from 0 to 1, got {gamma} and {lmbda}")


def return_sums(returns: Tensor, value: Tensor, mask: Tensor) -> dict[str, float]:
    """Return the sums over kept tokens that `explained_variance` needs; add them over ranks."""
    y, error = returns[mask].double(), (returns - value)[mask].double()
    numbers = torch.stack([y.sum(), (y**2).sum(), error.sum(), (error**2).sum()]).tolist()
    return {"count": float(len(y)), **dict(zip(("y", "yy", "e", "ee"), numbers, strict=True))}


def explained_variance(sums: dict[str, float]) -> float:
    """Return 1 - Var(returns - value) / Var(returns); NaN where the returns do not vary.

    >>> y, v = torch.tensor([[0.0, 2.0]]), torch.tensor([[0.5, 1.5]])
    >>> explained_variance(return_sums(y, v, y >= 0))
    0.75
    """
    count = max(sums["count"], 1.0)
    total = sums["yy"] / count - (sums["y"] / count) ** 2
    left = sums["ee"] / count - (sums["e"] / count) ** 2
    floor = 1e-12 * sums["yy"] / count  # what rounding leaves of equal returns
    return 1 - left / total if total > floor else math.nan
