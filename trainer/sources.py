"""Where an iteration's batch comes from: rollouts of the policy, or demonstrations.

The rows of iteration i are a function of (seed, i): epochs are seeded permutations, an iteration is
the next slice, and rank r takes its part of it. Nothing else has to be stored to resume.
"""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from envs.chat_env import ChatEnv
from envs.tasks.task import Task
from policies.chats.containers import Masks, Tokens
from policies.padding import pad, pad_mask
from policies.random import fold
from policies.wrappers.transformers_wrapper import TransformersWrapper
from trainer.collect import collect
from trainer.runtime import Runtime


def picks(iteration: int, *, size: int, count: int, seed: int) -> list[int]:
    """Return the indices of the rows of an iteration: `count` of `size`, epoch after epoch.

    >>> first, second = (picks(i, size=4, count=2, seed=0) for i in (0, 1))
    >>> sorted(first + second)
    [0, 1, 2, 3]
    """
    out: list[int] = []
    order, last = torch.empty(0), -1
    for place in range(iteration * count, (iteration + 1) * count):
        epoch, at = divmod(place, size)
        if epoch != last:
            generator = torch.Generator().manual_seed(int(fold(seed, epoch)) & (2**63 - 1))
            order, last = torch.randperm(size, generator=generator), epoch
        out.append(int(order[at]))
    return out


class Rollouts:
    """Play the iteration's prompts with the current policy."""

    def __init__(
        self,
        *,
        task: Task,
        env: ChatEnv,
        policy: TransformersWrapper,
        runtime: Runtime,
        size: int,
    ) -> None:
        self.rows: Sequence[dict[str, Any]] = task.rows("train")
        self.env, self.policy, self.runtime, self.size = env, policy, runtime, size

    def prompts(self, iteration: int) -> TensorDict:
        """Return this rank's prompts of the iteration: row, group_id, stream [P / ranks]."""
        seed = self.runtime.seed
        chosen = picks(iteration, size=len(self.rows), count=self.size, seed=seed)
        place = torch.arange(self.size)
        td = TensorDict(batch_size=[self.size])
        td.set("group_id", place)
        td.set("stream", fold(seed, iteration, place))
        td.set("row", NonTensorStack(*[NonTensorData(self.rows[i]) for i in chosen]))
        return td[self.runtime.mine(self.size)]

    def __call__(self, iteration: int) -> TensorDict:
        """Return this rank's trajectories of the iteration, [B, T]."""
        return collect(self.prompts(iteration), self.env, self.policy)


class Demonstrations:
    """Render the iteration's demonstrations; `mask` says which of their tokens are learnt.

    "assistant": every assistant turn; "prompt": only what follows the prompt, the last turn.
    """

    def __init__(
        self,
        *,
        task: Task,
        env: ChatEnv,
        policy: TransformersWrapper,
        runtime: Runtime,
        size: int,
        mask: str = "assistant",
    ) -> None:
        self.rows: Sequence[dict[str, Any]] = task.demonstrations()
        self.env, self.policy, self.runtime, self.size = env, policy, runtime, size
        self.prompt_masked = mask == "prompt"

    def __call__(self, iteration: int) -> TensorDict:
        """Return this rank's demonstrations of the iteration, [B, T]."""
        chosen = picks(iteration, size=len(self.rows), count=self.size, seed=self.runtime.seed)[
            self.runtime.mine(self.size)
        ]
        done = [self._render(self.rows[i]) for i in chosen]
        device, size = self.policy.device, len(done)
        out = TensorDict(batch_size=[size])
        full = pad([torch.tensor(ids) for ids, _, _ in done]).to(device)
        learnt = pad([torch.tensor(keep) for _, _, keep in done], False).to(device)
        out.set("tokens", Tokens(full=full, padded=True, batch_size=[size]))
        masks = Masks(
            all_attention_mask=pad_mask([len(ids) for ids, _, _ in done], device=device),
            all_assistant_mask=pad([torch.tensor(a) for _, a, _ in done], False).to(device),
            padded=True,
            batch_size=[size],
        )
        out.set("masks", masks)
        out.set("temperature", torch.ones(size, device=device))
        return out.set("loss_mask", learnt)

    def _render(self, row: dict[str, Any]) -> tuple[list[int], list[bool], list[bool]]:
        messages = self.env.messages(row)
        done = self.policy.renderer.render(messages, require_assistant=True)
        if not self.prompt_masked:
            return done.ids, done.assistant, done.assistant
        prompt = self.policy.renderer.render(messages[:-1], add_generation_prompt=True).ids
        learnt = [a and i >= len(prompt) for i, a in enumerate(done.assistant)]
        return done.ids, done.assistant, learnt
