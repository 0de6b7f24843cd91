"""GRPOLoss and SFTLoss: the trainer's per-token terms behind TorchRL's keys and outputs.

For code that brings its own loop. Distributions come from the actor's masked dists
(`LLMMaskedCategorical`); every average is over the mask. [B, T] and [B, T, 1] are both taken.
"""

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from policies.padding import is_ragged, pad, rows
from policies.wrapper import LLMWrapperBase
from trainer.losses import clipped_policy_term, is_clipped, kl_term, ratio, weights

DISTS = {"sft": "_get_sft_dist", "rlhf": "_get_rlhf_dist", "generic": "_get_generic_dist"}


class GRPOLoss(nn.Module):
    """Clipped surrogate with optional entropy bonus and k3 KL to the reference.

    Reads ("tokens","full"), ("log_probs","full"), "advantage" and, with `kl_to_ref_coeff`,
    ("ref_log_probs","full") at the root or under "next". `masking_strategy` picks the tokens: sft
    (after the prompt), rlhf (assistant), generic (all); of them those in "loss_mask" [B, T] count,
    where there is one. aggregation "constant" divides by `max_tokens`. Source: arXiv 2402.03300,
    eq. 3.
    """

    def __init__(
        self,
        actor_network: LLMWrapperBase,
        *,
        clip_epsilon: float | tuple[float, float] = 0.2,
        aggregation: str = "token_mean",
        entropy_bonus: bool = True,
        entropy_coeff: float = 0.01,
        kl_to_ref_coeff: float | None = None,
        masking_strategy: str = "sft",
        max_tokens: int | None = None,
    ) -> None:
        super().__init__()
        low, high = clip_epsilon if isinstance(clip_epsilon, tuple) else (clip_epsilon,) * 2
        if not 0 <= low < 1 or high < 0:
            raise ValueError(
                f"expected clip_epsilon with 0 <= low < 1 and high >= 0, got {low, high}"
            )
        if masking_strategy not in DISTS:
            raise ValueError(
                f"expected masking_strategy in {sorted(DISTS)}, got {masking_strategy!r}"
            )
        if aggregation == "constant" and (max_tokens is None or max_tokens < 1):
            raise ValueError(
                f"aggregation='constant' divides by the most tokens a row may have, got max_tokens="
                f"{max_tokens}; give max_tokens (the width of a padded batch is not it)"
            )
        self.actor_network = actor_network
        self.clip_low, self.clip_high = low, high
        self.aggregation, self.max_tokens = aggregation, max_tokens
        self.entropy_coeff = entropy_coeff if entropy_bonus else None
        self.kl_to_ref_coeff = kl_to_ref_coeff
        self.dist = DISTS[masking_strategy]

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return loss_objective (and loss_entropy, loss_kl_to_ref) and what they are made of."""
        dist = getattr(self.actor_network, self.dist)(tensordict)
        mask = dist.mask
        if "loss_mask" in tensordict:
            mask = mask & tensordict.get("loss_mask")
        curr = _log_prob(dist, _need(tensordict, ("tokens", "full")))
        gen = _per_token(_need(tensordict, ("log_probs", "full")), mask)
        advantage = _per_token(_need(tensordict, "advantage"), mask)
        if gen.requires_grad:
            raise RuntimeError("expected the generation log-probs without a gradient; detach them")
        weight = _weights(mask, self.aggregation, self.max_tokens)
        objective = clipped_policy_term(curr, gen, advantage, self.clip_low, self.clip_high)
        out = TensorDict({"loss_objective": (weight * objective).sum()})
        with torch.no_grad():
            out.update(_diagnostics(curr, gen, advantage, mask, self.clip_low, self.clip_high))
        if self.entropy_coeff is not None:
            entropy = (weight * dist.entropy()).sum()
            out.set("entropy", entropy.detach())
            out.set("loss_entropy", -self.entropy_coeff * entropy)
        if self.kl_to_ref_coeff is not None:
            ref = _per_token(_need(tensordict, ("ref_log_probs", "full")), mask)
            kl = (weight * kl_term(curr, ref, "k3") * mask).sum()
            out.set("kl_to_ref", kl.detach())
            out.set("loss_kl_to_ref", self.kl_to_ref_coeff * kl)
        return out


class SFTLoss(nn.Module):
    """Negative log-likelihood of the assistant's tokens, averaged per sample, then reduced.

    Reads ("history","full") or tokens with masks; every sample needs an assistant token.
    """

    def __init__(
        self,
        actor_network: LLMWrapperBase,
        *,
        reduction: str = "mean",
        normalize_by_seq_length: bool = True,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"expected reduction mean, sum or none, got {reduction!r}")
        self.actor_network = actor_network
        self.reduction, self.normalize = reduction, normalize_by_seq_length

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return loss_sft: a scalar, or [B] with reduction="none"."""
        td = tensordict.copy()
        dist = self.actor_network._get_rlhf_dist(td)
        mask = dist.mask
        empty = (~mask.any(-1)).nonzero().squeeze(-1).tolist()
        if empty:
            raise ValueError(
                f"expected assistant tokens in every sample, samples {empty} have none: check the "
                "chat template's assistant mask"
            )
        total = _log_prob(dist, _need(td, ("tokens", "full"))).sum(-1)  # [B]
        loss = -total / mask.sum(-1) if self.normalize else -total
        reduced = {"mean": loss.mean, "sum": loss.sum, "none": lambda: loss}[self.reduction]()
        return TensorDict({"loss_sft": reduced})


def _need(td: TensorDictBase, key: str | tuple[str, ...]) -> Tensor:
    """Return the value at a key, at the root or under "next"; ragged rows are padded left."""
    path = (key,) if isinstance(key, str) else key
    for place in (path, ("next", *path)):
        values = rows(td, place)
        if values is not None:
            ragged = is_ragged(td) or is_ragged(td.get(place[:-1] or place))
            return pad(values, side="left") if ragged else td.get(place)
    raise ValueError(f"expected {key} at the root or under 'next', got {sorted(td.keys())}")


def _log_prob(dist, tokens: Tensor) -> Tensor:
    """Return log-probs [B, T], 0 where masked."""
    return dist.log_prob(tokens.masked_fill(~dist.mask, dist.ignore_index))


def _per_token(value: Tensor, mask: Tensor) -> Tensor:
    """Return [B, T] from [B, T], [B, T, 1], [B, 1] or [B, 1, 1]."""
    value = value.squeeze(-1) if value.ndim == mask.ndim + 1 else value
    if value.shape != mask.shape and value.shape != (*mask.shape[:-1], 1):
        raise ValueError(f"expected shape {tuple(mask.shape)}, got {tuple(value.shape)}")
    return value.expand(mask.shape)


def _weights(mask: Tensor, aggregation: str, max_tokens: int | None) -> Tensor:
    return weights(
        mask,
        aggregation,
        total_tokens=float(mask.sum()),
        total_rows=float(mask.any(-1).sum()),
        max_tokens=max_tokens,
    )


def _diagnostics(curr, gen, advantage, mask, low: float, high: float) -> dict[str, Tensor]:
    """Return masked averages of what tells whether the step is sane."""
    moved = ratio(curr, gen)
    clipped = is_clipped(moved, advantage, low, high)
    kept = moved[mask]
    return {
        "clip_fraction": clipped[mask].float().mean(),
        "kl_approx": (gen - curr)[mask].mean(),
        "ESS": kept.sum() ** 2 / (kept**2).sum() / len(kept),
    }
