"""Chats, tokens and models: the bottom layer. It imports neither envs nor trainer.

Names load on first use (PEP 562), so that importing the package does not import torch.
"""

from typing import TYPE_CHECKING

from policies.lazy import lazy

if TYPE_CHECKING:
    from policies.chats.containers import ChatHistory as ChatHistory
    from policies.chats.containers import LogProbs as LogProbs
    from policies.chats.containers import Masks as Masks
    from policies.chats.containers import Text as Text
    from policies.chats.containers import Tokens as Tokens
    from policies.chats.history import History as History
    from policies.chats.renderer import Renderer as Renderer
    from policies.chats.templates import add_chat_template as add_chat_template
    from policies.critic import Critic as Critic
    from policies.engines.vllm_policy import VLLMPolicy as VLLMPolicy
    from policies.engines.vllm_policy import make_vllm_generator as make_vllm_generator
    from policies.load import load_policy as load_policy
    from policies.load import load_reference as load_reference
    from policies.models.reward_model import GPT2RewardModel as GPT2RewardModel
    from policies.models.reward_model import load_reward_model as load_reward_model
    from policies.scorer import Scorer as Scorer
    from policies.scorer import Scores as Scores
    from policies.torchrl.conversions import (
        _extract_responses_from_full_histories as _extract_responses_from_full_histories,
    )
    from policies.torchrl.masked import MaskedCategorical as MaskedCategorical
    from policies.torchrl.masked import MaskedOneHotCategorical as MaskedOneHotCategorical
    from policies.torchrl.masked import OneHotCategorical as OneHotCategorical
    from policies.torchrl.masked import ReparamGradientStrategy as ReparamGradientStrategy
    from policies.torchrl.sequences import LLMMaskedCategorical as LLMMaskedCategorical
    from policies.torchrl.sequences import LogProbDistribution as LogProbDistribution
    from policies.torchrl.transformers_wrapper import TransformersWrapper as TransformersWrapper
    from policies.torchrl.value_network import ValueNetwork as ValueNetwork
    from policies.torchrl.vllm_wrapper import vLLMWrapper as vLLMWrapper
    from policies.torchrl.wrapper import LLMWrapperBase as LLMWrapperBase
    from policies.transformers_policy import TransformersPolicy as TransformersPolicy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
