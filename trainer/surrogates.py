"""Surrogate losses of the policy gradient: pure functions of [B, T] tensors, without reduction.

A surrogate combines a ratio of RATIOS with a term of SURROGATES, which bounds it;
docs/algorithms.md lists the settings of papers. curr and gen are log-probs of the trained and the
generating policy; r is the ratio to gen, or to old, the trainer's log-probs for the generating
weights; A is the advantage. Terms are minimised.

Masks are surrogates that bound the divergence of a token from the generating policy (DPPO: Qi et
al. 2026, arXiv 2602.04879, eq. 11 to 14), as a choice of two: the sampled token or any other. Left
out on purpose: the paper's divergences over the top k tokens, which need more log-probs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.losses import MAX_LOG_RATIO


@dataclass(frozen=True)
class ClipRange:
    """Bounds of a ratio: 1 - low to 1 + high, and `most` where A < 0 (None: no bound).

    `tv` (probability) and `kl` (nats) bound the divergence of the masks.
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
    """Return the geometric mean of a row's token ratios over the mask, at each token.

    GSPO-token (arXiv 2507.18071) eq. 14: s_i of eq. 7 in value, log pi of the token in gradient,
    so each token's gradient is weighted by its advantage; with one advantage per row and
    aggregation=sequence_mean it is GSPO, eq. 5. Clamped as `token_ratio` is.

    >>> curr, mask = torch.tensor([[0.4, 0.0, 9.0]]), torch.tensor([[True, True, False]])
    >>> [round(r, 3) for r in sequence_ratio(curr, torch.zeros(1, 3), mask)[0, :2].tolist()]
    [1.221, 1.221]
    """
    log_ratio = ((curr - old) * mask).detach().sum(-1, keepdim=True)
    mean = log_ratio / mask.sum(-1, keepdim=True).clamp(min=1)  # [B, 1]
    return token_ratio(mean + (curr - curr.detach()), torch.zeros_like(curr))


def clipped_term(
    curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, clip: ClipRange
) -> Tensor:
    """Return -min(r A, clip(r, 1 - low, 1 + high) A); where A < 0, r counts as `most` at most.

    Schulman et al. 2017 (arXiv 1707.06347) eq. 7; with low = high the policy part of GRPO, Shao et
    al. 2024 (arXiv 2402.03300) eq. 3; two bounds as in DAPO (arXiv 2503.14476) eq. 8. `most` is the
    c of dual clip, Ye et al. 2020 (arXiv 1912.09729) eq. 5.

    >>> one, curr = torch.tensor([1.0]), torch.zeros(1)
    >>> clipped_term(curr, curr - 1, one.exp(), one, ClipRange(0.2, 0.25)).tolist()
    [-1.25]
    """
    term = -torch.minimum(r * advantage, r.clamp(1 - clip.low, 1 + clip.high) * advantage)
    if clip.most is not None:
        term = torch.where(advantage < 0, term.minimum(-clip.most * advantage), term)
    return term


def cispo_term(curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, clip: ClipRange) -> Tensor:
    """Return -sg(clip(r, 1 - low, 1 + high)) A log pi.

    sg is stop-gradient: clipped tokens keep a gradient, of bounded weight. MiniMax-M1 (arXiv
    2506.13585) eq. 4 and 5.

    >>> curr = torch.tensor([-1.0], requires_grad=True)
    >>> gen, advantage = curr.detach() - 1, torch.tensor([2.0])
    >>> moved = token_ratio(curr, gen)
    >>> cispo_term(curr, gen, moved, advantage, ClipRange(0.2, 0.5)).sum().backward()
    >>> curr.grad.tolist()
    [-3.0]
    """
    return -r.detach().clamp(1 - clip.low, 1 + clip.high) * advantage * curr


def reinforce_term(
    curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, clip: ClipRange
) -> Tensor:
    """Return -A log pi (Williams 1992), without ratio or bounds, for one step on fresh samples."""
    return -advantage * curr


def is_clipped(curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, clip: ClipRange) -> Tensor:
    """Return the mask of tokens whose gradient `clipped_term` stops, bool.

    >>> r, advantage = torch.tensor([0.7, 0.7, 1.3]), torch.tensor([1.0, -1.0, 1.0])
    >>> is_clipped(r.log(), torch.zeros(3), r, advantage, ClipRange()).tolist()
    [False, True, True]
    """
    far = (r < 1 - clip.low) & (advantage < 0) | (r > 1 + clip.high) & (advantage > 0)
    return far if clip.most is None else far | (r > clip.most) & (advantage < 0)


def is_outside(curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, clip: ClipRange) -> Tensor:
    """Return the mask of tokens with a ratio outside the bounds, bool."""
    return (r < 1 - clip.low) | (r > 1 + clip.high)


def no_clipping(curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, clip: ClipRange) -> Tensor:
    """Return False at every token: no bound applies."""
    return torch.zeros_like(r, dtype=torch.bool)


def binary_tv(gen: Tensor, curr: Tensor) -> Tensor:
    """Return |pi_curr - pi_gen| of each token: the total variation of (token, any other).

    DPPO, Qi et al. 2026 (arXiv 2602.04879) eq. 13; a lower bound of that over the full vocabulary.

    >>> round(binary_tv(torch.tensor(0.99).log(), torch.tensor(0.8).log()).item(), 6)
    0.19
    """
    return (curr.exp() - gen.exp()).abs()


def binary_kl(gen: Tensor, curr: Tensor) -> Tensor:
    """Return KL(gen || curr) of each token, in nats, over (token, any other).

    g log(g / p) + (1 - g) log((1 - g) / (1 - p)) with g = pi_gen, p = pi_curr: DPPO (arXiv
    2602.04879) eq. 14. Exact for log-probs near 0; a log-prob of 0, a rounding error, counts as
    the next number below, so the result is finite.

    >>> round(binary_kl(torch.tensor(0.5).log(), torch.tensor(0.25).log()).item(), 6)
    0.143841
    """
    top = -torch.finfo(curr.dtype).eps
    gen, curr = gen.clamp(max=top), curr.clamp(max=top)
    others = -gen.expm1() * (_log_of_others(gen) - _log_of_others(curr))
    return gen.exp() * (gen - curr) + others


def _log_of_others(log_prob: Tensor) -> Tensor:
    """Return log(1 - exp(x)), x < 0, without loss of digits: by expm1 near 0, else log1p."""
    near, far = (-log_prob.expm1()).log(), torch.log1p(-log_prob.exp())
    return torch.where(log_prob > -0.7, near, far)


def moves_away(curr: Tensor, gen: Tensor, advantage: Tensor) -> Tensor:
    """Return the mask of tokens that the update moves further away from pi_gen, bool.

    Tokens with A > 0 and pi_curr > pi_gen, or A < 0 and pi_curr < pi_gen: as for clipping.
    """
    return (curr > gen) & (advantage > 0) | (curr < gen) & (advantage < 0)


def is_past_tv(curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, clip: ClipRange) -> Tensor:
    """Return the mask of tokens without a gradient in `tv_mask_term`, bool."""
    return _stops(binary_tv(gen, curr) > clip.tv, curr, gen, r, advantage, clip)


def is_past_kl(curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, clip: ClipRange) -> Tensor:
    """Return the mask of tokens without a gradient in `kl_mask_term`, bool."""
    return _stops(binary_kl(gen, curr) > clip.kl, curr, gen, r, advantage, clip)


def _stops(
    far: Tensor, curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, clip: ClipRange
) -> Tensor:
    masked = far & moves_away(curr, gen, advantage)
    return masked if clip.most is None else masked | (r > clip.most) & (advantage < 0)


def tv_mask_term(
    curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, clip: ClipRange
) -> Tensor:
    """Return -r A, or 0 for tokens more than `tv` from gen that move further away.

    DPPO (arXiv 2602.04879) eq. 11 to 13. A rare token may grow many times over, which clipping
    forbids; a likely one may fall less far than with clipping.

    >>> curr, gen = torch.tensor([1e-3, 0.8]).log(), torch.tensor([1e-5, 0.99]).log()
    >>> r, advantage = token_ratio(curr, gen), torch.tensor([1.0, -1.0])
    >>> (tv_mask_term(curr, gen, r, advantage, ClipRange()) == 0).tolist()
    [False, True]
    """
    return _term(binary_tv(gen, curr.detach()) > clip.tv, curr, gen, r, advantage, clip)


def kl_mask_term(
    curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, clip: ClipRange
) -> Tensor:
    """Return -r A, or 0 for tokens more than `kl` from gen that move away (DPPO eq. 11, 12, 14)."""
    return _term(binary_kl(gen, curr.detach()) > clip.kl, curr, gen, r, advantage, clip)


def _term(
    far: Tensor, curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, clip: ClipRange
) -> Tensor:
    if clip.most is not None:
        r = torch.where(advantage < 0, r.clamp(max=clip.most), r)
    return torch.where(far & moves_away(curr, gen, advantage), 0.0, -r * advantage)


RATIOS = {"token": token_ratio, "sequence": sequence_ratio}
# name -> term, mask of tokens that its bounds stop
SURROGATES = {
    "clip": (clipped_term, is_clipped),
    "cispo": (cispo_term, is_outside),
    "reinforce": (reinforce_term, no_clipping),
    "tv_mask": (tv_mask_term, is_past_tv),
    "kl_mask": (kl_mask_term, is_past_kl),
}
# mask -> metric of the largest divergence, divergence
DIVERGENCES = {
    "tv_mask": ("policy/tv_max", binary_tv),
    "kl_mask": ("policy/binary_kl_max", binary_kl),
}
