"""KL penalty to the reference policy, charged once: in the reward or in the loss."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

from policies.scorer import Scores
from trainer.batch import reads
from trainer.kl_control import KLControllerBase
from trainer.kl_estimators import Estimator, TokenKL, check_place, find_estimator


@dataclass(frozen=True)
class Leash:
    """Charge coeff * KL of each sampled token, in one place.

    The advantage calls `charge_reward`, the objective calls `loss_term`, on the same Leash. `where`
    ("reward" or "loss") selects the one that charges. `controller` sets the coefficient;
    `estimator` is a row of trainer/kl_estimators.py or an own `Estimator`. Without `allow_biased`,
    raise ValueError if the pair of `where` and `estimator` does not have the gradient of a KL.
    `jsd_weight` is the weight of the reference in the mixture of "jsd". A token whose KL in the
    loss is above `cap` nats counts as `cap`, without a gradient.

    >>> from trainer.kl_control import ConstantKLController
    >>> Leash(ConstantKLController(kl_coef=0.1), estimator="k1", where="reward").coeff
    0.1
    """

    # Keys that `charge_reward` reads, and keys that `loss_term` reads.
    charged: ClassVar = reads(
        "reward_raw", "loss_mask", "kl_penalty", ("log_probs", "full"), ("ref_log_probs", "full")
    )
    learnt: ClassVar = reads(("log_probs", "full"), ("ref_log_probs", "full"))

    controller: KLControllerBase
    estimator: str | Estimator = "k3_ratio"
    where: str = "loss"
    allow_biased: bool = False
    jsd_weight: float = 0.5
    cap: float | None = None

    def __post_init__(self) -> None:
        check_place(self.where, self.estimator, allow_biased=self.allow_biased)

    @property
    def coeff(self) -> float:
        """Return the current weight of the KL (nats) relative to the reward."""
        return self.controller.coeff

    @property
    def needs_reference(self) -> bool:
        """Return whether the update reads the distributions of the reference."""
        return self.where == "loss" and self._estimator.needs == "vocabulary"

    @property
    def mixture(self) -> float:
        """Return the mixture of the exact divergence (`TokenDistribution.scores`)."""
        return self._estimator.mixture

    def exact(self, scores: Scores) -> dict[str, Tensor]:
        """Return the exact divergence [B, T] by the name of its metric, or {} if not computed."""
        kl = scores.full_kl
        return {} if kl is None else {self._estimator.metric: kl.detach()}

    @property
    def _estimator(self) -> Estimator:
        row = find_estimator(self.estimator)
        return replace(row, mixture=self.jsd_weight) if self.estimator == "jsd" else row

    def charge_reward(self, batch: TensorDictBase) -> TensorDictBase:
        """Write reward_kl and reward = reward_raw + reward_kl.

        reward_kl [B, T] is -coeff * KL at the tokens of the loss mask, or 0 if the loss charges the
        KL. kl_left [B] is the coefficient that the loss must charge; `check_charged` reads it.
        """
        raw, in_reward = batch.get("reward_raw"), self.where == "reward"  # [B, T]
        charged = torch.zeros_like(raw)  # [B, T]
        if in_reward and self.coeff:
            log_ratio = batch.get("kl_penalty", None)  # [B, T]
            if log_ratio is None:
                raise ValueError("kl.where=reward needs kl_penalty, got none; use RetrieveKL")
            gen = batch.get(("log_probs", "full"))  # [B, T]
            kl = self._estimator.term(TokenKL(log_ratio, gen, gen))  # [B, T]
            charged = -self.coeff * kl * batch.get("loss_mask")  # [B, T]
        batch.set("reward_kl", charged)
        batch.set("kl_left", torch.full_like(raw[:, 0], 0.0 if in_reward else self.coeff))
        return batch.set("reward", raw + charged)

    def loss_term(self, scores: Scores, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return {"kl": coeff * KL [B, T]}, or {} unless the loss charges the KL."""
        if self.where != "loss" or self.coeff == 0:
            return {}
        curr, gen = scores.log_probs, batch.get(("log_probs", "full"))  # [B, T]
        ref = batch.get(("ref_log_probs", "full"), None)  # [B, T]
        if ref is None:
            raise ValueError("kl.where=loss needs ref_log_probs.full, got none; use RetrieveKL")
        kl = self._estimator.term(TokenKL(curr - ref, curr, gen, scores.full_kl))  # [B, T]
        if kl.shape != curr.shape or kl.requires_grad != curr.requires_grad:
            text = f"expected the term of kl.estimator to be {[*curr.shape]} with a gradient"
            raise ValueError(f"{text}, got {[*kl.shape]}, requires_grad={kl.requires_grad}")
        return {"kl": self.coeff * (kl if self.cap is None else kl.clamp(max=self.cap))}

    def follow(self, metrics: Mapping[str, float], *, replies: int) -> None:
        """Update the coefficient from the KL of an iteration.

        `replies`: number on all ranks, including dropped replies, which have no KL.
        """
        valid = 1 - metrics.get("reward/dropped_fraction", 0.0)
        measured, share = metrics.get("kl/ref_sequence"), self.controller.k3_share
        if measured and share:
            length = measured / metrics["kl/ref"]  # tokens per reply = KL per reply / KL per token
            measured += share * (metrics["kl/ref_k3"] * length - measured)
        self.controller.follow(measured, sequences=round(replies * valid))


def is_charged_in_reward(batch: TensorDictBase) -> bool:
    """Return whether `charge_reward` ran on a batch and left no KL to the loss."""
    left = batch.get("kl_left", None)  # [B]
    return left is not None and not bool(left.any())  # waits for the device


def check_charged(leash: Leash, *, in_reward: bool, in_loss: bool) -> None:
    """Raise ValueError unless exactly one place charges the KL, or the coefficient is 0."""
    if leash.coeff == 0 or in_reward != in_loss:
        return
    how = "twice" if in_loss else "never"
    calls = "call leash.charge_reward in the advantage and leash.loss_term in the objective"
    raise ValueError(f"the KL of this batch is charged {how}; {calls}, of the same Leash")
