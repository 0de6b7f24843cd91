"""The policy on a Hugging Face causal language model, with leash's sampler and scorer."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from policies.chat_policy import ChatPolicy
from policies.decoding import rows_that_fit
from policies.sampler import Sampled, sample
from policies.scorer import Scorer


class TransformersPolicy(ChatPolicy):
    """Generate with or score by a causal LM, a model or a Scorer around one; see ChatPolicy.

    >>> from tensordict import TensorDict
    >>> from policies import ChatHistory, History, load_policy
    >>> policy = load_policy("tiny", max_new_tokens=3)
    >>> chat = ChatHistory(prompt=History.from_chats([[{"role": "user", "content": "Sort 3 1"}]]))
    >>> response = policy(TensorDict(history=chat, batch_size=[1]))
    >>> scores = policy.get_new_version(generate=False).score(response)
    >>> gap = scores[:, -3:] - response["log_probs"].response
    >>> bool(gap.abs().max() < 1e-4)
    True
    """

    def _set_model(self, model: Any) -> None:
        self.scorer = model if isinstance(model, Scorer) else Scorer(model)

    @property
    def model(self) -> nn.Module:
        """Return the language model."""
        return self.scorer.model

    @property
    def device(self) -> torch.device:
        """Return the device of forwards: the device of the weights unless they are sharded."""
        return self.scorer.device

    def sampling(self) -> AbstractContextManager[None]:
        """Return the context of a rollout, in which each rank holds all weights."""
        return self.scorer.placement.gather()

    @torch.no_grad()
    def _draw(self, prompts: Tensor, attention: Tensor, streams: Tensor) -> Sampled:
        training = self.scorer.training
        self.scorer.eval()
        with self.scorer.precision():
            sampled = self._sample(prompts, attention, streams)
        self.scorer.train(training)
        return sampled

    def _sample(self, prompts: Tensor, attention: Tensor, streams: Tensor) -> Sampled:
        """Sample policy.max_rows responses at a time; by default all, on a GPU as many as fit."""
        longest, total = prompts.shape[1] + self.max_new_tokens, len(prompts)
        size = self.limits.max_rows or rows_that_fit(self.model, longest, prompts.device) or total
        parts = [
            sample(
                self.model,
                prompts[first : first + size],
                attention[first : first + size],
                streams=streams[first : first + size],
                stop=self.stop,
                max_new_tokens=self.max_new_tokens,
                temperature=self.temperature,
                filters=self.limits.filters,
            )
            for first in range(0, total, size)
        ]
        return parts[0] if len(parts) == 1 else Sampled.of_parts(parts)
