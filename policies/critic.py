"""PPO's critic: the value of each token, from the hidden states of the policy or of a copy.

It is `Scorer.critic`, so values and log-probs come from one forward.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from policies.layout import Layout
from policies.scorer import Scorer, body_of


class Critic(nn.Module):
    """A linear layer on hidden states; its weights start at 0.

    kind="head" uses the hidden states of the policy; `detach` stops the critic's gradient there.
    kind="separate" uses the hidden states of a copy of the policy's body; the copy is trained too.
    `lr_scale`: factor of the learning rate; the first `warmup` iterations train only the critic.
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
        if kind == "separate" and detach:
            raise ValueError("a separate critic trains its body: expected detach=False, got True")
        body = body_of(scorer.model)
        self.body = None
        if kind == "separate":
            # The copy shares frozen weights (LoRA) with the policy.
            frozen = {id(p): p for p in body.parameters() if not p.requires_grad}
            self.body = Scorer(scorer.placement.copy(body, frozen), autocast=scorer.autocast)
        self.detach, self.lr_scale, self.warmup = detach, lr_scale, warmup
        weight = next(body.parameters())
        dtype = weight.dtype if weight.dtype.itemsize >= 4 else torch.float32
        width = scorer.model.config.get_text_config().hidden_size
        self.head = nn.Linear(width, 1, device=weight.device, dtype=dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, layout: Layout, states: Tensor | None) -> Tensor:
        """Return the values [K] of the kept tokens; states [K, H]: the policy's."""
        if self.body is not None:
            states = self.body.hidden(layout)
        assert states is not None
        states = states.detach() if self.detach else states
        return self.head(states.to(self.head.weight.dtype)).squeeze(-1).float()
