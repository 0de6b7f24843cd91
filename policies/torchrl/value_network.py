"""The critic as a module of TorchRL: a TensorDict in, its values out."""

from typing import Any

from tensordict import TensorDictBase
from torch import nn

from policies.critic import Critic
from policies.scorer import Scorer


class ValueNetwork(nn.Module):
    """Write "state_value" [B, T]: the critic's value before each token.

    `critic`: arguments of a new `Critic`, if the policy has none. Reads tokens.full,
    masks.all_attention_mask and "loss_mask", the tokens with a value (default: all).

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from policies.load import load_policy
    >>> td = TensorDict({("tokens", "full"): torch.tensor([[5, 6, 7]])}, [1])
    >>> td["masks", "all_attention_mask"] = torch.ones(1, 3, dtype=torch.bool)
    >>> ValueNetwork(load_policy("tiny"), kind="separate")(td)["state_value"].tolist()
    [[0.0, 0.0, 0.0]]
    """

    def __init__(self, policy: Any, **critic: Any) -> None:
        super().__init__()
        self.scorer: Scorer = policy.scorer
        if self.scorer.critic is None:
            self.scorer.critic = Critic(self.scorer, **critic)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the tensordict with its values."""
        attention = tensordict.get(("masks", "all_attention_mask"))
        keep = tensordict.get("loss_mask", attention)
        ids, group = tensordict.get(("tokens", "full")), tensordict.get("group_id", None)
        value = self.scorer.values(ids, attention, keep, group_id=group)
        return tensordict.set("state_value", value)
