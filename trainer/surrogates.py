"""Surrogate losses of the policy gradient: pure functions of [B, T] tensors, without reduction.

An objective combines one of RATIOS with one of SURROGATES; docs/algorithms.md lists the settings of
papers. curr and gen are log-probs of the trained and the generating policy, A is the advantage, and
r is the ratio pi_curr / pi_old. old is gen; if another engine sampled, old are the log-probs that
the trainer computes with the generating weights. Terms are minimised.

tv_mask and kl_mask (DPPO: Qi et al. 2026, arXiv 2602.04879, eq. 11 to 14) bound the divergence from
the generating policy. Each divergence is over two outcomes: the sampled token or any other. Not
supported: the paper's divergences over the top k tokens, because they need more log-probs.
SEQUENCE_MASKS drop whole responses, with any surrogate.
Torch-free, so that the parent process can read SURROGATES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Term = Callable[..., "Tensor"]  # function of curr, gen, r, advantage and a ClipRange
Mask = Callable[..., "Tensor"]  # the same without r
MAX_LOG_RATIO = 20.0  # nats; exp(20) = 4.9e8 exceeds every clip; exp(89) overflows float32


@dataclass(frozen=True)
class ClipRange:
    """Bounds of a ratio: 1 - low and 1 + high; if A < 0, also the upper bound `most` unless None.

    `tv` (probability) is the bound of tv_mask, `kl` (nats) the bound of kl_mask and kpop.
    """

    low: float = 0.2
    high: float = 0.2
    most: float | None = None
    tv: float = 0.15
    kl: float = 0.05


def token_ratio(curr: Tensor, old: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the importance ratio pi_curr / pi_old of each token.

    The log-ratio is clamped to +-20; a clamped ratio has no gradient. `mask` is unused.

    >>> import torch
    >>> token_ratio(torch.tensor([0.0, 1000.0]), torch.tensor([0.0, 0.0])).tolist()
    [1.0, 485165184.0]
    """
    return (curr - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_ratio(curr: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """Return the geometric mean of a row's token ratios over the mask, repeated for each token.

    GSPO-token (arXiv 2507.18071) eq. 14. The value is s_i of eq. 7, the gradient is s_i times the
    gradient of the token's log pi. With one advantage per row and aggregation=sequence_mean, the
    loss is GSPO's, eq. 5. The mean log-ratio is clamped as in `token_ratio`.

    >>> import torch
    >>> curr, mask = torch.tensor([[0.4, 0.0, 9.0]]), torch.tensor([[True, True, False]])
    >>> [round(r, 3) for r in sequence_ratio(curr, torch.zeros(1, 3), mask)[0, :2].tolist()]
    [1.221, 1.221]
    """
    log_ratio = ((curr - old) * mask).detach().sum(-1, keepdim=True)
    mean = log_ratio / mask.sum(-1, keepdim=True).clamp(min=1)  # [B, 1]
    return token_ratio(mean + (curr - curr.detach()), curr.new_zeros(()))  # [B, T]


def clipped_term(
    curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, clip: ClipRange
) -> Tensor:
    """Return -min(r A, clip(r, 1 - low, 1 + high) A); if A < 0, `most` bounds r from above.

    PPO: Schulman et al. 2017 (arXiv 1707.06347) eq. 7. GRPO: Shao et al. 2024 (arXiv 2402.03300)
    eq. 3. Different low and high: DAPO (arXiv 2503.14476) eq. 8. `most` is c of the dual clip: Ye
    et al. 2020 (arXiv 1912.09729) eq. 5.

    >>> import torch
    >>> one, curr = torch.tensor([1.0]), torch.zeros(1)
    >>> clipped_term(curr, curr - 1, one.exp(), one, ClipRange(0.2, 0.25)).tolist()
    [-1.25]
    """
    clipped = r.clamp(1 - clip.low, 1 + clip.high) * advantage  # [B, T]
    term = -(r * advantage).minimum(clipped)  # [B, T]
    if clip.most is not None:
        term = term.minimum(-clip.most * advantage).where(advantage < 0, term)
    return term


def cispo_term(curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, clip: ClipRange) -> Tensor:
    """Return -sg(clip(r, 1 - low, 1 + high)) A log pi_curr.

    sg stops the gradient. Clipped tokens keep a gradient with a bounded weight. MiniMax-M1 (arXiv
    2506.13585) eq. 4 and 5.

    >>> import torch
    >>> curr = torch.tensor([-1.0], requires_grad=True)
    >>> gen, advantage = curr.detach() - 1, torch.tensor([2.0])
    >>> r = token_ratio(curr, gen)
    >>> cispo_term(curr, gen, r, advantage, ClipRange(0.2, 0.5)).sum().backward()
    >>> curr.grad.tolist()
    [-3.0]
    """
    return -r.detach().clamp(1 - clip.low, 1 + clip.high) * advantage * curr


def reinforce_term(
    curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, clip: ClipRange
) -> Tensor:
    """Return -A log pi_curr (Williams 1992). It ignores r, so take one step per batch."""
    return -advantage * curr


def is_clipped(curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, clip: ClipRange) -> Tensor:
    """Return the mask of tokens without a gradient in `clipped_term`, bool.

    >>> import torch
    >>> r, advantage = torch.tensor([0.7, 0.7, 1.3]), torch.tensor([1.0, -1.0, 1.0])
    >>> is_clipped(r.log(), torch.zeros(3), r, advantage, ClipRange()).tolist()
    [False, True, True]
    """
    clipped = (r < 1 - clip.low) & (advantage < 0) | (r > 1 + clip.high) & (advantage > 0)
    return clipped if clip.most is None else clipped | (r > clip.most) & (advantage < 0)


def is_outside(curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, clip: ClipRange) -> Tensor:
    """Return the mask of tokens with a ratio outside the bounds, bool."""
    return (r < 1 - clip.low) | (r > 1 + clip.high)


def no_clipping(curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, clip: ClipRange) -> Tensor:
    """Return False at every token: no bound applies."""
    return r < 0  # never: a ratio is positive


def binary_tv(gen: Tensor, curr: Tensor) -> Tensor:
    """Return the total variation |pi_curr - pi_gen| of two outcomes: the token or any other.

    DPPO (arXiv 2602.04879) eq. 13. The total variation over the vocabulary is at least as large.

    >>> import torch
    >>> round(binary_tv(torch.tensor(0.99).log(), torch.tensor(0.8).log()).item(), 6)
    0.19
    """
    return (curr.exp() - gen.exp()).abs()


def binary_kl(gen: Tensor, curr: Tensor) -> Tensor:
    """Return KL(gen || curr), in nats, of two outcomes: the token or any other.

    g log(g / p) + (1 - g) log((1 - g) / (1 - p)) with g = pi_gen, p = pi_curr: DPPO (arXiv
    2602.04879) eq. 14. Exact for log-probs near 0. A log-prob of 0 is a rounding error; it is
    replaced by -eps, so that the result is finite.

    >>> import torch
    >>> round(binary_kl(torch.tensor(0.5).log(), torch.tensor(0.25).log()).item(), 6)
    0.143841
    """
    top = -(2.0**-52 if curr.dtype.itemsize == 8 else 2.0**-23)  # eps of float64, float32
    gen, curr = gen.clamp(max=top), curr.clamp(max=top)
    others = -gen.expm1() * (_log_of_others(gen) - _log_of_others(curr))
    return gen.exp() * (gen - curr) + others


def _log_of_others(log_prob: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0. For precision: expm1 if x is near 0, else log1p."""
    near, far = (-log_prob.expm1()).log(), (-log_prob.exp()).log1p()
    return near.where(log_prob > -0.7, far)


def moves_away(curr: Tensor, gen: Tensor, advantage: Tensor) -> Tensor:
    """Return the mask of tokens that the update moves further away from pi_gen, bool.

    These tokens have A > 0 and pi_curr > pi_gen, or A < 0 and pi_curr < pi_gen.
    """
    return (curr > gen) & (advantage > 0) | (curr < gen) & (advantage < 0)


def past_tv(curr: Tensor, gen: Tensor, advantage: Tensor, clip: ClipRange) -> Tensor:
    """Return the mask of tokens with `binary_tv` above `tv` that the update `moves_away`, bool.

    DPPO (arXiv 2602.04879) eq. 11 to 13. Compared with clipping, the probability of a rare token
    may grow by a larger factor, and the probability of a likely token may fall less.

    >>> import torch
    >>> curr, gen = torch.tensor([1e-3, 0.8]).log(), torch.tensor([1e-5, 0.99]).log()
    >>> past_tv(curr, gen, torch.tensor([1.0, -1.0]), ClipRange()).tolist()
    [False, True]
    """
    return (binary_tv(gen, curr) > clip.tv) & moves_away(curr, gen, advantage)


def past_kl(curr: Tensor, gen: Tensor, advantage: Tensor, clip: ClipRange) -> Tensor:
    """Return the mask of tokens with `binary_kl` above `kl` that the update `moves_away`, bool.

    DPPO (arXiv 2602.04879) eq. 14.
    """
    return (binary_kl(gen, curr) > clip.kl) & moves_away(curr, gen, advantage)


def both_kls(gen: Tensor, curr: Tensor) -> Tensor:
    """Return the larger of the two `binary_kl` between gen and curr, in nats."""
    return binary_kl(gen, curr).maximum(binary_kl(curr, gen))


def past_both(curr: Tensor, gen: Tensor, advantage: Tensor, clip: ClipRange) -> Tensor:
    """Return the mask of tokens with `both_kls` above `kl`, whatever the sign of A, bool.

    KPop (Guo et al., Ant Group, https://ringtech.notion.site/kpop), as in AReaL, prime-rl and verl,
    where the bound is 0.1 nats.
    """
    return both_kls(gen, curr) > clip.kl


def masked_term(
    past: Mask, curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, clip: ClipRange
) -> Tensor:
    """Return -r A, or 0 where `past` masks; if A < 0, `most` bounds r from above."""
    if clip.most is not None:
        r = r.clamp(max=clip.most).where(advantage < 0, r)
    return (-r * advantage).masked_fill(past(curr.detach(), gen, advantage, clip), 0.0)


def is_masked(
    past: Mask, curr: Tensor, gen: Tensor, r: Tensor, advantage: Tensor, clip: ClipRange
) -> Tensor:
    """Return the mask of tokens without a gradient in `masked_term`, bool."""
    masked = past(curr, gen, advantage, clip)  # [B, T]
    return masked if clip.most is None else masked | (r > clip.most) & (advantage < 0)


RATIOS = {"token": token_ratio, "sequence": sequence_ratio}


@dataclass(frozen=True)
class Surrogate:
    """A loss of the ratio: `term`, and `stopped`, the mask of tokens outside its bounds.

    `keys`: the keys of algorithm.* that `term` and `stopped` read; other bounds are refused.
    `divergence`: name of the metric and function of (gen, curr), logged as the maximum over the
    loss mask. `one_step`: correct only for one optimiser step per batch, on fresh responses.
    """

    term: Term
    stopped: Term = no_clipping
    keys: tuple[str, ...] = ()
    divergence: tuple[str, Callable[[Tensor, Tensor], Tensor]] | None = None
    one_step: bool = False


SURROGATES = {
    "clip": Surrogate(
        clipped_term, is_clipped, keys=("clip_low", "clip_high", "dual_clip", "ratio")
    ),
    "cispo": Surrogate(cispo_term, is_outside, keys=("clip_low", "clip_high", "ratio")),
    "reinforce": Surrogate(reinforce_term, one_step=True),
    "tv_mask": Surrogate(
        partial(masked_term, past_tv),
        partial(is_masked, past_tv),
        keys=("tv_bound", "dual_clip", "ratio"),
        divergence=("policy/tv_max", binary_tv),
    ),
    "kl_mask": Surrogate(
        partial(masked_term, past_kl),
        partial(is_masked, past_kl),
        keys=("kl_bound", "dual_clip", "ratio"),
        divergence=("policy/binary_kl_max", binary_kl),
    ),
    "kpop": Surrogate(
        partial(masked_term, past_both),
        partial(is_masked, past_both),
        keys=("kl_bound", "dual_clip", "ratio"),
        divergence=("policy/binary_kl_max", both_kls),
    ),
}


def opsm_distance(log_ratio: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of -log_ratio of a row, or 0 if its mean advantage is not negative, [B, 1].

    DeepSeek-V3.2 (arXiv 2512.02556) eq. 9. The mean advantage decides for the row: tokens of one
    response may have advantages of both signs (algorithm.credit=return_to_go).
    """
    distance = _row_mean(-log_ratio, mask)  # [B, 1]
    return distance.where(_row_mean(advantage, mask) < 0, 0.0)


def trm_max_distance(log_ratio: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """Return the largest log_ratio^2 / 2 of a row, [B, 1] (TRM, arXiv 2512.23075, k2)."""
    return (0.5 * log_ratio.square()).where(mask, 0.0).amax(-1, keepdim=True)


def trm_mean_distance(log_ratio: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of r - 1 - log r of a row, [B, 1] (TRM, arXiv 2512.23075, k3)."""
    x = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # [B, T]
    return _row_mean(x.expm1() - x, mask)


def _row_mean(value: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the mask of each row, [B, 1]."""
    return value.where(mask, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


# Distances in nats between the trained policy and the policy that sampled the response.
SEQUENCE_MASKS = {
    "opsm": opsm_distance,
    "trm_max": trm_max_distance,
    "trm_mean": trm_mean_distance,
}


def masked_rows(
    bounds: Mapping[str, float], curr: Tensor, gen: Tensor, advantage: Tensor, mask: Tensor
) -> Tensor:
    """Return which rows have a distance of SEQUENCE_MASKS above its bound (nats), bool [B, 1].

    The distances are over `mask` [B, T], log_ratio is curr - gen.

    >>> import torch
    >>> curr, gen, mask = torch.tensor([[-1.0, -3.0]]), -torch.ones(1, 2), torch.ones(1, 2).bool()
    >>> masked_rows({"opsm": 0.5}, curr, gen, torch.tensor([[-2.0, 1.0]]), mask).tolist()
    [[True]]
    >>> masked_rows({"opsm": 0.5}, curr, gen, torch.tensor([[2.0, -1.0]]), mask).tolist()
    [[False]]
    """
    masked = mask.new_zeros(len(mask), 1)  # [B, 1]
    for name, bound in bounds.items():
        masked = masked | (SEQUENCE_MASKS[name](curr - gen, advantage, mask) > bound)
    return masked


def find_surrogate(surrogate: str | Surrogate) -> Surrogate:
    """Return the surrogate with this name; a `Surrogate` is returned as it is.

    Raise ValueError for anything else.
    """
    found = surrogate if isinstance(surrogate, Surrogate) else SURROGATES.get(surrogate)
    if found is None:
        text = f"one of {', '.join(SURROGATES)} or a trainer.surrogates.Surrogate"
        raise ValueError(f"expected algorithm.surrogate to be {text}, got {surrogate!r}")
    return found
