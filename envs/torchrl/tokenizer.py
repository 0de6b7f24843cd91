"""Keep token ids in step with the history, so that sampled text is never tokenised again."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from envs.chat_env import read_history
from envs.torchrl.chat_io import full_ids, next_ids, write_ids
from envs.torchrl.hooks import SpecHooks
from policies.chats.renderer import Renderer
from policies.padding import rows
from policies.torchrl.specs import Composite, Unbounded


class IncrementalTokenizer(SpecHooks):
    """Write `tokens.prompt` [B] for `history.prompt`, one unpadded row each.

    After a step it keeps the sampled `tokens.full` unchanged and adds the end of turn, the new
    messages and the generation prompt. At reset, without such ids, after an edited turn and with
    `add_generation_prompt=False` it renders the full history.
    Transforms appended later run before it.
    """

    stays_last = True

    def __init__(
        self,
        tokenizer: Any,
        *,
        history_key: tuple[str, ...] = ("history", "prompt"),
        tokens_key: tuple[str, ...] = ("tokens", "prompt"),
        chat_template_name: str | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> None:
        super().__init__([history_key], [tokens_key])
        self.history_key, self.tokens_key = history_key, tokens_key
        self.tokenizer, self.add_generation_prompt = tokenizer, add_generation_prompt
        self.renderer = Renderer(tokenizer, chat_template or chat_template_name)

    def _reset(self, tensordict: TensorDictBase | None, td_reset: TensorDictBase) -> TensorDictBase:
        chats = read_history(td_reset, self.history_key).chats()
        write_ids(td_reset, self.tokens_key, [self._fresh(chat) for chat in chats])
        return td_reset

    def _step(self, tensordict: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        after = read_history(next_td, self.history_key).chats()
        owner = self.tokens_key[:-1]
        if not self.add_generation_prompt or rows(tensordict, (*owner, "full")) is None:
            return self._reset(None, next_td)
        before = read_history(tensordict, (*self.history_key[:-1], "full")).chats()
        triples = zip(full_ids(tensordict, owner), before, after, strict=True)
        ids = [next_ids(self.renderer, *triple) for triple in triples]
        write_ids(next_td, self.tokens_key, ids)
        return next_td

    def _fresh(self, chat: list[dict[str, Any]]) -> Tensor:
        done = self.renderer.render(chat, add_generation_prompt=self.add_generation_prompt)
        return torch.tensor(done.ids)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the ids, [B, T]."""
        shape = (*observation_spec.shape, -1)
        observation_spec[self.tokens_key] = Unbounded(shape, dtype=torch.int64)
        return observation_spec
