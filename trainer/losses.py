"""Per-token terms of the losses: pure functions of [B, T] tensors, without reduction.

A loss is sum(weight * term); only `token_weights` divides. curr, gen, ref are log-probs [B, T] of
the trained policy, the generating policy and the frozen reference; KL values are in nats. The exact
KL is in policies/distributions/token_distribution.py, next to the logits; KL estimators are in
trainer/kl/estimators.py, policy terms in surrogates.py.
Left out on purpose: logging, masks on the terms (a weight of 0 is the mask).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from policies.random import in_float64

STD_FLOOR = 1e-4


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
    """Return max(d(V, R), d(clip(V, old +- clip), R)), or d(V, R) without a clip.

    d is (V - R)^2 / 2 by default. PPO implementations use the clipped form; the paper does not.
    The clipped form has gradient 0 once V has moved from `old` towards R by more than `clip`.

    >>> value_term(torch.tensor(1.0), torch.tensor(0.0), torch.tensor(2.0), 0.5).item()
    1.125
    """
    loss = distance(value, returns)
    if clip is not None:
        clipped = old + (value - old).clamp(-clip, clip)
        loss = torch.maximum(loss, distance(clipped, returns))
    return loss


def minor_sft_term(curr: Tensor, ref: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Return -2 / (beta m) log sigmoid(beta D) at each token.

    D is the sum of curr - ref over the m tokens of a row. The gradient is SFT's gradient
    (of -log pi) times 2 sigmoid(-beta D). This factor is 1 if D = 0, and it falls as D grows.
    MinorSFT, Xie et al. 2024 (arXiv 2408.10642).

    >>> curr, mask = torch.zeros(1, 2, requires_grad=True), torch.ones(1, 2)
    >>> (minor_sft_term(curr, torch.zeros(1, 2), mask, beta=0.1) / 2).sum().backward()
    >>> curr.grad.tolist()
    [[-0.5, -0.5]]
    """
    log_ratio = ((curr - ref) * mask).sum(-1, keepdim=True)  # [B, 1]
    length = mask.sum(-1, keepdim=True).clamp(min=1)
    return (-2 / (beta * length) * functional.logsigmoid(beta * log_ratio)).expand_as(curr)


def token_weights(
    loss_mask: Tensor,
    aggregation: str,
    *,
    total_tokens: Tensor | int,
    total_rows: Tensor | int,
    max_tokens: int = 1,
) -> Tensor:
    """Return the weight of each token in one optimiser step, [B, T] float32; 0 outside the mask.

    `total_tokens` and `total_rows` (rows with at least one token) are totals of the step over all
    ranks, so no other function divides. token_mean: 1 / total_tokens (DAPO, arXiv 2503.14476 eq. 8,
    for one prompt). sequence_mean: 1 / (total_rows * tokens of the row) (GRPO, arXiv
    2402.03300 eq. 3). constant: 1 / (total_rows * max_tokens) (Dr. GRPO, arXiv 2503.20783 section
    3.2); only these weights do not sum to 1.

    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> token_weights(mask, "sequence_mean", total_tokens=3, total_rows=2).tolist()
    [[0.25, 0.25], [0.5, 0.0]]
    """
    mask = loss_mask.to(torch.get_default_dtype())  # [B, T]
    if aggregation == "token_mean":
        count = torch.as_tensor(total_tokens, device=mask.device)
    elif aggregation == "sequence_mean":
        count = torch.as_tensor(total_rows, device=mask.device) * mask.sum(-1, keepdim=True)
    elif aggregation == "constant":
        count = torch.as_tensor(total_rows, device=mask.device) * max_tokens
    else:
        raise ValueError(f"expected token_mean, sequence_mean or constant, got {aggregation!r}")
    return mask / count.clamp(min=1)


def standardise(values: Tensor, *, floor: float = STD_FLOOR) -> Tensor:
    """Return (x - mean) / (unbiased std + floor) over the last dimension.

    >>> standardise(torch.tensor([1.0, 3.0]), floor=0.0).tolist()
    [-0.7071067690849304, 0.7071067690849304]
    """
    mean = in_float64(values).mean(-1, keepdim=True).to(values)  # float64 as in group_mean
    return (values - mean) / spread(values, floor=floor)


def spread(values: Tensor, mask: Tensor | None = None, *, floor: float = STD_FLOOR) -> Tensor:
    """Return unbiased std + floor of masked values, [..., G] -> [..., 1]; one value gives floor."""
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    squares = (values - group_mean(values, mask)).square() * mask
    others = (mask.sum(-1, keepdim=True) - 1).clamp(min=1)
    return (squares.sum(-1, keepdim=True) / others).sqrt() + floor


def group_mean(total: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each group's masked rows, repeated for each row; [P, G] in and out.

    Computed in float64, so that the mean of equal float32 values is exactly this value: otherwise
    a rounding error, divided by the floor of the spread, becomes a full step of Adam.

    >>> group_mean(torch.full((1, 8), 0.7), torch.ones(1, 8, dtype=torch.bool))[0, 0].item() == (
    ...     torch.tensor(0.7).item()
    ... )
    True
    """
    size = mask.sum(-1, keepdim=True).clamp(min=1)
    exact = in_float64(total)
    mean = (exact * mask.to(exact.device)).sum(-1, keepdim=True) / size.to(exact.device)
    return mean.to(total).expand_as(total)


def leave_one_out(total: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the group's other masked rows, [P, G]; a single row gets its own value.

    RLOO, Ahmadian et al. 2024 (arXiv 2402.14740) section 2.3.

    >>> leave_one_out(torch.tensor([[1.0, 2.0, 6.0]]), torch.tensor([[True, True, True]])).tolist()
    [[4.0, 3.5, 1.5]]
    """
    others = mask.sum(-1, keepdim=True) - mask.int()
    exact = in_float64(total * mask)  # float64 as in group_mean
    mean = (exact.sum(-1, keepdim=True) - exact) / others.clamp(min=1).to(exact.device)
    return torch.where(others > 0, mean.to(total), total)


BASELINES = {  # functions of totals and row mask, [P, G] in and out
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "none": lambda total, mask: torch.zeros_like(total),
}


def group_advantage(
    reward: Tensor,
    reward_kl: Tensor,
    loss_mask: Tensor,
    group_size: int,
    *,
    baseline: str = "group_mean",
    scale: Callable[[Tensor, Tensor], Tensor] | None = spread,
    credit: str = "trajectory",
) -> Tensor:
    """Return A = (R - baseline R) / scale + (K - baseline K) at loss tokens, else 0, [B, T].

    reward [B, T] is the task reward of each token and reward_kl [B, T] the KL part; R and K are
    their sums over a trajectory. A group is G adjacent rows. Rows without loss tokens enter neither
    baseline nor scale. `scale` maps R and row mask [P, G] to a divisor [P, 1] (None: 1). K is never
    scaled, so the KL coefficient keeps its meaning; if a group has equal R, only K counts.
    GRPO: Shao et al. 2024 (arXiv 2402.03300) section 4.1.2.

    credit="return_to_go" replaces R and K by the sums from token t on; baseline and scale stay the
    same. So a token gets no credit for earlier rewards, and the advantage of the first token is the
    same as with "trajectory".

    >>> reward = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    >>> mask = torch.ones(2, 2, dtype=torch.bool)
    >>> group_advantage(reward, 0 * reward, mask, 2, scale=None).tolist()
    [[0.5, 0.5], [-0.5, -0.5]]
    """
    if group_size < 2 and (baseline != "none" or scale is not None):
        raise ValueError(f"a group baseline needs group_size >= 2, got {group_size}")
    rows = loss_mask.any(-1).view(-1, group_size)  # [P, G]
    task = _minus_baseline(reward, rows, baseline, credit)
    if scale is not None:
        divisor = scale(reward.sum(-1).view_as(rows), rows)  # [P, 1]
        task = task / divisor.repeat_interleave(group_size, 0)
    return (task + _minus_baseline(reward_kl, rows, baseline, credit)) * loss_mask


def _minus_baseline(reward: Tensor, rows: Tensor, baseline: str, credit: str) -> Tensor:
    """Subtract a row's baseline from its total [B, 1] or from the return of each token [B, T]."""
    total = reward.sum(-1, keepdim=True)  # [B, 1]
    base = BASELINES[baseline](total.view_as(rows), rows).reshape(-1, 1)
    if credit == "return_to_go":
        total = reward.flip(-1).cumsum(-1).flip(-1)  # [B, T]
    elif credit != "trajectory":
        raise ValueError(f"expected credit trajectory or return_to_go, got {credit!r}")
    return total - base
