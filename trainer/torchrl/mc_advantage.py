"""MCAdvantage: advantages of finished chats, queued until their group is complete.

Trajectories are [T] (the turns of one chat, or of several concatenated chats) or [B, T]; rows may
be ragged. Usable as `postproc` of LLMCollector. The queue belongs to this process.
"""

from itertools import islice
from typing import Any, Literal

import torch
from tensordict import NestedKey, NonTensorData, TensorDictBase, lazy_stack
from torch import Tensor

from envs.transforms.transform import Transform
from trainer.baselines import standardise

TORCHRL_STD_FLOOR = 1e-6
REDUCE = {"sum": Tensor.sum, "max": Tensor.max, "mean": Tensor.mean}


class MCAdvantage(Transform):
    """Write the advantage of each trajectory within its prompt's group, in the reward's shape.

    Trajectories are queued until a prompt has `grpo_size` >= 2 of them; then their rows [N] are
    returned, before that None. `prompt_key` holds a text or a tensor that a prompt's samples share.
    Default: the rewards of all turns (or tokens) of the group are standardised together, so long
    chats weigh more. With `trajectory_return` the return of each chat (sum, max or mean of its
    rewards) is standardised and written to all its turns. Unbiased std; `keep_return_bounds`
    (low, high) drops groups whose mean return is not strictly between them (DAPO's dynamic
    sampling, arXiv 2503.14476). Raise RuntimeError for a trajectory that is not done.

    >>> from tensordict import TensorDict
    >>> def chat(reward):
    ...     done, group = torch.tensor([[False], [True]]), torch.tensor([7, 7])
    ...     next = TensorDict(reward=torch.tensor([[0.0], [reward]]), done=done, batch_size=[2])
    ...     return TensorDict(group_id=group, next=next, batch_size=[2])
    >>> advantage = MCAdvantage(2, prompt_key="group_id", trajectory_return="sum")
    >>> advantage(chat(0.0)) is None
    True
    >>> [round(a, 4) for a in advantage(chat(1.0))["advantage"].flatten().tolist()]
    [-0.7071, -0.7071, 0.7071, 0.7071]
    """

    def __init__(
        self,
        grpo_size: int,
        prompt_key: NestedKey = "query",
        rewards_key: NestedKey = ("next", "reward"),
        advantage_key: NestedKey = "advantage",
        done_key: NestedKey = ("next", "done"),
        *,
        trajectory_return: Literal["sum", "max", "mean"] | None = None,
        keep_return_bounds: tuple[float, float] | None = None,
    ) -> None:
        if grpo_size < 2:
            raise ValueError(f"a group baseline needs grpo_size >= 2, got {grpo_size}")
        super().__init__([prompt_key, rewards_key, done_key], [advantage_key])
        self.grpo_size, self.advantage_key = grpo_size, advantage_key
        self.prompt_key, self.rewards_key, self.done_key = prompt_key, rewards_key, done_key
        self.trajectory_return, self.keep_return_bounds = trajectory_return, keep_return_bounds
        self.queues: dict[Any, list[list[TensorDictBase]]] = {}

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase | None:  # type: ignore[override]
        """Queue trajectories; return the rows of completed groups, or None."""
        out: list[TensorDictBase] = []
        for rows in self._trajectories(tensordict.copy()):
            queue = self.queues.setdefault(prompt := self._prompt(rows[0]), [])
            queue.append(rows)
            if len(queue) == self.grpo_size:
                del self.queues[prompt]
                out += self._group(queue)
        return lazy_stack(out) if out else None

    _inv_call = forward  # TorchRL's replay buffers and collectors call inv

    def _trajectories(self, td: TensorDictBase) -> list[list[TensorDictBase]]:
        """Return the rows of each trajectory of a batch of any number of dimensions."""
        if td.ndim > 1:
            return [rows for chat in td.unbind(0) for rows in self._trajectories(chat)]
        out, rows = [], []
        for row in td.unbind(0):
            rows.append(row)
            if row.get(self.done_key).any():
                out.append(rows)
                rows = []
        if rows:
            raise RuntimeError(f"Expected the trajectory to be done, got {len(rows)} more turns")
        return out

    def _prompt(self, row: TensorDictBase) -> Any:
        value = row.get(self.prompt_key)
        value = value.data if isinstance(value, NonTensorData) else value
        if isinstance(value, Tensor):
            return tuple(value.flatten().tolist())
        if not isinstance(value, str):
            raise TypeError(f"prompt_key: expected a text or a tensor, got {type(value).__name__}")
        return value

    def _group(self, trajectories: list[list[TensorDictBase]]) -> list[TensorDictBase]:
        """Return the rows of a full group with advantages, [] for one outside the bounds."""
        rows = [row for chat in trajectories for row in chat]
        rewards = [row.get(self.rewards_key).float() for row in rows]
        flat = torch.cat([reward.flatten() for reward in rewards])
        sizes = [reward.numel() for reward in rewards]
        if self.trajectory_return is None:
            scores = standardise(flat, floor=TORCHRL_STD_FLOOR)
        else:
            numbers = iter(sizes)
            lengths = [sum(islice(numbers, len(chat))) for chat in trajectories]
            reduce = REDUCE[self.trajectory_return]
            returns = torch.stack([reduce(chat) for chat in flat.split(lengths)])
            low, high = self.keep_return_bounds or (-torch.inf, torch.inf)
            if not low < float(returns.mean()) < high:
                return []
            each = standardise(returns, floor=TORCHRL_STD_FLOOR)
            scores = each.repeat_interleave(torch.tensor(lengths, device=each.device))
        for row, reward, score in zip(rows, rewards, scores.split(sizes), strict=True):
            row.set(self.advantage_key, score.reshape(reward.shape).clone())
        return rows
