"""The critic of PPO: what a policy may still expect before each token.

value[t] = V(tokens < t) is read off hidden state t-1, the one that predicts token t. K kept tokens,
H hidden.
"""

from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from policies.layout import Layout
from policies.scorer import Scorer


class Critic(nn.Module):
    """A linear layer on hidden states; it starts at 0.

    kind="head": on those of the policy, in the same forward; `detach` keeps its gradient out of
    them. kind="separate": on those of a copy of the policy's body, which is trained too.
    `lr_scale` multiplies its learning rate; for the first `warmup` iterations it trains alone.
    """

    def __init__(
        self,
        scorer: Scorer,
        *,
        kind: Literal["head", "separate"] = "head",
        detach: bool = False,
        lr_scale: float = 1.0,
        warmup: int = 0,
    ) -> None:
        super().__init__()
        if kind not in ("head", "separate"):
            raise ValueError(f"expected a critic of kind head or separate, got {kind!r}")
        if kind == "separate" and detach:
            raise ValueError("a separate critic has a body to train: expected detach=False")
        body: Any = scorer.model.base_model
        self.body = None
        if kind == "separate":
            # Weights that LoRA has frozen are not trained here either: no second copy of them.
            frozen = {id(p): p for p in body.parameters() if not p.requires_grad}
            self.body = Scorer(scorer.placement.copy(body, frozen), autocast=scorer.autocast)
        self.detach, self.lr_scale, self.warmup = detach, lr_scale, warmup
        weight = next(body.parameters())
        dtype = weight.dtype if weight.dtype.itemsize >= 4 else torch.float32
        width = scorer.model.config.get_text_config().hidden_size
        self.head = nn.Linear(width, 1, device=weight.device, dtype=dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, lay: Layout, states: Tensor | None) -> Tensor:
        """Return the values [K] of the kept tokens; states [K, H] are the policy's."""
        if self.body is not None:
            states = self.body.hidden(lay)
        assert states is not None
        states = states.detach() if self.detach else states
        return self.head(states.to(self.head.weight.dtype)).squeeze(-1).float()


class ValueNetwork(nn.Module):
    """Write "state_value" [B, T], what a policy's critic expects before each token.

    `critic`: arguments of `Critic`, for a policy that has none yet. It reads tokens.full and
    masks.all_attention_mask, and of the tokens those in "loss_mask" (default: every one).

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
