"""Advantages [B, T] from the task reward and the KL part of the reward."""

import math
from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from policies.layout import groups
from policies.precision import in_float64
from trainer.baselines import STD_FLOOR, group_advantage, group_mean, spread
from trainer.batch import batch_keys
from trainer.kl.leash import Leash
from trainer.runtime import Runtime

Scale = Callable[[Tensor, Tensor], Tensor]


def mean_and_std(values: Tensor, runtime: Runtime | None) -> tuple[float, float]:
    """Return mean and unbiased standard deviation over the values of all ranks."""
    sum_ranks = runtime.all_reduce if runtime else torch.Tensor.clone
    values = in_float64(values)  # [K]
    size = torch.tensor(float(values.numel()), dtype=values.dtype, device=values.device)
    count, total = sum_ranks(torch.stack([size, values.sum()])).tolist()
    mean = total / max(count, 1)
    squares = float(sum_ranks((values - mean).square().sum()))
    return mean, (squares / max(count - 1, 1)) ** 0.5


def whiten(advantage: Tensor, mask: Tensor, runtime: Runtime | None) -> Tensor:
    """Return (A - mean) / (std + 1e-4) over the tokens of the mask on all ranks, 0 elsewhere."""
    mean, std = mean_and_std(advantage[mask], runtime)  # over the K masked tokens
    return (advantage - mean) / (std + STD_FLOOR) * mask  # [B, T]


def beta_density(p: Tensor, mean: float, std: float) -> Tensor:
    """Return the density of Beta(1 + a/3, 1 + b/3) at p, at least 1e-6.

    Beta(a, b) is the distribution with `mean` and `std`. If a reward is 1 with probability
    p ~ Beta(a, b), else 0, division by the density minimises the variance of the gradient: BNPO
    (arXiv 2506.02864) theorem 1. As in the authors' code, both parameters of the density are at
    least 1; if std is at most 0.001, the density is 1.

    >>> beta_density(torch.tensor([0.5]), mean=0.5, std=(0.25 / 7) ** 0.5)  # a = b = 3
    tensor([1.5000])
    """
    total = mean * (1 - mean) / std**2 - 1 if std > 1e-3 else 0.0  # a + b
    shapes = (torch.tensor(max(1 + total * part / 3, 1.0)).double() for part in (mean, 1 - mean))
    density = torch.distributions.Beta(*shapes, validate_args=False).log_prob(p.cpu().double())
    return density.exp().clamp(min=1e-6).to(p)  # dtype and device of p


class GroupAdvantage:
    """Compute A = (reward - baseline) / scale from the trajectories of one prompt (GRPO).

    `group_advantage` has the formula. `baseline`: group_mean, leave_one_out (RLOO) or none
    (REINFORCE++). `whiten` standardises A over the loss tokens of all ranks (REINFORCE++, arXiv
    2501.03262v9 eq. 5 and 7); then `clip_advantage` bounds |A|.
    Writes advantage [B, T] and the keys that `Leash.charge_reward` writes.
    """

    reads = (*Leash.reward_reads, *batch_keys("group_id"))

    def __init__(
        self,
        *,
        group_size: int,
        baseline: str = "group_mean",
        scale_by_std: bool = True,
        whiten: bool = False,
        clip_advantage: float | None = None,
        credit: str = "trajectory",
        leash: Leash,
        runtime: Runtime | None = None,
    ) -> None:
        self.group_size, self.baseline, self.credit = group_size, baseline, credit
        self.scale_by_std = scale_by_std
        self.whiten, self.bound, self.runtime = whiten, clip_advantage or math.inf, runtime
        self.leash = leash

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Add the advantage to the batch."""
        self.leash.charge_reward(batch)
        mask, order = batch.get("loss_mask"), self._order(batch)  # [B, T], [B]
        advantage = torch.zeros_like(batch.get("reward"))  # [B, T]
        advantage[order] = group_advantage(
            batch.get("reward_raw")[order],
            batch.get("reward_kl")[order],
            mask[order],
            self.group_size,
            baseline=self.baseline,
            scale=self.scale(),
            credit=self.credit,
        )
        if self.whiten:
            advantage = whiten(advantage, mask, self.runtime)
        return batch.set("advantage", advantage.clamp(-self.bound, self.bound))

    def _order(self, batch: TensorDictBase) -> Tensor:
        """Return row indices [B] sorted so that the rows of a group are adjacent."""
        ids = batch.get("group_id", None)
        if ids is None:  # groups are adjacent already
            return torch.arange(batch.batch_size[0])
        members = groups(ids)  # P lists of G row indices
        uneven = next((len(group) for group in members if len(group) != self.group_size), None)
        if uneven is not None:
            raise ValueError(f"expected groups of {self.group_size} rows, got a group of {uneven}")
        return torch.tensor(list(chain(*members)), dtype=torch.int64)  # [B]

    def scale(self) -> Scale | None:
        """Return the function of rewards and row mask [P, G] that gives the divisor [P, 1]."""
        return spread if self.scale_by_std else None


class BetaAdvantage(GroupAdvantage):
    """Divide the advantages of a group by a Beta density at the group's mean reward (BNPO).

    The Beta distribution is fitted to the mean rewards of the groups on all ranks, without groups
    that have no loss tokens. Rewards must lie in [0, 1]. Source: Xiao et al. 2025 (arXiv
    2506.02864) theorem 1.
    """

    def scale(self) -> Scale:
        """Return the function that computes the density."""
        if self.scale_by_std:
            raise ValueError("BNPO divides by a Beta density: set algorithm.scale_by_std=false")
        return self._density

    def _density(self, rewards: Tensor, mask: Tensor) -> Tensor:
        """Return the density [P, 1] at each group's mean reward; rewards and row mask [P, G]."""
        if rewards.numel() and not 0 <= float(rewards.min()) <= float(rewards.max()) <= 1:
            got = f"{float(rewards.min()):g} to {float(rewards.max()):g}"
            raise ValueError(f"BNPO expects rewards from 0 to 1, got {got}; rescale the reward")
        mean = group_mean(rewards, mask)[:, :1]  # [P, 1]
        return beta_density(mean, *mean_and_std(mean[mask.any(-1)], self.runtime))


class DecoupledAdvantage(GroupAdvantage):
    """Standardise each part of the reward in its group, add them, standardise over the batch.

    GDPO: Liu et al. 2026 (arXiv 2601.05242). The total reward is only logged. `part_weights` maps
    names of parts to weights. None: the functions of env.rewards with their weights; if there are
    none, every part has weight 1, also a part that the task only logs. A part that does not apply
    to a row (NaN) adds nothing to it. Means and deviations ignore rows without loss tokens.
    """

    def __init__(
        self,
        *,
        group_size: int,
        leash: Leash,
        part_weights: Mapping[str, float] | None = None,
        task: Any = None,
        runtime: Runtime | None = None,
    ) -> None:
        super().__init__(group_size=group_size, leash=leash, runtime=runtime)
        functions = getattr(task, "functions", {})  # env.rewards
        self.usual = {name: function.weight for name, function in functions.items()}
        self.part_weights = part_weights

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Add the advantage to the batch."""
        self.leash.charge_reward(batch)
        mask, order = batch.get("loss_mask"), self._order(batch)  # [B, T], [B]
        learnt = mask[order].any(-1).view(-1, self.group_size)  # [P, G]
        total = in_float64(torch.zeros_like(learnt, dtype=torch.float32))  # [P, G]
        parts = dict(batch.get("reward_part", {}).items())
        for name, weight in self.weights(parts).items():
            values = in_float64(parts[name][order]).view_as(learnt)  # [P, G]
            applies = learnt & ~values.isnan()  # [P, G]
            values = values.where(applies, 0.0)
            distance = (values - group_mean(values, applies)) / spread(values, applies)
            total = total + weight * distance.where(applies, 0.0)
        mean, std = mean_and_std(total[learnt], self.runtime)
        advantage = torch.zeros_like(batch.get("reward"))  # [B, T]
        scaled = ((total - mean) / (std + STD_FLOOR)).to(advantage).view(-1, 1)  # [B, 1]
        kl = batch.get("reward_kl")[order]  # [B, T]
        options = {"group_size": self.group_size, "scale": None}
        of_kl = group_advantage(torch.zeros_like(kl), kl, mask[order], **options)  # [B, T]
        advantage[order] = scaled * mask[order] + of_kl
        return batch.set("advantage", advantage)

    def weights(self, parts: Collection[str]) -> Mapping[str, float]:
        """Return the weight of each part that counts; `parts`: names of all parts of the reward."""
        usual = self.usual or dict.fromkeys(parts, 1.0)
        weights = usual if self.part_weights is None else self.part_weights
        if not weights or weights.keys() - {*parts}:
            raise ValueError(
                "algorithm.part_weights: GDPO expects weights of parts of the reward, of "
                f"{', '.join(parts) or 'env.rewards'}, got {dict(weights)}"
            )
        return weights


class MeasuredReward:
    """Write the reward for the metrics, but no advantage: distillation learns from its teacher."""

    reads = Leash.reward_reads

    def __init__(self, *, leash: Leash) -> None:
        self.leash = leash

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Add the keys that `Leash.charge_reward` writes."""
        return self.leash.charge_reward(batch)


class NoAdvantage:
    """Return the batch unchanged: SFT has no reward."""

    reads = ()

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the batch."""
        return batch
