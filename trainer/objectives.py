"""Objectives: per-token loss terms, to be weighted and summed once, in trainer/update.py.

An objective maps (scores, batch) to `Terms` and never averages: `weight` [B, T] does that. It says
which keys of the batch it `reads` beside those that the update hands to the scorer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from policies.scorer import Scores
from trainer.batch import reads
from trainer.kl import Leash
from trainer.losses import half_square, kl_term, minor_sft_term, value_term
from trainer.surrogates import DIVERGENCES, RATIOS, SURROGATES, Bounds

STEP, MOST = 0.005, 1.0  # of the entropy coefficient: an iteration's step, and its bound


@dataclass(frozen=True)
class Terms:
    """Per-token [B, T]: losses (already scaled by their coefficient) and what is worth logging."""

    loss: dict[str, Tensor]
    means: dict[str, Tensor] = field(default_factory=dict)  # averaged over the loss mask
    maxima: dict[str, Tensor] = field(default_factory=dict)


class Objective(Protocol):
    """What the update asks of an objective; `leash` is None where no KL is charged."""

    reads: tuple[NestedKey, ...]
    leash: Leash | None

    def __call__(self, scores: Any, batch: TensorDictBase) -> Terms: ...


class GRPOObjective:
    """Policy gradient, and the leash where it acts in the loss (GRPO eq. 3, arXiv 2402.03300).

    `ratio` and `surrogate` name parts of trainer/surrogates.py, `clip_*`, `*_bound` their bounds;
    the default is the clipped gradient of PPO and GRPO. Which makes which paper: docs/algorithms.md

    The ratio is to old_log_probs.full where the batch has them (another engine has sampled), else
    to the log_probs.full of who sampled; policy_weight is a factor of the policy term. Masks are of
    the distance from who sampled.
    """

    reads = (*Leash.learnt, *reads("advantage", ("old_log_probs", "full"), "policy_weight"))

    def __init__(
        self,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        tv_bound: float = 0.15,
        kl_bound: float = 0.05,
        ratio: str = "token",
        surrogate: str = "clip",
        leash: Leash,
    ) -> None:
        self.bounds = Bounds(clip_low, clip_high, dual_clip, tv_bound, kl_bound)
        self.ratio, self.divergence = RATIOS[ratio], DIVERGENCES.get(surrogate)
        self.term, self.clipped = SURROGATES[surrogate]
        self.leash = leash

    def __call__(self, scores: Scores, batch: TensorDictBase) -> Terms:
        """Return the terms of a micro-batch."""
        curr, gen = scores.log_probs, batch.get(("log_probs", "full"))  # [B, T] each
        mask = batch.get("loss_mask")  # [B, T]
        advantage, old = batch.get("advantage"), batch.get(("old_log_probs", "full"), gen)
        moved = self.ratio(curr, old, mask)  # [B, T]
        given = (curr, gen, moved, advantage, self.bounds)
        loss = {"policy": self.term(*given) * batch.get("policy_weight", 1.0)}  # [B, T]
        with torch.no_grad():
            clipped = self.clipped(*given)  # [B, T]
            means = {
                "kl/behaviour": gen - curr,
                "kl/behaviour_k3": kl_term(gen, curr, "k3"),
                "kl/mismatch": (gen - curr).abs(),
                "policy/clip_fraction": clipped.float(),
            }
            maxima = {"policy/ratio_max": torch.where(mask, moved.detach(), 0.0)}
            if self.divergence is not None:
                name, distance = self.divergence
                maxima[name] = torch.where(mask, distance(gen, curr), 0.0)
        if scores.entropy is not None:
            means["policy/entropy"] = scores.entropy
        if scores.full_kl is not None:
            means["kl/ref_full"] = scores.full_kl.detach()
        return Terms(loss | self.leash.loss_term(scores, batch), means, maxima)


class PPOObjective(GRPOObjective):
    """Clipped policy gradient and the critic's squared error (PPO, arXiv 1707.06347 eq. 9).

    `value_clip` None does not clip the value; `distance` is half the square unless it is given.
    """

    reads = (*GRPOObjective.reads, *reads("value", "returns"))

    def __init__(
        self,
        *,
        value_coeff: float = 0.5,
        value_clip: float | None = 0.2,
        distance: Callable[[Tensor, Tensor], Tensor] = half_square,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.value_coeff, self.value_clip, self.distance = value_coeff, value_clip, distance

    def __call__(self, scores: Scores, batch: TensorDictBase) -> Terms:
        """Return the terms of a micro-batch."""
        terms = super().__call__(scores, batch)
        value, old, returns = scores.values, batch.get("value"), batch.get("returns")
        assert value is not None, "GAEAdvantage asks for a critic"
        term = value_term(value, old, returns, self.value_clip, self.distance)
        terms.loss["value"] = self.value_coeff * term
        if self.value_clip is not None:
            moved = (value.detach() - old).abs() > self.value_clip
            terms.means["value/clip_fraction"] = moved.float()
        return terms


class SFTObjective:
    """Negative log-likelihood of the learnt tokens."""

    leash, reads = None, ()

    def __call__(self, scores: Scores, batch: TensorDictBase) -> Terms:
        """Return the terms of a micro-batch."""
        means = {} if scores.entropy is None else {"policy/entropy": scores.entropy}
        return Terms({"policy": -scores.log_probs}, means)


class MinorSFTObjective:
    """Imitation that slows down where a row is above the reference (MinorSFT, arXiv 2408.10642).

    The reference is that of `ReferenceLogProbs`.
    """

    leash, reads = None, reads(("ref_log_probs", "full"))

    def __init__(self, *, beta: float = 0.1) -> None:
        self.beta = beta

    def __call__(self, scores: Scores, batch: TensorDictBase) -> Terms:
        """Return the terms of a micro-batch."""
        curr, ref = scores.log_probs, batch.get(("ref_log_probs", "full"))  # [B, T] each
        terms = SFTObjective()(scores, batch)
        terms.loss["policy"] = minor_sft_term(curr, ref, batch.get("loss_mask"), self.beta)
        terms.means["sft/deviation"] = (curr - ref).detach()
        return terms


class EntropyBonus:
    """Add -coeff * entropy of the policy being trained to the loss of each token.

    With `target` (nats per token) the coefficient is steered, after Skywork-OR1 (arXiv 2505.22312):
    an iteration whose entropy is at most the target adds 0.005, one above subtracts it, within
    [0, 1]; above the target no bonus is paid.

    >>> bonus = EntropyBonus(0.01, target=1.0)
    >>> [round(bonus.update(entropy), 3) for entropy in (0.8, 0.9, 1.2, 0.7)]
    [0.015, 0.02, 0.0, 0.02]
    """

    def __init__(self, coeff: float = 0.0, *, target: float | None = None) -> None:
        self.steered, self.target = coeff, target
        self.pays = True  # whether the last entropy was at most the target

    @property
    def coeff(self) -> float:
        """Return the weight of the entropy now."""
        return self.steered if self.pays else 0.0

    def __call__(self, scores: Scores) -> dict[str, Tensor]:
        """Return the loss term [B, T] by its name, none at coefficient 0."""
        if self.coeff == 0:
            return {}
        assert scores.entropy is not None
        return {"entropy": -self.coeff * scores.entropy}

    def update(self, entropy: float) -> float:
        """Return the next coefficient, given the entropy of this iteration (nats per token)."""
        if self.target is not None:
            self.pays = entropy <= self.target
            moved = self.steered + (STEP if self.pays else -STEP)
            self.steered = min(max(moved, 0.0), MOST)
        return self.coeff

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {"coeff": self.steered, "pays": self.pays}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where a checkpoint stopped."""
        self.steered, self.pays = float(state["coeff"]), bool(state["pays"])
