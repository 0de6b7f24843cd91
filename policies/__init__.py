"""Chats, tokens and models: the bottom layer. It imports neither envs nor trainer.

Names load on first use (PEP 562), so that importing the package costs no torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "ChatHistory": "containers",
    "Critic": "value_head",
    "GPT2RewardModel": "reward_model",
    "History": "history",
    "LLMMaskedCategorical": "distributions",
    "LLMWrapperBase": "wrapper",
    "LogProbDistribution": "distributions",
    "LogProbs": "containers",
    "MaskedCategorical": "masked_categorical",
    "MaskedOneHotCategorical": "masked_categorical",
    "Masks": "containers",
    "OneHotCategorical": "masked_categorical",
    "Renderer": "chat_template",
    "ReparamGradientStrategy": "masked_categorical",
    "Scorer": "scorer",
    "Scores": "scorer",
    "Text": "containers",
    "Tokens": "containers",
    "TransformersWrapper": "transformers_wrapper",
    "ValueNetwork": "value_head",
    "_extract_responses_from_full_histories": "history",
    "add_chat_template": "templates",
    "load_policy": "load",
    "load_reference": "load",
    "load_reward_model": "reward_scorer",
    "remove_chat_template": "templates",
    "vLLMWrapper": "vllm_wrapper",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"policies has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"policies.{_HOME[name]}"), name)
