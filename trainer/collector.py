"""LLMCollector: play chats without end and hand them out turn by turn, as TorchRL users know it.

A row is one turn of one chat: the policy's outputs at the root, the environment's under "next".
Rows are ragged, so batches are lazy stacks: [B, T] for B chats side by side and T turns. A chat
that ends makes room for the next prompt. The trainer's own road is trainer/collect.py: whole chats,
one row each, dense; both prolong a chat by the same functions.
Left out on purpose: replay buffers, queues, environment pools, remote workers.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn

from envs.env import EnvBase, TransformedEnv
from policies.containers import Tokens
from policies.padding import rows
from policies.wrapper import LLMWrapperBase
from trainer.collect import carry, prolong, ready

Policy = Callable[[TensorDictBase], TensorDictBase]
ASSISTANT = ("masks", "all_assistant_mask")
REFUSED = {
    "async_envs": "environments run in this process, one batched call a turn",
    "replay_buffer": "batches are yielded; put them where you like, or pass postproc",
    "weight_updater": "the policy is in this process; call update_policy_weights_",
    "queue": "batches are yielded; put them on your queue",
}


class LLMCollector:
    """Iterate over what `policy` says in `env`.

    Default: `dialog_turns_per_batch` turns of the B chats that `env.reset` gives, [B, T] with
    B * T >= dialog_turns_per_batch, or [B * T] with `flatten_data`. `yield_completed_trajectories`:
    whole chats, one after the other in one dimension, at least `dialog_turns_per_batch` (default 1)
    turns; `yield_only_last_steps`: only the last turn of each. All turns that ran count towards
    `total_dialog_turns` (-1: no end). `reset_at_each_iter` gives up running chats between batches.

    `dataloader` gives `env.reset` its data: TensorDicts, rows (dicts with "messages"), texts, or
    lists of these. One that can be iterated again starts over; an iterator ends the collection, and
    a batch [B, T] that it cannot fill is dropped. Without it the environment has its own data.
    `postproc` maps each batch; None in return skips it. `track_policy_version` (True or a
    PolicyVersion) writes "policy_version", one more after each `update_policy_weights_`.
    ("collector", "traj_ids") numbers the chats. Rows hold the exact ids and no padding, also with a
    policy that has pad_output=True. Wrong combinations are TypeErrors and ValueErrors.
    """

    def __init__(
        self,
        env: EnvBase | Callable[[], EnvBase],
        *,
        policy: Policy | None = None,
        policy_factory: Callable[[], Policy] | None = None,
        dialog_turns_per_batch: int | None = None,
        yield_only_last_steps: bool | None = None,
        yield_completed_trajectories: bool | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase | None] | None = None,
        total_dialog_turns: int = -1,
        async_envs: bool | None = None,
        replay_buffer: Any = None,
        reset_at_each_iter: bool = False,
        flatten_data: bool | None = None,
        weight_updater: Any = None,
        queue: Any = None,
        track_policy_version: Any = False,
        verbose: bool = False,
        dataloader: Iterable[Any] | None = None,
    ) -> None:
        given = (async_envs, replay_buffer, weight_updater, queue)
        for (name, reason), value in zip(REFUSED.items(), given, strict=True):
            if value not in (None, False):
                raise ValueError(f"LLMCollector has no {name}: {reason}")
        if (policy is None) == (policy_factory is None):
            raise TypeError("expected exactly one of policy and policy_factory")
        only_last = bool(yield_only_last_steps)
        completed = only_last if yield_completed_trajectories is None else yield_completed_trajectories
        _check(only_last, completed, flatten_data, reset_at_each_iter)
        if dialog_turns_per_batch is None and completed:
            dialog_turns_per_batch = 1
        if dialog_turns_per_batch is None or dialog_turns_per_batch < 1:
            raise ValueError(
                f"expected dialog_turns_per_batch >= 1, got {dialog_turns_per_batch}; only "
                "yield_completed_trajectories=True has a default, one chat"
            )
        self.policy: Any = policy if policy_factory is None else policy_factory()
        self.env = env if isinstance(env, EnvBase) else env()
        # Before anything asks the environment for its specs: transforms may need the policy.
        for known in (self.env, self.policy):
            if hasattr(known, "register_collector"):
                known.register_collector(self)
        self.policy_version_tracker = _tracker(track_policy_version)
        if self.policy_version_tracker is not None:
            self.env = TransformedEnv(self.env, self.policy_version_tracker)
            self.env.register_collector(self)
        self._player = _player(self.policy)
        self.dialog_turns_per_batch, self.total_dialog_turns = dialog_turns_per_batch, total_dialog_turns
        self.yield_completed_trajectories, self.yield_only_last_steps = completed, only_last
        self.reset_at_each_iter, self.flatten_data = reset_at_each_iter, bool(flatten_data)
        self.postproc, self.verbose = postproc, verbose
        self._data = None if dataloader is None else _passes(dataloader)
        self._fresh: deque[TensorDictBase] = deque()  # first states that nobody plays yet
        self._chats: list[_Chat] | None = None  # the running ones, one a slot
        self._finished: deque[_Chat] = deque()
        self._state: list[str] = []  # the keys of a state: those of a reset
        self._started = self._groups = 0
        self._turns = 0  # handed out so far, dropped ones included
```
