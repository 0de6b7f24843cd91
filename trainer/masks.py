"""Masks: surrogates that bound how far a token is from who sampled it (DPPO).

Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv 2602.04879), eq.
11 to 14. In each state the choice is seen as one of two, the sampled token or any other, for which
both divergences are exact. Letters and arguments are those of trainer/surrogates.py; a file of its
own, since only runs with a mask import it. Left out on purpose: the paper's divergences over the
top k tokens, which need more than the log-prob of the sampled one.
"""

import torch
from torch import Tensor

from trainer.surrogates import Bounds


def binary_tv(gen: Tensor, curr: Tensor) -> Tensor:
    """Return |pi_curr - pi_gen| of each token, the total variation of (this token, any other).

    DPPO, Qi et al. 2026 (arXiv 2602.04879) eq. 13; never more than that of the whole vocabulary.

    >>> round(binary_tv(torch.tensor(0.99).log(), torch.tensor(0.8).log()).item(), 6)
    0.19
    """
    return (curr.exp() - gen.exp()).abs()


def binary_kl(gen: Tensor, curr: Tensor) -> Tensor:
    """Return KL(gen || curr) of (this token, any other), in nats, of each token.

    g log(g / p) + (1 - g) log((1 - g) / (1 - p)) with g = pi_gen, p = pi_curr: DPPO (arXiv
    2602.04879) eq. 14. From log-probs near 0 as exactly as they are; one of 0, which rounding has
    made, counts as the next below, so the result is finite.

    >>> round(binary_kl(torch.tensor(0.5).log(), torch.tensor(0.25).log()).item(), 6)
    0.143841
    """
    top = -torch.finfo(curr.dtype).eps
    gen, curr = gen.clamp(max=top), curr.clamp(max=top)
    others = -gen.expm1() * (_log_of_others(gen) - _log_of_others(curr))
    return gen.exp() * (gen - curr) + others


def _log_of_others(log_prob: Tensor) -> Tensor:
    """Return log(1 - exp(x)), x < 0, by what loses no digits: expm1 near 0, log1p far below."""
    near, far = (-log_prob.expm1()).log(), torch.log1p(-log_prob.exp())
    return torch.where(log_prob > -0.7, near, far)


def leaves(curr: Tensor, gen: Tensor, advantage: Tensor) -> Tensor:
    """Return where the update would take pi_curr further away from pi_gen, bool.

    Up where A > 0 and it is above, down where A < 0 and it is below: the condition of clipping.
    """
    return (curr > gen) & (advantage > 0) | (curr < gen) & (advantage < 0)


def is_past_tv(curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, bounds: Bounds) -> Tensor:
    """Return where `tv_mask_term` has no gradient, bool."""
    return _stops(binary_tv(gen, curr) > bounds.tv, curr, gen, r, advantage, bounds)


def is_past_kl(curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, bounds: Bounds) -> Tensor:
    """Return where `kl_mask_term` has no gradient, bool."""
    return _stops(binary_kl(gen, curr) > bounds.kl, curr, gen, r, advantage, bounds)


def _stops(
    far: Tensor, curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, bounds: Bounds
) -> Tensor:
    masked = far & leaves(curr, gen, advantage)
    return masked if bounds.most is None else masked | (r > bounds.most) & (advantage < 0)


def tv_mask_term(curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, bounds: Bounds) -> Tensor:
    """Return -r A, and 0 where a token is more than `tv` from who sampled it and would leave.

    DPPO (arXiv 2602.04879) eq. 11 to 13. A rare token may grow many times over, which clipping
    forbids; a likely one may not fall as far as clipping lets it.

    >>> from trainer.surrogates import token_ratio
    >>> curr, gen = torch.tensor([1e-3, 0.8]).log(), torch.tensor([1e-5, 0.99]).log()
    >>> r, advantage = token_ratio(curr, gen), torch.tensor([1.0, -1.0])
    >>> (tv_mask_term(curr, gen, r, advantage, Bounds()) == 0).tolist()
    [False, True]
    """
    return _term(binary_tv(gen, curr.detach()) > bounds.tv, curr, gen, r, advantage, bounds)


def kl_mask_term(curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, bounds: Bounds) -> Tensor:
    """Return -r A, and 0 where a token is more than `kl` from who sampled it and would leave.

    DPPO (arXiv 2602.04879) eq. 11, 12 and 14.
    """
    return _term(binary_kl(gen, curr.detach()) > bounds.kl, curr, gen, r, advantage, bounds)


def _term(
    far: Tensor, curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, bounds: Bounds
) -> Tensor:
    if bounds.most is not None:
        r = torch.where(advantage < 0, r.clamp(max=bounds.most), r)
    return torch.where(far & leaves(curr, gen, advantage), 0.0, -r * advantage)


SURROGATES = {"tv_mask": (tv_mask_term, is_past_tv), "kl_mask": (kl_mask_term, is_past_kl)}
# What a mask bounds, and under which name its largest value is logged.
DIVERGENCES = {
    "tv_mask": ("policy/tv_max", binary_tv),
    "kl_mask": ("policy/binary_kl_max", binary_kl),
}
