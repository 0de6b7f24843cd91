"""Demonstrations, the batches of SFT, and their log-probs by the policy as it started."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from envs.chat_env import ChatEnv
from envs.tasks.task import Task
from policies.chats.containers import Masks, Tokens
from policies.load import load_reference
from policies.padding import pad, pad_mask
from policies.roles import Policy
from policies.scorer import score_in_parts
from trainer.runtime import Runtime
from trainer.sources import picks


class Demonstrations:
    """Render the iteration's demonstrations; `mask` says which of their tokens are learnt.

    "assistant": every assistant turn; "prompt": only what follows the prompt, the last turn.
    """

    def __init__(
        self,
        *,
        task: Task,
        env: ChatEnv,
        policy: Policy,
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
        batch = TensorDict(batch_size=[size])
        full = pad([torch.tensor(ids) for ids, _, _ in done]).to(device)
        learnt = pad([torch.tensor(keep) for _, _, keep in done], False).to(device)
        batch.set("tokens", Tokens(full=full, padded=True, batch_size=[size]))
        masks = Masks(
            all_attention_mask=pad_mask([len(ids) for ids, _, _ in done], device=device),
            all_assistant_mask=pad([torch.tensor(a) for _, a, _ in done], False).to(device),
            padded=True,
            batch_size=[size],
        )
        batch.set("masks", masks)
        batch.set("temperature", torch.ones(size, device=device))
        return batch.set("loss_mask", learnt)

    def _render(self, row: dict[str, Any]) -> tuple[list[int], list[bool], list[bool]]:
        messages = self.env.messages(row)
        done = self.policy.renderer.render(messages, require_assistant=True)
        if not self.prompt_masked:
            return done.ids, done.assistant, done.assistant
        prompt = self.policy.renderer.render(messages[:-1], add_generation_prompt=True).ids
        learnt = [a and i >= len(prompt) for i, a in enumerate(done.assistant)]
        return done.ids, done.assistant, learnt


class ReferenceLogProbs:
    """Score demonstrations with the policy as it started, for objectives that stay near it.

    Writes ref_log_probs.full [B, T] at the learnt tokens.
    """

    def __init__(self, *, policy: Policy, micro_batch_tokens: int | None = None) -> None:
        self.scorer, self.limit = load_reference(policy).scorer, micro_batch_tokens

    @torch.no_grad()
    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Add the log-probs to the batch."""
        ref = score_in_parts(
            self.scorer,
            batch.get(("tokens", "full")),
            batch.get(("masks", "all_attention_mask")),
            batch.get("loss_mask"),
            limit=self.limit,
            temperature=batch.get("temperature"),
        )
        return batch.set(("ref_log_probs", "full"), ref)
