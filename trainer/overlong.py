"""Overlong replies: pay less for them, or learn nothing from them. Verbs of `after_rollout`.

A row that leaves the loss mask keeps its reward, which the metrics show, but enters no baseline and
no scale.
"""

from tensordict import TensorDictBase
from torch import Tensor


class OverlongPenalty:
    """Pay less for replies that come near the limit (DAPO, arXiv 2503.14476 eq. 13).

    n sampled tokens earn weight * max(-1, (max_tokens - buffer - n) / buffer), at most 0. It is
    added to reward_raw at the row's last sampled token, and is the reward part "overlong".

    >>> import torch
    >>> OverlongPenalty(max_tokens=20, buffer=4).penalty(torch.tensor([16, 17, 20, 30])).tolist()
    [0.0, -0.25, -1.0, -1.0]
    """

    def __init__(self, *, max_tokens: int, buffer: int, weight: float = 1.0) -> None:
        if not 0 < buffer <= max_tokens or weight < 0:
            got = f"{buffer=}, {max_tokens=}, {weight=}"
            raise ValueError(f"expected 0 < buffer <= max_tokens and weight >= 0, got {got}")
        self.free, self.buffer, self.weight = max_tokens - buffer, buffer, weight

    def penalty(self, lengths: Tensor) -> Tensor:
        """Return what replies of these lengths [B] earn for them, [B]."""
        return self.weight * ((self.free - lengths) / self.buffer).clamp(-1, 0)

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Add the penalty to the batch."""
        sampled = batch.get(("masks", "all_response_mask"))  # [B, T]
        length = sampled.sum(-1)  # [B]
        earned = self.penalty(length)
        last = sampled & (sampled.cumsum(-1) == length.unsqueeze(-1))
        batch.set("reward_raw", batch.get("reward_raw") + earned.unsqueeze(-1) * last)
        return batch.set(("reward_part", "overlong"), earned)


class DropTruncated:
    """Take truncated replies out of the loss mask (overlong filtering, DAPO section 3.4)."""

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Narrow the batch's loss mask."""
        kept = ~batch.get("truncated").unsqueeze(-1)
        return batch.set("loss_mask", batch.get("loss_mask") & kept)
