"""TorchRL's wrapper of a Hugging Face causal language model."""

from torch import Tensor

from policies.sampler import Sampled
from policies.torchrl.generate_kwargs import follow
from policies.torchrl.wrapper import LLMWrapperBase
from policies.transformers_policy import TransformersPolicy


class TransformersWrapper(LLMWrapperBase, TransformersPolicy):
    """Generate with or score by a causal LM; see LLMWrapperBase for the arguments.

    `model` is a model, a Scorer around one, or a folder or name (then the weights are float32).

    >>> from tensordict import TensorDict
    >>> from policies import ChatHistory, History
    >>> policy = TransformersWrapper("tiny", generate_kwargs={"max_new_tokens": 3}, pad_output=True)
    >>> chat = ChatHistory(prompt=History.from_chats([[{"role": "user", "content": "Sort 3 1"}]]))
    >>> response = policy(TensorDict(history=chat, batch_size=[1]))
    >>> scored = policy.get_new_version(generate=False, inplace=False)(response)
    >>> gap = scored["log_probs"].response - response["log_probs"].response
    >>> bool(gap.abs().max() < 1e-4)
    True
    """

    def _sample(self, prompts: Tensor, attention: Tensor, streams: Tensor) -> Sampled:
        """Sample as a run does, or by transformers' `generate` for options that only it has."""
        if not self.limits.hf_only:
            return super()._sample(prompts, attention, streams)
        return follow(
            self.model,
            prompts,
            attention,
            self.limits.config(),
            max_new_tokens=self.max_new_tokens,
            ends=self.stop_ids,
            pad_token_id=self.pad_token_id,
            log_probs=self.return_log_probs,
            **self.limits.objects,
        )

    def _logits(self, tokens: Tensor, attention: Tensor) -> Tensor:
        return self.scorer.logits(tokens, attention, **self.scoring_options)
