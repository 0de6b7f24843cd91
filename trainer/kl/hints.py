"""Prompts with a hint, for a reference that knows more than the policy (self-distillation)."""

from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from policies.padding import pad, pad_mask, unpad
from policies.scorer import max_positions
from trainer.batch import RESPONSE
from trainer.kl.cells import hinted


class Hint:
    """Give each row of a batch the prompt that ends with a hint, and the same response.

    `text` is a template over the cells of the prompt's row, "The answer is {answer}.". It is added
    at the end of the last user message. `env` is the run's environment. Chats must have one turn,
    because everything after the prompt is taken as the response.
    """

    def __init__(self, text: str, *, env: Any, policy: Any) -> None:
        self.text, self.env, self.policy = text, env, policy

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        """Return tokens, masks, temperature and group_id of the rows with a hint, [B, T]."""
        sampled = batch.get(RESPONSE)  # [B, T]
        prompts = self._prompts(batch)
        responses = unpad(batch.get(("tokens", "full")), sampled)
        rows = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
        ids = pad(rows)  # [B, t]
        limit = max_positions(self.policy.scorer.model)
        if limit is not None and ids.shape[1] > limit:
            text = f"a chat with the hint has {ids.shape[1]} tokens, the model takes {limit}"
            raise ValueError(f"{text}; shorten the hint or lower policy.max_prompt_tokens")
        attention = pad_mask([*map(len, rows)], device=ids.device)  # [B, t]
        first = torch.tensor([*map(len, prompts)], device=ids.device).unsqueeze(-1)  # [B, 1]
        response = attention & (torch.arange(ids.shape[1], device=ids.device) >= first)  # [B, t]
        masks = {"all_attention_mask": attention, "all_response_mask": response}
        out = TensorDict({"tokens": {"full": ids}, "masks": masks}, [len(ids)])
        return out.update(batch.select("temperature", "group_id"))

    def _prompts(self, batch: TensorDictBase) -> list[Tensor]:
        """Return the ids of each row's prompt; the rows of a group share one."""
        groups = batch.get("group_id").tolist()
        rows = dict(zip(groups, batch.get("row").tolist(), strict=True))
        with_hint = [NonTensorData(hinted(row, self.text)) for row in rows.values()]
        td = TensorDict({"row": NonTensorStack(*with_hint)}, [len(with_hint)])
        td = self.env.with_group_size(1).reset(td)
        prompts = self.policy.prompt_ids(td)
        ids = unpad(prompts.tokens, prompts.attention)
        by_group = dict(zip(rows, ids, strict=True))
        return [by_group[group] for group in groups]
