"""The per-token maths of the losses: pure functions, [B, T] in and [B, T] out, nothing reduced.

A loss is sum(weights * term): `weights` holds the only division there is. Letters: B trajectories,
T tokens, V vocabulary, G group size. curr, gen, ref are log-probs [B, T] of the policy being
trained, of the policy that generated, and of the frozen reference; all KL values are in nats. The
exact KL stands in policies/scorer.py, where the logits are.
Left out on purpose: logging, masks on the terms (a weight of 0 is the mask).
"""

from collections.abc import Callable

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # nats; exp(20) = 4.9e8 is past any clip, exp(89) overflows float32
STD_FLOOR = 1e-4


def ratio(curr: Tensor, gen: Tensor) -> Tensor:
    """Return the importance ratio pi_curr / pi_gen of each token.

    The log-ratio is clamped to +-20, so the result is finite, and has no gradient beyond.

    >>> ratio(torch.tensor([0.0, 1000.0]), torch.tensor([0.0, 0.0])).tolist()
    [1.0, 485165184.0]
    """
    return (curr - gen).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_policy_term(
    curr: Tensor, gen: Tensor, advantage: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), to be minimised.

    Schulman et al. 2017 (arXiv 1707.06347) eq. 7; with clip_low = clip_high the policy part of
    GRPO, Shao et al. 2024 (arXiv 2402.03300) eq. 3; two bounds as in DAPO (arXiv 2503.14476) eq. 8.

    >>> one = torch.tensor([1.0])
    >>> clipped_policy_term(one.log() + 1.0, one.log(), one, 0.2, 0.25).tolist()
    [-1.25]
    """
    r = ratio(curr, gen)
    return -torch.minimum(r * advantage, r.clamp(1 - clip_low, 1 + clip_high) * advantage)


def cispo_term(
    curr: Tensor, gen: Tensor, advantage: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """Return -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi, to be minimised.

    sg is stop-gradient: a clipped token keeps a gradient, of bounded weight. MiniMax-M1 (arXiv
    2506.13585) eq. 4 and 5.

    >>> curr = torch.tensor([-1.0], requires_grad=True)
    >>> cispo_term(curr, curr.detach() - 1, torch.tensor([2.0]), 0.2, 0.5).sum().backward()
    >>> curr.grad.tolist()
    [-3.0]
    """
    held = ratio(curr, gen).detach().clamp(1 - clip_low, 1 + clip_high)
    return -held * advantage * curr


def is_clipped(moved: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Return where the ratio `moved` is past the bound that stops its gradient, bool.

    >>> is_clipped(torch.tensor([0.7, 0.7, 1.3]), torch.tensor([1.0, -1.0, 1.0]), 0.2, 0.2).tolist()
    [False, True, True]
    """
    low, high = moved < 1 - clip_low, moved > 1 + clip_high
    return (low & (advantage < 0)) | (high & (advantage > 0))


def half_square(a: Tensor, b: Tensor) -> Tensor:
    """Return (a - b)^2 / 2."""
    return 0.5 * (a - b).square()


def value_term(
    value: Tensor,
    old: Tensor,
    returns: Tensor,
    clip: float | None,
    distance: Callable[[Tensor, Tensor], Tensor] = half_square,
) -> Tensor:
    """Return max(d(V, R), d(clip(V, old +- clip), R)); without a clip d(V, R).

    d is (V - R)^2 / 2. The clipped form is that of the PPO implementations, not of the paper: once
    V is `clip` away from what it was at sampling, towards R, its gradient stops.

    >>> value_term(torch.tensor(1.0), torch.tensor(0.0), torch.tensor(2.0), 0.5).item()
    1.125
    """
    loss = distance(value, returns)
    if clip is not None:
        near = old + (value - old).clamp(-clip, clip)
        loss = torch.maximum(loss, distance(near, returns))
    return loss


def kl_term(curr: Tensor, ref: Tensor, estimator: str) -> Tensor:
    """Return the estimate of KL(curr || ref) of each token, sampled from curr.

    k1 = curr - ref, k2 = (curr - ref)^2 / 2, k3 = exp(d) - d - 1 with d = ref - curr (Schulman
    2020, "Approximating KL divergence"; k3 is GRPO's, arXiv 2402.03300 eq. 4). As terms of a loss,
    the visited states held fixed, their expected gradients are: k1 zero, k2 that of
    KL(curr || ref), k3 that of KL(ref || curr). In k3, d is clamped at 20 from above (where it
    overflows), without a gradient beyond; a token that the reference finds unlikely (d below -20)
    is still pulled back.

    >>> [round(kl_term(torch.tensor(-1.0), torch.tensor(-2.0), k).item(), 4) for k in ("k1", "k3")]
    [1.0, 0.3679]
    """
    if estimator == "k1":
        return curr - ref
    if estimator == "k2":
        return 0.5 * (curr - ref).square()
    if estimator == "k3":
        d = (ref - curr).clamp(max=MAX_LOG_RATIO)
        return torch.expm1(d) - d
    raise ValueError(f"expected an estimator k1, k2 or k3 (full needs logits), got {estimator!r}")


def weights(
    loss_mask: Tensor,
    aggregation: str,
    *,
    total_tokens: Tensor | int,
    total_rows: Tensor | int,
    max_tokens: int | None = None,
) -> Tensor:
    """Return what each token counts in one optimiser step, [B, T] float32; 0 outside the mask.

    `total_tokens` and `total_rows` (rows with at least one token) are over the whole step, on all
    ranks, so nobody divides again. token_mean: 1 / total_tokens (DAPO, arXiv 2503.14476 eq. 8).
    sequence_mean: 1 / (total_rows * tokens of the row) (GRPO, arXiv 2402.03300 eq. 3). constant:
    1 / (total_rows * max_tokens) (Dr. GRPO, arXiv 2503.20783), the only one that does not sum to 1.

    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> weights(mask, "sequence_mean", total_tokens=3, total_rows=2).tolist()
    [[0.25, 0.25], [0.5, 0.0]]
    """
    mask = loss_mask.float()  # [B, T]
    if aggregation == "token_mean":
        count = torch.as_tensor(total_tokens, device=mask.device)
    elif aggregation == "sequence_mean":
        count = torch.as_tensor(total_rows, device=mask.device) * mask.sum(-1, keepdim=True)
    elif aggregation == "constant":
        if not max_tokens or max_tokens < 1:
            raise ValueError(f"aggregation 'constant' expects max_tokens >= 1, got {max_tokens}")
        count = torch.as_tensor(total_rows, device=mask.device) * max_tokens
    else:
        raise ValueError(
            f"expected aggregation token_mean, sequence_mean or constant, got {aggregation!r}"
        )
    return mask / count.clamp(min=1)


def standardise(values: Tensor, *, floor: float = STD_FLOOR) -> Tensor:
    """Return (x - mean) / (unbiased std + floor) over the last dimension.

    >>> standardise(torch.tensor([1.0, 3.0]), floor=0.0).tolist()
    [-0.7071067690849304, 0.7071067690849304]
    """
    return (values - values.mean(-1, keepdim=True)) / _scale(values, floor)


def _scale(values: Tensor, floor: float) -> Tensor:
    return values.std(-1, keepdim=True) + floor  # unbiased


def group_advantage(
    reward: Tensor,
    reward_kl: Tensor,
    loss_mask: Tensor,
    group_size: int,
    *,
    scale_by_std: bool = True,
    credit: str = "trajectory",
) -> Tensor:
    """Return A = (R - mean R) / scale + (K - mean K) at the kept tokens, 0 elsewhere, [B, T].

    reward and reward_kl [B, T] are the task and the KL reward of each token, R and K their sums
    over a trajectory; means are over the group, G adjacent rows. scale = unbiased std of R + 1e-4
    (1 with scale_by_std=False); K is never scaled, so the KL coefficient keeps its meaning, and a
    group of equal R is left with its K part. GRPO: Shao et al. 2024 (arXiv 2402.03300) section
    4.1.2.

    credit="return_to_go" puts the sums from token t on in the place of R and K, with the same means
    and scale: past rewards are not credited to a token, and the first token gets what every token
    gets under "trajectory".

    >>> reward = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    >>> mask = torch.ones(2, 2, dtype=torch.bool)
    >>> group_advantage(reward, 0 * reward, mask, 2, scale_by_std=False).tolist()
    [[0.5, 0.5], [-0.5, -0.5]]
    """
    if group_size < 2:
        raise ValueError(
            f"a group baseline needs group_size >= 2, got {group_size}: alone, every advantage is 0"
        )
    if reward.shape[0] % group_size:
        raise ValueError(
            f"expected whole groups of {group_size} adjacent rows, got {reward.shape[0]} rows"
        )
    task = _centred(reward, group_size, credit)
    if scale_by_std:
        scale = _scale(reward.sum(-1).view(-1, group_size), STD_FLOOR)  # [P, 1]
        task = task / scale.repeat_interleave(group_size, 0)
    return (task + _centred(reward_kl, group_size, credit)) * loss_mask


def _centred(reward: Tensor, group_size: int, credit: str) -> Tensor:
    """Return the credited reward minus the group's mean total, [B, 1] or [B, T]."""
    total = reward.sum(-1, keepdim=True)  # [B, 1]
    mean = total.view(-1, group_size).mean(-1, keepdim=True).repeat_interleave(group_size, 0)
    if credit == "trajectory":
        return total - mean
    if credit == "return_to_go":
        return reward.flip(-1).cumsum(-1).flip(-1) - mean
    raise ValueError(f"expected credit trajectory or return_to_go, got {credit!r}")
