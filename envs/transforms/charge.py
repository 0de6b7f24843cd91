"""What the KL costs: it is charged to rewards of one number per token, or per row."""

from __future__ import annotations

import torch
from torch import Tensor

from envs.transforms.kl import kl_reward
from envs.transforms.values import Dense, Values


def charge(
    reward: Values, kl: Tensor, kept: Tensor, edge: Dense, *, coeff: float | Tensor
) -> Values:
    """Return the reward with the KL charged, [B, T, 1], ragged where the KL is; kl, kept [B, T].

    A reward that comes dense, one number per token, stays so.
    """
    padded = isinstance(reward, Tensor) and reward.shape[1:-1].numel() > 1
    if isinstance(reward, list):
        each = all(row.numel() == 1 for row in reward)  # one number per row
        reward = torch.stack(reward) if each else edge.dense(reward, "rewards")
    if reward.shape == (*kl.shape[:-1], 1, 1):
        reward = reward.squeeze(-1)
    if reward.shape == (*kl.shape[:-1], 1):
        real = torch.ones_like(kept) if edge.real is None else edge.real
        reward = _at_last(reward, torch.where(kept.any(-1, keepdim=True), kept, real))
    if reward.shape != (*kl.shape, 1):
        raise ValueError(
            f"The rewards have shape {tuple(reward.shape)} but the kl has shape "
            f"{tuple(kl.shape)}: expected one reward per token, {(*kl.shape, 1)}, or one "
            f"number per row, {(*kl.shape[:-1], 1)}"
        )
    charged = reward + kl_reward(kl, coeff)
    return charged if padded else edge.ragged(charged)


def _at_last(reward: Tensor, kept: Tensor) -> Tensor:
    """Return reward [B, 1] at the last kept token, 0 elsewhere, [B, T, 1]."""
    last = (kept * torch.arange(kept.shape[-1], device=kept.device)).argmax(-1, keepdim=True)
    return reward.new_zeros(kept.shape).scatter(-1, last, reward).unsqueeze(-1)
