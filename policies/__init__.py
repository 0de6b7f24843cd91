"""Chats, tokens and models: the bottom layer. It imports neither envs nor trainer.

Names load on first use (PEP 562), so that importing the package costs no torch.
"""

from policies.lazy import loader

_HOME = {
    "ChatHistory": ".chats.containers",
    "Critic": ".value_head",
    "GPT2RewardModel": ".reward_model",
    "History": ".chats.history",
    "LLMMaskedCategorical": ".distributions.sequences",
    "LLMWrapperBase": ".wrappers.wrapper",
    "LogProbDistribution": ".distributions.sequences",
    "LogProbs": ".chats.containers",
    "MaskedCategorical": ".distributions.masked_categorical",
    "MaskedOneHotCategorical": ".distributions.masked_categorical",
    "Masks": ".chats.containers",
    "OneHotCategorical": ".distributions.masked_categorical",
    "Renderer": ".chats.chat_template",
    "ReparamGradientStrategy": ".distributions.masked_categorical",
    "Scorer": ".scorer",
    "Scores": ".scorer",
    "Text": ".chats.containers",
    "Tokens": ".chats.containers",
    "TransformersWrapper": ".wrappers.transformers_wrapper",
    "ValueNetwork": ".value_head",
    "_extract_responses_from_full_histories": ".chats.conversions",
    "add_chat_template": ".chats.known_templates",
    "load_policy": ".load",
    "load_reference": ".load",
    "load_reward_model": ".reward_scorer",
    "remove_chat_template": ".chats.known_templates",
    "vLLMWrapper": ".wrappers.vllm_wrapper",
}
__all__ = sorted(_HOME)
__getattr__ = loader(__name__, _HOME)
