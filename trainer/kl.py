"""KL penalty to the reference policy, charged once: in the reward or in the loss."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

from policies.scorer import Scores
from trainer.batch import reads
from trainer.kl_control import KLControllerBase, check_place
from trainer.losses import kl_term
from trainer.surrogates import token_ratio


@dataclass(frozen=True)
class Leash:
    """Charge coeff * KL of each sampled token, in one place.

    Advantage (calls `charge_reward`) and objective (calls `loss_term`) share one object; `where`
    ("reward" or "loss") selects which of the two acts. `estimator` is k1, k2, k3, full or k3_ratio;
    `controller` sets the coefficient. ValueError for a pair whose gradient is not that of the KL
    (docs/kl.md) unless `allow_biased`.

    k3_ratio is k3 times pi_curr / pi_gen, gradient and all: DeepSeek-V3.2 (arXiv 2512.02556) eq. 7.

    >>> from trainer.kl_control import ConstantKLController
    >>> Leash(ConstantKLController(kl_coef=0.1), estimator="k1", where="reward").coeff
    0.1
    """

    # What `charge_reward` reads and what `loss_term` reads.
    charged: ClassVar = reads(
        "reward_raw", "loss_mask", "kl_penalty", ("log_probs", "full"), ("ref_log_probs", "full")
    )
    learnt: ClassVar = reads(("log_probs", "full"), ("ref_log_probs", "full"))

    controller: KLControllerBase
    estimator: str = "k3"
    where: str = "loss"
    allow_biased: bool = False

    def __post_init__(self) -> None:
        check_place(self.where, self.estimator, allow_biased=self.allow_biased)

    @property
    def coeff(self) -> float:
        """Return the current weight of the KL (nats) relative to the reward."""
        return self.controller.coeff

    @property
    def needs_reference(self) -> bool:
        """Return whether the update must score the reference in the same pass."""
        return self.where == "loss" and self.estimator == "full"

    def charge_reward(self, batch: TensorDictBase) -> TensorDictBase:
        """Write reward_kl and reward = reward_raw + reward_kl.

        reward_kl [B, T] is -coeff * KL at the tokens of the loss mask, or 0 if the loss charges the
        KL. kl_left [B] is the coefficient left to the loss, for `check_charged`.
        """
        raw, active = batch.get("reward_raw"), self.where == "reward"  # [B, T]
        charged = torch.zeros_like(raw)  # [B, T]
        if active and self.coeff:
            charged = -self.coeff * self._measured(batch) * batch.get("loss_mask")
        batch.set("reward_kl", charged)
        batch.set("kl_left", torch.full_like(raw[:, 0], 0.0 if active else self.coeff))
        return batch.set("reward", raw + charged)

    def loss_term(self, scores: Scores, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return {"kl": coeff * KL [B, T]}, or {} unless the loss charges the KL."""
        if self.where != "loss" or self.coeff == 0:
            return {}
        if self.estimator == "full":
            assert scores.full_kl is not None
            return {"kl": self.coeff * scores.full_kl}  # [B, T]
        ref = batch.get(("ref_log_probs", "full"), None)  # [B, T]
        if ref is None:
            raise ValueError("kl.where=loss needs ref_log_probs.full, found none; score it")
        curr, weighted = scores.log_probs, self.estimator == "k3_ratio"
        term = kl_term(curr, ref, "k3" if weighted else self.estimator)
        if weighted:
            ratio = token_ratio(curr, batch.get(("log_probs", "full")))
            # The gradient r k3 + r (1 - exp(ref - curr)) without its large parts, which cancel.
            slope = (ratio * (curr - ref)).detach()
            term = (ratio * term).detach() + slope * (curr - curr.detach())
        return {"kl": self.coeff * term}

    def follow(self, metrics: Mapping[str, float], *, replies: int) -> None:
        """Update the coefficient by the KL of an iteration.

        `replies`: number on all ranks; dropped ones have no KL.
        """
        judged = 1 - metrics.get("reward/dropped_fraction", 0.0)
        measured, share = metrics.get("kl/ref_sequence"), self.controller.k3_share
        if measured and share:
            tokens = measured / metrics["kl/ref"]  # per reply: both metrics are means of one sum
            measured += share * (metrics["kl/ref_k3"] * tokens - measured)
        self.controller.follow(measured, sequences=round(replies * judged))

    def _measured(self, batch: TensorDictBase) -> Tensor:
        """Return the KL estimate of each token from the stored log-probs, [B, T]."""
        if batch.get("kl_penalty", None) is None:
            raise ValueError("kl.where=reward needs kl_penalty, found none; measure it")
        if self.estimator == "k1":
            return batch.get("kl_penalty")
        gen, ref = batch.get(("log_probs", "full")), batch.get(("ref_log_probs", "full"))
        return kl_term(gen, ref, self.estimator)


def check_charged(batch: TensorDictBase, leash: Leash | None) -> None:
    """Raise ValueError if the objective's `leash` would charge the KL twice, or never."""
    left = batch.get("kl_left", None)  # [B]
    due = left is not None and bool(left.any())  # the only wait for the device
    place, coeff = ("", 0.0) if leash is None else (leash.where, leash.coeff)
    twice = place == "loss" and coeff and left is not None and not due
    never = (due and place != "loss") or (place == "reward" and coeff and left is None)
    if twice or never:
        how = "twice" if twice else "never"
        both = "hand one Leash to both, advantage and objective"
        raise ValueError(f"the KL of this batch would be charged {how}; {both}")
