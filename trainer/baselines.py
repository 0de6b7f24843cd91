"""Group baselines and scales of rewards: pure functions of totals [P, G], G responses a prompt.

To add a baseline, add a row to BASELINES: the key algorithm.baseline and the tests read it.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from policies.precision import in_float64

if TYPE_CHECKING:
    from torch import Tensor

STD_FLOOR = 1e-4


def standardise(values: Tensor, *, floor: float = STD_FLOOR) -> Tensor:
    """Return (x - mean) / (unbiased std + floor) over the last dimension.

    >>> import torch
    >>> standardise(torch.tensor([1.0, 3.0]), floor=0.0).tolist()
    [-0.7071067690849304, 0.7071067690849304]
    """
    mean = in_float64(values).mean(-1, keepdim=True).to(values)  # float64 as in group_mean
    return (values - mean) / spread(values, floor=floor)


def spread(values: Tensor, mask: Tensor | None = None, *, floor: float = STD_FLOOR) -> Tensor:
    """Return unbiased std + floor of masked values, [..., G] -> [..., 1]; one value gives floor."""
    mask = values.new_ones(values.shape).bool() if mask is None else mask  # [..., G]
    squares = (values - group_mean(values, mask)).square() * mask
    others = (mask.sum(-1, keepdim=True) - 1).clamp(min=1)
    return (squares.sum(-1, keepdim=True) / others).sqrt() + floor


def group_mean(total: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each group's masked rows, repeated for each row; [P, G] in and out.

    Computed in float64, so that the mean of equal float32 values is exactly this value: otherwise
    a rounding error, divided by the floor of the spread, becomes a full step of Adam.

    >>> import torch
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

    >>> import torch
    >>> leave_one_out(torch.tensor([[1.0, 2.0, 6.0]]), torch.tensor([[True, True, True]])).tolist()
    [[4.0, 3.5, 1.5]]
    """
    others = mask.sum(-1, keepdim=True) - mask.int()
    exact = in_float64(total * mask)  # float64 as in group_mean
    mean = (exact.sum(-1, keepdim=True) - exact) / others.clamp(min=1).to(exact.device)
    return mean.to(total).where(others > 0, total)


def no_baseline(total: Tensor, mask: Tensor) -> Tensor:
    """Return zeros, [P, G]: REINFORCE++ does not compare the rows of a group."""
    return total.new_zeros(total.shape)


Baseline = Callable[["Tensor", "Tensor"], "Tensor"]
BASELINES: dict[str, Baseline] = {  # functions of totals and row mask, [P, G] in and out
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "none": no_baseline,
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

    credit="return_to_go" replaces R and K by the sums from token t on. Their baseline is over the
    group's tokens at the same place: the n-th token is compared with the n-th token of each row, or
    with the last token of a shorter row. The scale stays the same. So a token gets no credit for
    earlier rewards, and a reward at the end of the row counts as with "trajectory".

    >>> import torch
    >>> reward = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    >>> mask = torch.ones(2, 2, dtype=torch.bool)
    >>> group_advantage(reward, 0 * reward, mask, 2, scale=None).tolist()
    [[0.5, 0.5], [-0.5, -0.5]]
    """
    if group_size < 2 and (baseline != "none" or scale is not None):
        raise ValueError(f"a group baseline needs group_size >= 2, got {group_size}")
    if credit not in ("trajectory", "return_to_go"):
        raise ValueError(f"expected credit trajectory or return_to_go, got {credit!r}")
    rows = loss_mask.any(-1).view(-1, group_size)  # [P, G]

    def compared(values: Tensor) -> Tensor:
        if credit == "return_to_go":
            return compare_places(to_go(values), loss_mask, rows, BASELINES[baseline])  # [B, T]
        total = values.sum(-1).view_as(rows)  # [P, G]
        return (total - BASELINES[baseline](total, rows)).reshape(-1, 1)  # [B, 1]

    task = compared(reward)
    if scale is not None:
        divisor = scale(reward.sum(-1).view_as(rows), rows)  # [P, 1]
        task = task / divisor.repeat_interleave(group_size, 0)
    return (task + compared(reward_kl)) * loss_mask


def to_go(values: Tensor) -> Tensor:
    """Return the sum over each token and all later ones, [B, T] in and out."""
    return values.flip(-1).cumsum(-1).flip(-1)


def compare_places(values: Tensor, mask: Tensor, rows: Tensor, baseline: Baseline) -> Tensor:
    """Return values [B, T] minus the baseline of their place in the group.

    The place of a token is its number among the tokens of the mask [B, T]. A row that has ended
    takes part in later places with its last token. `rows` [P, G] is True for rows that take part.
    """
    length = mask.shape[-1]
    number = mask.new_ones(mask.shape).cumsum(-1)  # [B, T] 1, 2, ...
    until = number.minimum(mask.sum(-1, keepdim=True).clamp(min=1)) - 1  # [B, T] 0, 1, ..., last
    tokens = (~mask).int().argsort(stable=True).gather(-1, until)  # [B, T] token at each place
    by_place = values.gather(-1, tokens).view(*rows.shape, length).mT  # [P, T, G]
    base = baseline(by_place, rows.unsqueeze(1)).mT.reshape(mask.shape)  # [B, T] by place
    return values - base.gather(-1, (mask.cumsum(-1) - 1).clamp(min=0))
