"""Generalised advantage estimation over the tokens of chats: a pure function and TorchRL's GAE.

Source: Schulman et al. 2016 (arXiv 1506.02438) eq. 16. Only kept tokens are steps: the next step of
a token is the next kept one, over whatever a user or a tool says in between. The episode ends with
the last kept token, by itself or by a limit. Letters: B rows, T tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from trainer.loss_inputs import LossModule, find, need, per_token
from trainer.losses import standardise


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
    _check_shares(gamma, lmbda)
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


def _check_shares(gamma: float, lmbda: float) -> None:
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


@dataclass(frozen=True)
class GAEKeys:
    """Where GAE finds its input and writes its output."""

    advantage: NestedKey = "advantage"
    value_target: NestedKey = "value_target"
    value: NestedKey = "state_value"
    reward: NestedKey = ("next", "reward")
    done: NestedKey = ("next", "done")
    mask: NestedKey = "loss_mask"


class GAE(LossModule):
    """Write `advantage` and `value_target` (= advantage + value), of the shape of `state_value`.

    Values are [B, T] or [B, T, 1], found at the root or under "next". `value_network` (td -> td)
    fills in `state_value`, without a gradient. Tokens outside "loss_mask" (if any) are no steps; a
    per-token `done` (if any) ends an episode inside a row. `average_gae` whitens over the mask.
    Other than in TorchRL, an episode that was cut is not bootstrapped.

    >>> from tensordict import TensorDict
    >>> td = TensorDict({"state_value": [[0.5, 0.25]], "reward": [[0.0, 1.0]]}, [1])
    >>> GAE(gamma=1.0, lmbda=1.0)(td)["advantage"].tolist()
    [[0.5, 0.75]]
    """

    def __init__(
        self,
        *,
        gamma: float = 1.0,
        lmbda: float = 0.95,
        value_network: Callable[[TensorDictBase], TensorDictBase] | None = None,
        average_gae: bool = False,
    ) -> None:
        super().__init__()
        _check_shares(gamma, lmbda)
        self.gamma, self.lmbda = float(gamma), float(lmbda)
        self.value_network, self.average_gae = value_network, average_gae
        self.tensor_keys = GAEKeys()

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the tensordict with both entries."""
        keys = self.tensor_keys
        if self.value_network is not None:
            self.value_network(tensordict)
        given = need(tensordict, keys.value)
        value = given.squeeze(-1) if given.ndim == 3 else given  # [B, T]
        every = torch.ones_like(value, dtype=torch.bool)
        mask = find(tensordict, keys.mask)
        mask = every if mask is None else per_token(mask, every)
        done = find(tensordict, keys.done)
        done = per_token(done, every) if done is not None and done.numel() == mask.numel() else None
        reward = _placed(need(tensordict, keys.reward), mask)
        advantage = gae(reward, value, mask, gamma=self.gamma, lmbda=self.lmbda, done=done)
        target = (advantage + value) * mask
        if self.average_gae:
            advantage[mask] = standardise(advantage[mask])
        tensordict.set(keys.advantage, advantage.reshape(given.shape))
        return tensordict.set(keys.value_target, target.reshape(given.shape))


def _placed(reward: Tensor, mask: Tensor) -> Tensor:
    """Return the reward of each token; a reward per row is paid once, at its last kept token."""
    if reward.numel() != len(mask):
        return per_token(reward, mask)
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    return reward.reshape(-1, 1) * last
