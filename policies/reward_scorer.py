"""A reward model where the trainer expects a scorer, and the policy-like object that carries it."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from policies.load import load_policy
from policies.reward_model import GPT2RewardModel
from policies.scorer import Scorer
from policies.transformers_wrapper import TransformersWrapper


@dataclass(frozen=True)
class Rewards:
    """The reward of each token, [B, T]; padding has one too."""

    rewards: Tensor


class RewardScorer(Scorer):
    """Score sequences with a reward model; what only log-probs need is ignored."""

    def forward(self, tokens: Tensor, attention_mask: Tensor, *_: Any, **__: Any) -> Rewards:
        """Return the rewards of tokens [B, T]; no rows give none, tied to every parameter."""
        if not len(tokens):
            anchor = sum(p.flatten()[0].float() * 0 for p in self.parameters())
            return Rewards(tokens.float() + anchor)
        with self.precision():
            return Rewards(self.model(tokens, attention_mask)[0])


def load_reward_model(model: str, **options: Any) -> TransformersWrapper:
    """Return what a trainer calls its policy, with a reward model on the body of `model` inside.

    Arguments are those of `load_policy`. Its tokenizer and template render chats; it cannot
    generate.
    """
    policy = load_policy(model, **options)
    policy.scorer = RewardScorer(GPT2RewardModel(policy.model), autocast=policy.scorer.autocast)
    return policy
