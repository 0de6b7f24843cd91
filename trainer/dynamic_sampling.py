"""Dynamic sampling: prompts that teach nothing are drawn again (DAPO)."""

from typing import Any

import torch
from tensordict import NestedKey, TensorDict
from torch import Tensor

from policies.padding import widen
from trainer.metrics import idle_groups
from trainer.sources import Rollouts


class DynamicRollouts(Rollouts):
    """Draw prompts again whose replies all earn the same (DAPO, arXiv 2503.14476 section 3.2).

    `parts` are the arguments of `Rollouts`. A place of the iteration is drawn up to `rounds` times
    more, each time with another row: a function of (seed, iteration, round, place). What earns the
    same even then keeps its place and leaves the loss mask. Logs group/resampled, how many groups
    more were drawn for the place. The task's own reward decides; `after_rollout` comes after. All
    ranks play equally many rounds, until none has an idle place.
    """

    def __init__(self, *, rounds: int = 2, **parts: Any) -> None:
        super().__init__(**parts)
        if self.env.group_size < 2 or rounds < 1:
            raise ValueError(
                "dynamic sampling expects algorithm.group_size >= 2 and rounds >= 1, got "
                f"{self.env.group_size} and {rounds}; with one reply a prompt use trainer.Rollouts"
            )
        self.rounds = rounds

    def sample(self, iteration: int) -> TensorDict:
        """Return this rank's trajectories of the iteration as they were played, [B, T]."""
        batch = self.play(self.prompts(iteration))
        idle = idle_groups(batch)  # [P]
        again_drawn = torch.zeros(len(idle))  # [P]
        for attempt in range(1, self.rounds + 1):
            if not self.runtime.maxima({"idle": float(idle.any())})["idle"]:
                break
            # A model in shards generates only with all ranks, so who has no idle place plays one
            # too and keeps nothing of it.
            again = idle if idle.any() else torch.arange(len(idle)) == 0
            fresh = self.play(self.prompts(iteration, attempt)[again])
            if idle.any():
                batch = swap(batch, fresh, self._rows(idle))
                again_drawn += idle
                idle = idle_groups(batch)
        kept = ~self._rows(idle).to(self.generator.device)
        batch.set("loss_mask", batch.get("loss_mask") & kept.unsqueeze(-1))
        resampled = self._rows(again_drawn).to(self.generator.device)
        return batch.set(("logged", "group/resampled"), resampled)

    def _rows(self, of_groups: Tensor) -> Tensor:
        return of_groups.repeat_interleave(self.env.group_size)


def swap(batch: TensorDict, fresh: TensorDict, rows: Tensor) -> TensorDict:
    """Return the batch with `fresh` in the place of those rows where `rows` [B] is True."""
    size = len(rows)

    def widened(td: TensorDict, other: TensorDict) -> TensorDict:
        def fit(key: NestedKey, x: Tensor) -> Tensor:
            return x if x.ndim != 2 else widen(x, max(x.shape[1], other.get(key).shape[1]))

        return td.named_apply(fit, nested_keys=True)

    index = torch.arange(size)
    index[rows] = size + torch.arange(int(rows.sum()))
    return torch.cat([widened(batch, fresh), widened(fresh, batch)])[index]
