"""Sources of an iteration's batch: rollouts, dynamic sampling, and functions after a rollout.

The rows of iteration i are a function of (seed, i): epochs are seeded permutations, an iteration is
the next slice, and each rank takes a part. A resume needs no other state.
"""

from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any

import torch
from tensordict import NestedKey, NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from envs.chat_env import ChatEnv
from envs.tasks.task import Task
from policies.padding import widen
from policies.protocols import Generator
from policies.random import fold
from trainer.batch import BatchFunction, named_mask
from trainer.collect import collect
from trainer.metrics import idle_groups
from trainer.runtime import Runtime


def pick_rows(iteration: int, *, size: int, count: int, seed: int) -> list[int]:
    """Return the row indices of an iteration: `count` of `size`, epoch after epoch.

    >>> first, second = (pick_rows(i, size=4, count=2, seed=0) for i in (0, 1))
    >>> sorted(first + second)
    [0, 1, 2, 3]
    """
    out: list[int] = []
    for place in range(iteration * count, (iteration + 1) * count):
        epoch, at = divmod(place, size)
        out.append(int(_order(size, int(fold(seed, epoch)) & (2**63 - 1))[at]))
    return out


@lru_cache(maxsize=2)  # an iteration may end an epoch and begin the next
def _order(size: int, seed: int) -> torch.Tensor:
    """Return the order of the rows in an epoch, int32 [size]; int64 gives the same order."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


class Rollouts:
    """Run the iteration's chats with the generator.

    `mask` selects the sampled tokens in the loss: response (all), assistant (those in assistant
    messages) or prompt (only the last turn, all before is its prompt).
    The functions of `after_rollout` transform the batch, in order.
    """

    reads_rows = "prompts"  # the value of algorithm.rows

    def __init__(
        self,
        *,
        task: Task,
        env: ChatEnv,
        generator: Generator,
        runtime: Runtime,
        prompts_per_iteration: int,
        mask: str = "response",
        after_rollout: Sequence[BatchFunction] = (),
    ) -> None:
        self.rows: Sequence[dict[str, Any]] = task.rows("train")
        self.env, self.generator, self.runtime = env, generator, runtime
        self.size = prompts_per_iteration
        self.mask, self.after_rollout = mask, after_rollout

    def prompts(self, iteration: int, attempt: int = 0) -> TensorDict:
        """Return this rank's prompts of the iteration: row, group_id, stream [P / ranks].

        Each `attempt` gives a place another row.
        """
        place, again = torch.arange(self.size), (-attempt,) if attempt else ()
        td = TensorDict(batch_size=[self.size])
        td.set("group_id", place)
        td.set("stream", fold(self.runtime.seed, iteration, place, *again))
        chosen = self._chosen(iteration, attempt)
        rows = [deepcopy(self.rows[i]) for i in chosen]  # a reward may change its row
        td.set("row", NonTensorStack(*map(NonTensorData, rows)))
        return td[self.runtime.local_slice(self.size)]

    def _chosen(self, iteration: int, attempt: int) -> list[int]:
        """Return the row of each place; over attempts a place sees every row before a repeat."""
        size, seed = len(self.rows), self.runtime.seed
        had: list[list[int]] = [[] for _ in range(self.size)]
        for k in range(attempt + 1):
            order = int(fold(seed, k)) if k else seed
            chosen = pick_rows(iteration, size=size, count=self.size, seed=order)
            for rows, row in zip(had, chosen, strict=True):
                while row in rows and len(rows) < size:
                    row = (row + 1) % size
                rows.append(row)
        return [rows[-1] for rows in had]

    def play(self, prompts: TensorDict) -> TensorDict:
        """Return the trajectories of all samples of `prompts`, [B, T]."""
        batch = collect(prompts, self.env, self.generator)
        return batch.set("loss_mask", batch.get("loss_mask") & named_mask(batch, self.mask))

    def sample(self, iteration: int) -> TensorDict:
        """Return this rank's trajectories before the functions of `after_rollout`, [B, T]."""
        return self.play(self.prompts(iteration))

    def __call__(self, iteration: int) -> TensorDictBase:
        """Return this rank's trajectories of the iteration, [B, T]."""
        with self.generator.sampling():
            batch = self.sample(iteration)
        return self.finished(batch)

    def finished(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the batch after all functions of `after_rollout`."""
        for function in self.after_rollout:
            batch = function(batch)
        return batch


class DynamicRollouts(Rollouts):
    """Replace prompts whose responses all have the same reward (DAPO, arXiv 2503.14476, 3.2).

    `parts` are the arguments of `Rollouts`. The place of such a prompt in the batch gets another
    row up to `rounds` times: a function of (seed, iteration, round, place). Groups that stay idle
    are removed from the loss mask. Logs group/resampled, the number per place. The task's reward
    decides, before `after_rollout`. All ranks take the same number of rounds.
    """

    def __init__(self, *, rounds: int = 2, **parts: Any) -> None:
        super().__init__(**parts)
        self.rounds = rounds

    def sample(self, iteration: int) -> TensorDict:
        """Return this rank's trajectories before the functions of `after_rollout`, [B, T]."""
        batch = self.play(self.prompts(iteration))
        idle = idle_groups(batch)  # [P]
        resampled = torch.zeros(len(idle))  # [P]
        for attempt in range(1, self.rounds + 1):
            if not self.runtime.all_reduce_max({"idle": float(idle.any())})["idle"]:
                break
            # A sharded model generates with all ranks: ranks without an idle place sample too.
            again = idle if idle.any() else torch.arange(len(idle)) == 0
            fresh = self.play(self.prompts(iteration, attempt)[again])
            if idle.any():
                batch = swap(batch, fresh, self._rows(idle))
                resampled += idle
                idle = idle_groups(batch)
        mask = ~self._rows(idle).to(self.generator.device)
        batch.set("loss_mask", batch.get("loss_mask") & mask.unsqueeze(-1))
        count = self._rows(resampled).to(self.generator.device)
        return batch.set(("logged", "group/resampled"), count)

    def _rows(self, of_groups: Tensor) -> Tensor:
        return of_groups.repeat_interleave(self.env.group_size)


def swap(batch: TensorDict, fresh: TensorDict, rows: Tensor) -> TensorDict:
    """Return the batch with `fresh` in place of the rows where `rows` [B] is True."""
    size = len(rows)

    def widened(td: TensorDict, other: TensorDict) -> TensorDict:
        def fit(key: NestedKey, x: Tensor) -> Tensor:
            return x if x.ndim != 2 else widen(x, max(x.shape[1], other.get(key).shape[1]))

        return td.named_apply(fit, nested_keys=True)

    index = torch.arange(size)
    index[rows] = size + torch.arange(int(rows.sum()))
    return torch.cat([widened(batch, fresh), widened(fresh, batch)])[index]


class OverlongPenalty:
    """Penalise responses near the length limit (DAPO, arXiv 2503.14476 eq. 13).

    n sampled tokens give weight * max(-1, (max_tokens - buffer - n) / buffer), at most 0, added to
    reward_raw at the row's last sampled token, and logged as reward part "overlong".

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
        """Return the penalty, <= 0, of responses of these lengths [B], [B]."""
        return self.weight * ((self.free - lengths) / self.buffer).clamp(-1, 0)

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Add the penalty to the batch."""
        sampled = batch.get(("masks", "all_response_mask"))  # [B, T]
        length = sampled.sum(-1)  # [B]
        penalty = self.penalty(length)
        last = sampled & (sampled.cumsum(-1) == length.unsqueeze(-1))
        batch.set("reward_raw", batch.get("reward_raw") + penalty.unsqueeze(-1) * last)
        return batch.set(("reward_part", "overlong"), penalty)


class DropTruncated:
    """Remove truncated responses from the loss mask (overlong filtering, DAPO section 3.4).

    Metrics include their reward; baselines and scales do not.
    """

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Update the batch's loss mask."""
        mask = ~batch.get("truncated").unsqueeze(-1)
        return batch.set("loss_mask", batch.get("loss_mask") & mask)
