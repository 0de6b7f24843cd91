"""Where an iteration's batch comes from: rollouts of the policy, or demonstrations.

The rows of iteration i are a function of (seed, i): epochs are seeded permutations, an iteration is
the next slice, and rank r takes its part of it. Nothing else has to be stored to resume.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from envs.chat_env import ChatEnv
from envs.tasks.task import Task
from policies.chats.containers import Masks, Tokens
from policies.padding import pad, pad_mask, widen
from policies.random import fold
from policies.wrappers.transformers_wrapper import TransformersWrapper
from trainer.collect import collect
from trainer.runtime import Runtime
from trainer.shaping import idle_groups

Verb = Callable[[TensorDictBase], TensorDictBase]


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
    """Play the iteration's prompts with the current policy.

    The verbs of `shaping` (trainer/shaping.py, by name) work on what comes out, in order.
    """

    def __init__(
        self,
        *,
        task: Task,
        env: ChatEnv,
        policy: TransformersWrapper,
        runtime: Runtime,
        size: int,
        shaping: Mapping[str, Verb] | None = None,
    ) -> None:
        self.rows: Sequence[dict[str, Any]] = task.rows("train")
        self.env, self.policy, self.runtime, self.size = env, policy, runtime, size
        self.shaping = list((shaping or {}).values())

    def prompts(self, iteration: int, attempt: int = 0) -> TensorDict:
        """Return this rank's prompts of the iteration: row, group_id, stream [P / ranks].

        `attempt` counts how often they were drawn before; a place gets another row each time.
        """
        place, again = torch.arange(self.size), (-attempt,) if attempt else ()
        td = TensorDict(batch_size=[self.size])
        td.set("group_id", place)
        td.set("stream", fold(self.runtime.seed, iteration, place, *again))
        chosen = self._chosen(iteration, attempt)
        td.set("row", NonTensorStack(*[NonTensorData(self.rows[i]) for i in chosen]))
        return td[self.runtime.mine(self.size)]

    def _chosen(self, iteration: int, attempt: int) -> list[int]:
        """Return the row of each place; it comes back there only when every other one was."""
        size, seed = len(self.rows), self.runtime.seed
        had: list[list[int]] = [[] for _ in range(self.size)]
        for k in range(attempt + 1):
            order = int(fold(seed, k)) if k else seed
            chosen = picks(iteration, size=size, count=self.size, seed=order)
            for rows, row in zip(had, chosen, strict=True):
                while row in rows and len(rows) < size:
                    row = (row + 1) % size
                rows.append(row)
        return [rows[-1] for rows in had]

    def play(self, prompts: TensorDict) -> TensorDict:
        """Return the trajectories of all samples of `prompts`, [B, T]."""
        return collect(prompts, self.env, self.policy)

    def __call__(self, iteration: int) -> TensorDictBase:
        """Return this rank's trajectories of the iteration, [B, T]."""
        return self.shaped(self.play(self.prompts(iteration)))

    def shaped(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the batch after all verbs of `shaping`."""
        for verb in self.shaping:
            batch = verb(batch)
        return batch


class DynamicRollouts(Rollouts):
    """Draw prompts again whose replies all earn the same (DAPO, arXiv 2503.14476 section 3.2).

    `parts` are the arguments of `Rollouts`. A place of the iteration is drawn up to `rounds` times
    more, each time with another row: a function of (seed, iteration, round, place). What earns the
    same even then keeps its place and leaves the loss mask. Writes `draws` [B], how many groups
    were drawn for the place. The task's own reward decides; `shaping` comes after. All ranks play
    equally many rounds, until none has an idle place.
    """

    def __init__(self, *, rounds: int = 2, **parts: Any) -> None:
        super().__init__(**parts)
        if self.env.group_size < 2 or rounds < 1:
            raise ValueError(
                "dynamic sampling expects algorithm.group_size >= 2 and rounds >= 1, got "
                f"{self.env.group_size} and {rounds}; with one reply a prompt use trainer.Rollouts"
            )
        self.rounds = rounds

    def __call__(self, iteration: int) -> TensorDictBase:
        """Return this rank's trajectories of the iteration, [B, T]."""
        batch = self.play(self.prompts(iteration))
        idle = idle_groups(batch)  # [P]
        draws = torch.ones(len(idle))
        for attempt in range(1, self.rounds + 1):
            if not self.runtime.maxima({"idle": float(idle.any())})["idle"]:
                break
            # A model in shards generates only with all ranks, so who has no idle place plays one
            # too and keeps nothing of it.
            again = idle if idle.any() else torch.arange(len(idle)) == 0
            fresh = self.play(self.prompts(iteration, attempt)[again])
            if idle.any():
                batch = swap(batch, fresh, self._rows(idle))
                draws += idle
                idle = idle_groups(batch)
        kept = ~self._rows(idle).to(self.policy.device)
        batch.set("loss_mask", batch.get("loss_mask") & kept.unsqueeze(-1))
        batch.set("draws", self._rows(draws).to(self.policy.device))
        return self.shaped(batch)

    def _rows(self, of_groups: Tensor) -> Tensor:
        return of_groups.repeat_interleave(self.env.group_size)


def swap(batch: TensorDict, fresh: TensorDict, rows: Tensor) -> TensorDict:
    """Return the batch with `fresh` in the place of those rows where `rows` [B] is True."""
    size, width = len(rows), max(td.get("loss_mask").shape[-1] for td in (batch, fresh))

    def widened(td: TensorDict) -> TensorDict:
        return td.apply(lambda x: widen(x, width) if x.ndim == 2 else x)

    index = torch.arange(size)
    index[rows] = size + torch.arange(int(rows.sum()))
    return torch.cat([widened(batch), widened(fresh)])[index]


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
