"""Surrogates: what of log pi a policy gradient follows. Pure functions, [B, T] in and out.

Two small parts make each of them: a ratio of RATIOS, to the policy that sampled, and a term of
SURROGATES, which says how far it may count. docs/algorithms.md says which paper takes which.
curr and gen are log-probs of the policy being trained and of the one that generated; r is the ratio
to gen, or to old, what the trainer says of the weights that generated; A is the advantage. Terms
are to be minimised, and nothing is reduced.

Masks are surrogates that bound how far a token is from who sampled it (DPPO: Qi et al. 2026, arXiv
2602.04879, eq. 11 to 14). In each state the choice is seen as one of two, the sampled token or any
other, for which both divergences are exact. Left out on purpose: the paper's divergences over the
top k tokens, which need more than the log-prob of the sampled one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.losses import MAX_LOG_RATIO


@dataclass(frozen=True)
class Bounds:
    """How far a ratio may go: from 1 - low to 1 + high, and `most` where A < 0 (None: any).

    `tv` (probability) and `kl` (nats) are those of the masks.
    """

    low: float = 0.2
    high: float = 0.2
    most: float | None = None
    tv: float = 0.15
    kl: float = 0.05


def token_ratio(curr: Tensor, old: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the importance ratio pi_curr / pi_old of each token.

    The log-ratio is clamped to +-20, so the result is finite, and has no gradient beyond.

    >>> token_ratio(torch.tensor([0.0, 1000.0]), torch.tensor([0.0, 0.0])).tolist()
    [1.0, 485165184.0]
    """
    return (curr - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_ratio(curr: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """Return the geometric mean of a row's token ratios over its kept tokens, at each token.

    GSPO-token (arXiv 2507.18071) eq. 14: s_i of eq. 7 in value, log pi of the token in gradient,
    so that a token's own advantage meets its own gradient; with one advantage a row and
    aggregation=sequence_mean it is GSPO, eq. 5. Clamped as `token_ratio` is.

    >>> curr, mask = torch.tensor([[0.4, 0.0, 9.0]]), torch.tensor([[True, True, False]])
    >>> [round(r, 3) for r in sequence_ratio(curr, torch.zeros(1, 3), mask)[0, :2].tolist()]
    [1.221, 1.221]
    """
    log_ratio = ((curr - old) * mask).detach().sum(-1, keepdim=True)
    mean = log_ratio / mask.sum(-1, keepdim=True).clamp(min=1)  # [B, 1]
    return token_ratio(mean + (curr - curr.detach()), torch.zeros_like(curr))


def clipped_term(curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, bounds: Bounds) -> Tensor:
    """Return -min(r A, clip(r, 1 - low, 1 + high) A); where A < 0, r counts as `most` at most.

    Schulman et al. 2017 (arXiv 1707.06347) eq. 7; with low = high the policy part of GRPO, Shao et
    al. 2024 (arXiv 2402.03300) eq. 3; two bounds as in DAPO (arXiv 2503.14476) eq. 8. `most` is the
    c of dual clip, Ye et al. 2020 (arXiv 1912.09729) eq. 5.

    >>> one, curr = torch.tensor([1.0]), torch.zeros(1)
    >>> clipped_term(curr, curr - 1, one.exp(), one, Bounds(0.2, 0.25)).tolist()
    [-1.25]
    """
    term = -torch.minimum(r * advantage, r.clamp(1 - bounds.low, 1 + bounds.high) * advantage)
    if bounds.most is not None:
        term = torch.where(advantage < 0, term.minimum(-bounds.most * advantage), term)
    return term


def cispo_term(curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, bounds: Bounds) -> Tensor:
    """Return -sg(clip(r, 1 - low, 1 + high)) A log pi.

    sg is stop-gradient: a clipped token keeps a gradient, of bounded weight. MiniMax-M1 (arXiv
    2506.13585) eq. 4 and 5.

    >>> curr = torch.tensor([-1.0], requires_grad=True)
    >>> gen, advantage = curr.detach() - 1, torch.tensor([2.0])
    >>> moved = token_ratio(curr, gen)
    >>> cispo_term(curr, gen, moved, advantage, Bounds(0.2, 0.5)).sum().backward()
    >>> curr.grad.tolist()
    [-3.0]
    """
    return -r.detach().clamp(1 - bounds.low, 1 + bounds.high) * advantage * curr


def reinforce_term(
    curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, bounds: Bounds
) -> Tensor:
    """Return -A log pi (Williams 1992): no ratio and no bounds, for one step on fresh samples."""
    return -advantage * curr


def is_clipped(curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, bounds: Bounds) -> Tensor:
    """Return where the bound of `clipped_term` stops the gradient, bool.

    >>> r, advantage = torch.tensor([0.7, 0.7, 1.3]), torch.tensor([1.0, -1.0, 1.0])
    >>> is_clipped(r.log(), torch.zeros(3), r, advantage, Bounds()).tolist()
    [False, True, True]
    """
    far = (r < 1 - bounds.low) & (advantage < 0) | (r > 1 + bounds.high) & (advantage > 0)
    return far if bounds.most is None else far | (r > bounds.most) & (advantage < 0)


def is_outside(curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, bounds: Bounds) -> Tensor:
    """Return where the ratio is out of its bounds, bool."""
    return (r < 1 - bounds.low) | (r > 1 + bounds.high)


def never(curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, bounds: Bounds) -> Tensor:
    """Return nowhere: no bound acts."""
    return torch.zeros_like(r, dtype=torch.bool)


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


RATIOS = {"token": token_ratio, "sequence": sequence_ratio}
# By name: the term, and where its bounds act.
SURROGATES = {
    "clip": (clipped_term, is_clipped),
    "cispo": (cispo_term, is_outside),
    "reinforce": (reinforce_term, never),
    "tv_mask": (tv_mask_term, is_past_tv),
    "kl_mask": (kl_mask_term, is_past_kl),
}
# What a mask bounds, and under which name its largest value is logged.
DIVERGENCES = {
    "tv_mask": ("policy/tv_max", binary_tv),
    "kl_mask": ("policy/binary_kl_max", binary_kl),
}
