"""Advantages: from task rewards and the KL penalty to one number a token, [B, T]."""

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from policies.value_head import Critic, values_in_parts
from policies.wrappers.transformers_wrapper import TransformersWrapper
from trainer.gae import gae
from trainer.kl_control import KLControllerBase
from trainer.losses import STD_FLOOR, group_advantage
from trainer.runtime import Runtime


def place_rewards(batch: TensorDictBase, coeff: float) -> None:
    """Write reward_kl = -coeff * kl_penalty at kept tokens, and reward = reward_raw + reward_kl."""
    raw, penalty = batch.get("reward_raw"), batch.get("kl_penalty", None)
    if coeff and penalty is None:
        raise ValueError("kl.where=reward needs kl_penalty in the batch, found none; measure it")
    charged = -coeff * penalty * batch.get("loss_mask") if coeff else torch.zeros_like(raw)
    batch.set("reward_kl", charged)
    batch.set("reward", raw + charged)


class GroupAdvantage:
    """Score each trajectory against the other samples of its prompt (GRPO).

    `where` says whether the KL is charged here, in the reward, or later, in the loss.
    Reads reward_raw, kl_penalty, loss_mask; writes reward_kl, reward, advantage, all [B, T].
    """

    def __init__(
        self,
        *,
        group_size: int,
        scale_by_std: bool = True,
        credit: str = "trajectory",
        where: str = "loss",
        kl: KLControllerBase,
    ) -> None:
        self.group_size, self.scale_by_std, self.credit = group_size, scale_by_std, credit
        self.charges = where == "reward"
        self.kl = kl

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Add the advantage to the batch."""
        place_rewards(batch, self.kl.coeff if self.charges else 0.0)
        advantage = group_advantage(
            batch.get("reward_raw"),
            batch.get("reward_kl"),
            batch.get("loss_mask"),
            self.group_size,
            scale_by_std=self.scale_by_std,
            credit=self.credit,
        )
        return batch.set("advantage", advantage)


class GAEAdvantage:
    """Score each token against what a critic expected (PPO; Schulman et al. 2016, 1506.02438).

    It gives the policy's scorer the critic (`critic`: arguments of `Critic`), so make it before the
    optimizer. `whiten` standardises the advantages over the kept tokens of all ranks.
    Reads reward_raw, kl_penalty, loss_mask; writes reward_kl, reward, value, returns (= advantage +
    value, before whitening), advantage, all [B, T].
    """

    def __init__(
        self,
        *,
        policy: TransformersWrapper,
        runtime: Runtime,
        kl: KLControllerBase,
        critic: Mapping[str, Any] | None = None,
        gamma: float = 1.0,
        lmbda: float = 0.95,
        whiten: bool = True,
        where: str = "reward",
        micro_batch_tokens: int | None = None,
    ) -> None:
        policy.scorer.critic = Critic(policy.scorer, **(critic or {}))
        self.scorer, self.runtime, self.kl = policy.scorer, runtime, kl
        self.gamma, self.lmbda, self.whiten = gamma, lmbda, whiten
        self.charges, self.limit = where == "reward", micro_batch_tokens

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Add values, returns and advantages to the batch."""
        place_rewards(batch, self.kl.coeff if self.charges else 0.0)
        mask = batch.get("loss_mask")
        value = values_in_parts(
            self.scorer,
            batch.get(("tokens", "full")),
            batch.get(("masks", "all_attention_mask")),
            mask,
            limit=self.limit,
            group_id=batch.get("group_id", None),
        )
        advantage = gae(batch.get("reward"), value, mask, gamma=self.gamma, lmbda=self.lmbda)
        batch.set("value", value)
        batch.set("returns", advantage + value)
        return batch.set("advantage", self._whitened(advantage, mask) if self.whiten else advantage)

    def _whitened(self, advantage: Tensor, mask: Tensor) -> Tensor:
        """Return (A - mean) / (unbiased std + 1e-4) over the kept tokens of all ranks."""
        kept = advantage[mask].double()
        count, total = self.runtime.sum(torch.stack([mask.sum().double(), kept.sum()])).tolist()
        mean = total / max(count, 1)
        squares = float(self.runtime.sum((kept - mean).square().sum()))
        std = (squares / max(count - 1, 1)) ** 0.5
        return (advantage - mean) / (std + STD_FLOOR) * mask


class NoAdvantage:
    """Leave the batch as it is: imitation has no reward."""

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the batch."""
        return batch
