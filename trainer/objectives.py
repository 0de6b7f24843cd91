"""Objectives: per-token loss terms, which trainer/update.py weights and sums.

An objective maps (scores, batch) to `Terms` and never averages, because `weight` [B, T] does. The
update passes it the keys in `reads`, and the keys that the scorer reads.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from policies.scorer import Scores
from trainer.batch import batch_keys
from trainer.kl.estimators import k3
from trainer.kl.leash import Leash
from trainer.losses import SFT_TERMS, half_square, minor_sft_term, value_term
from trainer.surrogates import RATIOS, ClipRange, Surrogate, find_surrogate, masked_rows

STEP, MAX_COEFF = 0.005, 1.0  # entropy coefficient: change per iteration, largest value


@dataclass(frozen=True)
class Terms:
    """Per-token losses [B, T], multiplied by their coefficients, and values to log."""

    loss: dict[str, Tensor]
    means: dict[str, Tensor] = field(default_factory=dict)  # averaged over the loss mask
    maxima: dict[str, Tensor] = field(default_factory=dict)


class Objective(Protocol):
    """Interface of an objective; `Leash.loss_term` returns its KL terms."""

    reads: tuple[NestedKey, ...]

    def __call__(self, scores: Any, batch: TensorDictBase) -> Terms: ...


class GRPOObjective:
    """Policy gradient, plus the KL penalty if it is in the loss (GRPO eq. 3, arXiv 2402.03300).

    `ratio` and `surrogate` are names in trainer/surrogates.py; `clip_*` and `*_bound` are their
    bounds. The default is the clipped surrogate of PPO and GRPO; `surrogate` may also be a
    `Surrogate` object. Settings of papers: docs/algorithms.md

    The denominator of the ratio is old_log_probs.full if the batch has it (another engine sampled),
    else the generator's log_probs.full. The policy term is multiplied by policy_weight. Masks use
    the distance from the generator. `opsm`, `trm_max`, `trm_mean` are bounds (nats) of
    SEQUENCE_MASKS, which drop the policy term of whole responses.
    """

    reads = (
        *Leash.loss_reads,
        *batch_keys("advantage", ("old_log_probs", "full"), "policy_weight"),
    )

    def __init__(
        self,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        tv_bound: float = 0.15,
        kl_bound: float = 0.05,
        ratio: str = "token",
        surrogate: str | Surrogate = "clip",
        opsm: float | None = None,
        trm_max: float | None = None,
        trm_mean: float | None = None,
        leash: Leash,
    ) -> None:
        self.bounds = ClipRange(clip_low, clip_high, dual_clip, tv_bound, kl_bound)
        self.ratio = RATIOS[ratio]
        self.surrogate = find_surrogate(surrogate)
        bounds = {"opsm": opsm, "trm_max": trm_max, "trm_mean": trm_mean}
        self.sequence_masks = {name: most for name, most in bounds.items() if most is not None}
        self.leash = leash

    def __call__(self, scores: Scores, batch: TensorDictBase) -> Terms:
        """Return the terms of a micro-batch."""
        curr, gen = scores.log_probs, batch.get(("log_probs", "full"))  # [B, T] each
        mask = batch.get("loss_mask")  # [B, T]
        advantage, old = batch.get("advantage"), batch.get(("old_log_probs", "full"), gen)
        moved = self.ratio(curr, old, mask)  # [B, T]
        inputs = (curr, gen, moved, advantage, self.bounds)
        loss = {"policy": self.surrogate.term(*inputs) * batch.get("policy_weight", 1.0)}  # [B, T]
        means = moved_since_sampling(scores, batch) | self.leash.exact(scores)
        if self.sequence_masks:
            far = masked_rows(self.sequence_masks, curr.detach(), gen, advantage, mask)  # [B, 1]
            loss["policy"] = loss["policy"].masked_fill(far, 0.0)  # [B, T]
            means["policy/sequence_masked"] = far.expand_as(mask).float()  # [B, T]
        with torch.no_grad():
            means["policy/clip_fraction"] = self.surrogate.stopped(*inputs).float()  # [B, T]
            maxima = {"policy/ratio_max": torch.where(mask, moved.detach(), 0.0)}
            if self.surrogate.divergence is not None:
                name, distance = self.surrogate.divergence
                maxima[name] = torch.where(mask, distance(gen, curr), 0.0)
        return Terms(loss | self.leash.loss_term(scores, batch), means, maxima)


@torch.no_grad()
def moved_since_sampling(scores: Scores, batch: TensorDictBase) -> dict[str, Tensor]:
    """Return the distances of the policy from the generator, and its entropy, [B, T] each."""
    curr, gen = scores.log_probs, batch.get(("log_probs", "full"))  # [B, T] each
    means = {
        "kl/behaviour": gen - curr,
        "kl/behaviour_k3": k3(gen - curr),
        "kl/mismatch": (gen - curr).abs(),
    }
    return means if scores.entropy is None else means | {"policy/entropy": scores.entropy}


class DistilObjective:
    """The divergence from a teacher on the policy's own responses, with no other loss.

    Each token's divergence is differentiated for its sampled prefix: no gradient goes through the
    sampling (GKD: Agarwal et al. 2024, arXiv 2306.13649 section 3), except with a leash of
    where="sequence".
    """

    reads = Leash.loss_reads

    def __init__(self, *, leash: Leash) -> None:
        for each in leash.each:
            if each.where == "reward":
                place = f"{each.names.section}.where"
                raise ValueError(f"DistilObjective expects {place}=loss or sequence, got reward")
        self.leash = leash

    def __call__(self, scores: Scores, batch: TensorDictBase) -> Terms:
        """Return the terms of a micro-batch."""
        loss = self.leash.loss_term(scores, batch) or {"kl": 0.0 * scores.log_probs}
        return Terms(loss, moved_since_sampling(scores, batch) | self.leash.exact(scores))


class PPOObjective(GRPOObjective):
    """Clipped policy gradient and the critic's squared error (PPO, arXiv 1707.06347 eq. 9).

    `value_clip=None` does not clip the value; `distance` is half the square by default.
    """

    reads = (*GRPOObjective.reads, *batch_keys("value", "returns"))

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
        assert value is not None, "GAEAdvantage needs a critic"
        term = value_term(value, old, returns, self.value_clip, self.distance)
        terms.loss["value"] = self.value_coeff * term
        if self.value_clip is not None:
            moved = (value.detach() - old).abs() > self.value_clip
            terms.means["value/clip_fraction"] = moved.float()
        return terms


class SFTObjective:
    """Loss of the tokens of the loss mask, plus the exact KL of `leash` at these tokens.

    `token_loss` is a name in SFT_TERMS: nll, or dft, whose gradient is nll's times the probability
    of the token. An exact leash in the loss measures the divergence from the reference and adds
    coeff * divergence: an anchor (ASFT, arXiv 2509.23753).
    """

    reads = ()

    def __init__(self, *, leash: Leash | None = None, token_loss: str = "nll") -> None:
        self.leash, self.term = leash, SFT_TERMS[token_loss]

    def __call__(self, scores: Scores, batch: TensorDictBase) -> Terms:
        """Return the terms of a micro-batch."""
        loss = {"policy": self.term(scores.log_probs)}  # [B, T]
        means = {} if scores.entropy is None else {"policy/entropy": scores.entropy}
        if self.leash is not None:
            loss |= self.leash.loss_term(scores, batch)
            means |= self.leash.exact(scores)
        return Terms(loss, means)


class MinorSFTObjective(SFTObjective):
    """SFT with smaller gradients for rows likelier than at the start (MinorSFT, arXiv 2408.10642).

    `ReferenceLogProbs` writes the reference log-probs.
    """

    reads = batch_keys(("ref_log_probs", "full"))

    def __init__(self, *, beta: float = 0.1, leash: Leash | None = None) -> None:
        super().__init__(leash=leash)
        self.beta = beta

    def __call__(self, scores: Scores, batch: TensorDictBase) -> Terms:
        """Return the terms of a micro-batch."""
        curr, ref = scores.log_probs, batch.get(("ref_log_probs", "full"))  # [B, T] each
        terms = super().__call__(scores, batch)
        terms.loss["policy"] = minor_sft_term(curr, ref, batch.get("loss_mask"), self.beta)
        terms.means["sft/deviation"] = (curr - ref).detach()
        return terms


class EntropyBonus:
    """Add -coeff * entropy of the trained policy to the loss of each token.

    With `target` (nats per token) the coefficient adapts as in Skywork-OR1 (arXiv 2505.22312),
    within [0, 1]. If the entropy of an iteration is at most the target, the coefficient grows by
    0.005; otherwise it falls by 0.005, and the bonus is 0.

    >>> bonus = EntropyBonus(0.01, target=1.0)
    >>> [round(bonus.update(entropy), 3) for entropy in (0.8, 0.9, 1.2, 0.7)]
    [0.015, 0.02, 0.0, 0.02]
    """

    def __init__(self, coeff: float = 0.0, *, target: float | None = None) -> None:
        self.adaptive_coeff, self.target = coeff, target
        self.active = True  # the last entropy was at most the target

    @property
    def coeff(self) -> float:
        """Return the current coefficient."""
        return self.adaptive_coeff if self.active else 0.0

    def __call__(self, scores: Scores) -> dict[str, Tensor]:
        """Return {"entropy": loss term [B, T]}, or {} at coefficient 0."""
        if self.coeff == 0:
            return {}
        assert scores.entropy is not None
        return {"entropy": -self.coeff * scores.entropy}

    def update(self, entropy: float) -> float:
        """Return the next coefficient from the entropy of this iteration (nats per token)."""
        if self.target is not None:
            self.active = entropy <= self.target
            moved = self.adaptive_coeff + (STEP if self.active else -STEP)
            self.adaptive_coeff = min(max(moved, 0.0), MAX_COEFF)
        return self.coeff

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"coeff": self.adaptive_coeff, "active": self.active}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.adaptive_coeff, self.active = float(state["coeff"]), bool(state["active"])
