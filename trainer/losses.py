"""Per-token terms of the losses: pure functions of [B, T] tensors, without reduction.

A loss is sum(weight * term). `token_weights` contains the division and the mask, so terms have
neither. curr, gen, ref are log-probs [B, T] of the trained policy, the generating policy and the
frozen reference; KL values are in nats. The exact KL is in policies/token_distribution.py, next to
the logits; KL estimators are in trainer/kl/estimators.py, policy terms in surrogates.py.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional


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


def dft_term(curr: Tensor) -> Tensor:
    """Return -sg(pi) log pi, which has the gradient of -pi.

    sg stops the gradient. DFT, Wu et al. 2025 (arXiv 2508.05629).

    >>> curr = torch.tensor([0.25]).log().requires_grad_()
    >>> dft_term(curr).sum().backward()
    >>> curr.grad.tolist()
    [-0.25]
    """
    return -curr.detach().exp() * curr


SFT_TERMS = {"nll": torch.neg, "dft": dft_term}  # name -> function of curr


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
