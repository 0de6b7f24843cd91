"""Advantages: from task rewards and the KL penalty to one number a token, [B, T]."""

from tensordict import TensorDictBase
from torch import zeros_like

from trainer.kl_control import KLControllerBase
from trainer.losses import group_advantage


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
        raw, mask = batch.get("reward_raw"), batch.get("loss_mask")
        penalty = batch.get("kl_penalty", None)
        if self.charges and penalty is None:
            raise ValueError(
                "kl.where=reward needs kl_penalty in the batch, found none; measure it"
            )
        reward_kl = -self.kl.coeff * penalty * mask if self.charges else zeros_like(raw)
        batch.set("reward_kl", reward_kl)
        batch.set("reward", raw + reward_kl)
        advantage = group_advantage(
            raw,
            reward_kl,
            mask,
            self.group_size,
            scale_by_std=self.scale_by_std,
            credit=self.credit,
        )
        return batch.set("advantage", advantage)


class NoAdvantage:
    """Leave the batch as it is: imitation has no reward."""

    def __init__(self, *, kl: KLControllerBase | None = None) -> None:
        pass

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the batch."""
        return batch
