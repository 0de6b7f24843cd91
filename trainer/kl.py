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

    The advantage calls `charge_reward`, the objective calls `loss_term`, on the same Leash. `where`
    ("reward" or "loss") selects the one that charges. `controller` sets the coefficient;
    `estimator` is k1, k2, k3, full or k3_ratio. Without `allow_biased`, raise ValueError if the
    pair of `where` and `estimator` does not have the gradient of a KL (docs/kl.md).

    k3_ratio is k3 times pi_curr / pi_gen (not detached): DeepSeek-V3.2 (arXiv 2512.02556) eq. 7.

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
        """Return whether the update reads the distributions of the reference."""
        return self.where == "loss" and self.estimator == "full"

    def charge_reward(self, batch: TensorDictBase) -> TensorDictBase:
        """Write reward_kl and reward = reward_raw + reward_kl.

        reward_kl [B, T] is -coeff * KL at the tokens of the loss mask, or 0 if the loss charges the
        KL. kl_left [B] is the coefficient that the loss must charge; `check_charged` reads it.
        """
        raw, in_reward = batch.get("reward_raw"), self.where == "reward"  # [B, T]
        charged = torch.zeros_like(raw)  # [B, T]
        if in_reward and self.coeff:
            charged = -self.coeff * self._measured(batch) * batch.get("loss_mask")
        batch.set("reward_kl", charged)
        batch.set("kl_left", torch.full_like(raw[:, 0], 0.0 if in_reward else self.coeff))
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
            raise ValueError("kl.where=loss needs ref_log_probs.full, got none; use RetrieveKL")
        curr, weighted = scores.log_probs, self.estimator == "k3_ratio"
        term = kl_term(curr, ref, "k3" if weighted else self.estimator)
        if weighted:
            ratio = token_ratio(curr, batch.get(("log_probs", "full")))
            # d(r k3)/d(curr) = r k3 + r (1 - exp(ref - curr)) = r (curr - ref): large terms cancel.
            slope = (ratio * (curr - ref)).detach()
            term = (ratio * term).detach() + slope * (curr - curr.detach())
        return {"kl": self.coeff * term}

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

    def _measured(self, batch: TensorDictBase) -> Tensor:
        """Return the KL estimate of each token from the stored log-probs, [B, T]."""
        if batch.get("kl_penalty", None) is None:
            raise ValueError("kl.where=reward needs kl_penalty, got none; use RetrieveKL")
        if self.estimator == "k1":
            return batch.get("kl_penalty")
        gen, ref = batch.get(("log_probs", "full")), batch.get(("ref_log_probs", "full"))
        return kl_term(gen, ref, self.estimator)


def check_charged(batch: TensorDictBase, leash: Leash | None) -> None:
    """Raise ValueError if the objective's `leash` would charge the KL twice, or never."""
    left = batch.get("kl_left", None)  # [B]; None if `charge_reward` did not run
    must_charge = left is not None and bool(left.any())  # waits for the device
    place, coeff = ("", 0.0) if leash is None else (leash.where, leash.coeff)
    twice = place == "loss" and coeff and left is not None and not must_charge  # the reward charged
    never = (must_charge and place != "loss") or (place == "reward" and coeff and left is None)
    if twice or never:
        how = "twice" if twice else "never"
        remedy = "pass the same Leash to advantage and objective"
        raise ValueError(f"the KL of this batch would be charged {how}; {remedy}")
