"""Truncated importance sampling: correct for responses that another engine sampled.

With other kernels or precision an engine samples from pi_gen, which differs slightly from the
trainer's pi_old for the same weights. Importance weights w = pi_old / pi_gen correct the gradient;
PPO's ratio is to pi_old. KL and value terms have no such weight.
"""

import math
from typing import Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor

from policies.protocols import Policy
from policies.scorer import score_batch
from trainer.batch import batch_keys
from trainer.surrogates import MAX_LOG_RATIO


def correction(
    log_ratio: Tensor,
    sampled: Tensor,
    *,
    level: str,
    mode: str,
    limit: float,
    floor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weight of each token and whether a bound changed it, both [B, T].

    log_ratio [B, T] = log pi_old - log pi_gen at the `sampled` tokens (bool [B, T]). At level
    "token" w = exp(log_ratio); at level "sequence" w = exp(its sum over the row). mode "truncate"
    clamps w to [floor, limit] (truncated importance sampling); mode "mask" sets w outside [floor,
    limit] to 0. floor=None means 0 for "truncate" and 1 / limit for "mask".

    >>> sampled = torch.tensor([[True, True]])
    >>> log_ratio = torch.tensor([[2.0, 3.0]]).log()
    >>> correction(log_ratio, sampled, level="token", mode="truncate", limit=2.5)[0].tolist()
    [[2.0, 2.5]]
    >>> correction(log_ratio, sampled, level="sequence", mode="mask", limit=2.5)[0].tolist()
    [[0.0, 0.0]]
    """
    log_weight = log_ratio * sampled
    if level == "sequence":
        log_weight = log_weight.sum(-1, keepdim=True).expand_as(log_ratio)
    if floor is None:
        floor = 1 / limit if mode == "mask" else 0.0
    above = log_weight > math.log(limit)
    below = log_weight < (math.log(floor) if floor else -math.inf)
    weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    low, high = (floor, limit) if mode == "truncate" else (0.0, 0.0)
    return torch.where(above, high, torch.where(below, low, weight)), above | below


class ImportanceSampling:
    """Score the batch with the trained policy, and weight the policy term by pi_old / pi_gen.

    A function of `after_rollout`. Writes old_log_probs.full and policy_weight [B, T], see
    `correction`, and logs policy/importance_limited; 0 <= `floor` <= 1 <= `limit`.
    Truncated: Yao et al. 2025 ("Your efficient RL framework secretly brings you off-policy RL
    training"); masked on both sides: IcePop (arXiv 2510.18855).
    """

    # conf/plan.py leaves this function out if one in after_rollout writes policy_weight.
    writes = batch_keys(("old_log_probs", "full"), "policy_weight")

    def __init__(
        self,
        *,
        policy: Policy,
        level: Literal["token", "sequence"] = "token",
        mode: Literal["truncate", "mask"] = "truncate",
        limit: float = 2.0,
        floor: float | None = None,
        micro_batch_tokens: int | None = None,
    ) -> None:
        if level not in ("token", "sequence") or mode not in ("truncate", "mask"):
            got = f"{level!r} and {mode!r}"
            raise ValueError(f"expected level token or sequence, mode truncate or mask, got {got}")
        self.scorer, self.tokens = policy.scorer, micro_batch_tokens
        self.options = {"level": level, "mode": mode, "limit": float(limit), "floor": floor}

    @torch.no_grad()
    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Add the trainer's log-probs and the weights to the batch."""
        sampled = batch.get(("masks", "all_response_mask"))
        old = score_batch(self.scorer, batch, sampled, limit=self.tokens)
        gap = old - batch.get(("log_probs", "full"))
        weight, limited = correction(gap, sampled, **self.options)
        batch.set(("old_log_probs", "full"), old)
        batch.set(("logged", "policy/importance_limited"), limited)
        return batch.set("policy_weight", weight)
