"""Objectives: per-token loss terms, to be weighted and summed once, in trainer/update.py.

An objective maps (scores, batch) to `Terms` and never averages: `weight` [B, T] does that.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from policies.scorer import Scores
from trainer.kl_control import KLControllerBase
from trainer.losses import clipped_policy_term, is_clipped, kl_term, ratio, value_term


@dataclass(frozen=True)
class Terms:
    """Per-token [B, T]: losses (already scaled by their coefficient) and what is worth logging."""

    loss: dict[str, Tensor]
    means: dict[str, Tensor] = field(default_factory=dict)  # averaged over the loss mask
    maxima: dict[str, Tensor] = field(default_factory=dict)


class GRPOObjective:
    """Clipped policy gradient, with the KL in the loss (GRPO eq. 3, arXiv 2402.03300).

    Reads log_probs.full (of the generating policy), advantage and, with where="loss",
    ref_log_probs.full.
    """

    def __init__(
        self,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        estimator: str = "k3",
        where: str = "loss",
        kl: KLControllerBase,
    ) -> None:
        self.clip_low, self.clip_high = clip_low, clip_high
        self.estimator, self.in_loss, self.kl = estimator, where == "loss", kl
        self.needs_reference = self.in_loss and estimator == "full"

    def __call__(self, scores: Scores, batch: TensorDictBase) -> Terms:
        """Return the terms of a micro-batch."""
        curr, gen = scores.log_probs, batch.get(("log_probs", "full"))
        mask = batch.get("loss_mask")
        advantage = batch.get("advantage")
        loss = {"policy": clipped_policy_term(curr, gen, advantage, self.clip_low, self.clip_high)}
        with torch.no_grad():
            moved = ratio(curr, gen)  # [B, T]
            clipped = is_clipped(moved, advantage, self.clip_low, self.clip_high)
            means = {
                "kl/behaviour": gen - curr,
                "kl/mismatch": (gen - curr).abs(),
                "policy/clip_fraction": clipped.float(),
            }
            maxima = {"policy/ratio_max": torch.where(mask, moved, 0.0)}
        if scores.entropy is not None:
            means["policy/entropy"] = scores.entropy
        if scores.full_kl is not None:
            means["kl/ref_full"] = scores.full_kl.detach()
        if self.in_loss and self.kl.coeff > 0:
            loss["kl"] = self.kl.coeff * self._kl(scores, batch)
        return Terms(loss, means, maxima)

    def _kl(self, scores: Scores, batch: TensorDictBase) -> Tensor:
        if self.estimator == "full":
            return scores.full_kl
        return kl_term(scores.log_probs, batch.get(("ref_log_probs", "full")), self.estimator)


class PPOObjective(GRPOObjective):
    """Clipped policy gradient and the critic's squared error (PPO, arXiv 1707.06347 eq. 9).

    Reads value and returns too. `value_clip` None does not clip the value.
    """

    def __init__(
        self,
        *,
        value_coeff: float = 0.5,
        value_clip: float | None = 0.2,
        estimator: str = "k1",
        where: str = "reward",
        **options: Any,
    ) -> None:
        super().__init__(estimator=estimator, where=where, **options)
        self.value_coeff, self.value_clip = value_coeff, value_clip

    def __call__(self, scores: Scores, batch: TensorDictBase) -> Terms:
        """Return the terms of a micro-batch."""
        terms = super().__call__(scores, batch)
        value, old, returns = scores.values, batch.get("value"), batch.get("returns")
        assert value is not None, "GAEAdvantage gives the scorer its critic"
        terms.loss["value"] = self.value_coeff * value_term(value, old, returns, self.value_clip)
        if self.value_clip is not None:
            moved = (value.detach() - old).abs() > self.value_clip
            terms.means["value/clip_fraction"] = moved.float()
        return terms


class SFTObjective:
    """Negative log-likelihood of the learnt tokens."""

    needs_reference = False

    def __call__(self, scores: Scores, batch: TensorDictBase) -> Terms:
        """Return the terms of a micro-batch."""
        means = {} if scores.entropy is None else {"policy/entropy": scores.entropy}
        return Terms({"policy": -scores.log_probs}, means)
