"""Generalised advantage estimation (GAE) over the tokens of chats, for PPO.

Source: Schulman et al. 2016 (arXiv 1506.02438) eq. 16. Only tokens of the loss mask are steps;
tokens of users and tools in between are skipped. The episode ends at the last step, also if a limit
cut it. All tensors are [B, T].
"""

import math

import torch
from tensordict import TensorDictBase
from torch import Tensor

from policies.protocols import Policy
from policies.scorer import score_in_parts
from trainer.advantage import whiten
from trainer.batch import batch_keys
from trainer.kl.leash import Leash
from trainer.runtime import Runtime


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

    delta_t = reward_t + gamma V_(t+1) - V_t, where t + 1 is the next token of the mask and V is 0
    after the last. Rewards outside the mask are ignored. `done` ends an episode inside a row.

    >>> reward, value = torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[0.5, 9.0, 0.25]])
    >>> gae(reward, value, torch.tensor([[True, False, True]]), lmbda=0.5).tolist()
    [[0.125, 0.0, 0.75]]
    """
    out = torch.zeros_like(value)
    after = advantage = torch.zeros_like(value[:, 0])  # [B] V and A of the next step
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


class GAEAdvantage:
    """Compute the advantage of each token by a critic and GAE (PPO; arXiv 1506.02438 eq. 16).

    The critic is `policy.scorer.critic` (`policies.Critic`). `whiten` standardises the
    advantages over the loss tokens of all ranks; then `clip_advantage` bounds them.
    Writes the keys that `Leash.charge_reward` writes, value, returns (advantage + value, before
    whitening) and advantage [B, T].
    """

    reads = (
        *Leash.reward_reads,
        *batch_keys("group_id", ("tokens", "full"), ("masks", "all_attention_mask")),
    )

    def __init__(
        self,
        *,
        policy: Policy,
        runtime: Runtime,
        leash: Leash,
        gamma: float = 1.0,
        lmbda: float = 0.95,
        whiten: bool = True,
        clip_advantage: float | None = None,
        micro_batch_tokens: int | None = None,
    ) -> None:
        if policy.scorer.critic is None:
            raise ValueError("expected a critic; set policy.scorer.critic = Critic(policy.scorer)")
        self.scorer, self.runtime, self.leash = policy.scorer, runtime, leash
        self.gamma, self.lmbda = gamma, lmbda
        self.whiten, self.bound = whiten, clip_advantage or math.inf
        self.limit = micro_batch_tokens

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Add values, returns and advantages to the batch."""
        self.leash.charge_reward(batch)
        mask = batch.get("loss_mask")  # [B, T]
        inputs = batch.get(("tokens", "full")), batch.get(("masks", "all_attention_mask")), mask
        group = batch.get("group_id", None)
        with torch.no_grad():
            value = score_in_parts(self.scorer.values, *inputs, limit=self.limit, group_id=group)
        reward = batch.get("reward")  # [B, T]
        advantage = gae(reward, value, mask, gamma=self.gamma, lmbda=self.lmbda)  # [B, T]
        batch.set("value", value)
        batch.set("returns", advantage + value)
        if self.whiten:
            advantage = whiten(advantage, mask, self.runtime)
        return batch.set("advantage", advantage.clamp(-self.bound, self.bound))
