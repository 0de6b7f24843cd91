"""PPOLoss: GRPOLoss with a critic, with the keys and outputs of TorchRL's ClipPPOLoss."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from policies.scorer import Scores
from policies.torchrl.wrapper import LLMWrapperBase
from trainer.metrics import explained_variance, return_sums
from trainer.objectives import PPOObjective, Terms
from trainer.torchrl.loss_inputs import check_choice, get_dense, masked_mean, per_token, require
from trainer.torchrl.loss_modules import NO_LEASH, GRPOKeys, GRPOLoss, LLMLossOutput

DISTANCES = {"l1": F.l1_loss, "l2": F.mse_loss, "smooth_l1": F.smooth_l1_loss}


class PPOLossOutput(LLMLossOutput):
    """Hold the output of PPOLoss; losses (loss_*) are to be summed and minimised."""

    loss_critic: Tensor | None = None
    explained_variance: Tensor | None = None
    value_clip_fraction: Tensor | None = None


@dataclass(frozen=True)
class PPOKeys(GRPOKeys):
    """Keys of PPOLoss's input."""

    value: NestedKey = "state_value"
    value_target: NestedKey = "value_target"


class PPOLoss(GRPOLoss):
    """Clipped surrogate with a critic's loss: critic_coeff * distance(V, value_target).

    `critic_network` (td -> td) writes "state_value", e.g. `policies.ValueNetwork`; `GAE` writes the
    target. `loss_critic_type`: l1, l2 (the square, not halved), smooth_l1. `clip_value` (True: the
    clip_epsilon) clips V around the stored "state_value", in units of reward. Other arguments are
    GRPOLoss's; without a critic_network it is GRPOLoss. Source: arXiv 1707.06347 eq. 9.
    """

    output_type = PPOLossOutput

    def __init__(
        self,
        actor_network: LLMWrapperBase,
        critic_network: Callable[[TensorDictBase], TensorDictBase] | None = None,
        *,
        critic_coeff: float = 1.0,
        loss_critic_type: str = "smooth_l1",
        clip_value: bool | float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(actor_network, **options)
        check_choice("loss_critic_type", loss_critic_type, DISTANCES)
        bounds = self.objective.bounds
        if clip_value is True and bounds.low != bounds.high:
            raise ValueError("clip_value=True takes one clip_epsilon, got two; give a number")
        self.critic_network, self.tensor_keys = critic_network, PPOKeys()
        if critic_network is not None:
            self.objective = PPOObjective(
                value_coeff=critic_coeff,
                value_clip=bounds.low if clip_value is True else clip_value or None,
                distance=partial(DISTANCES[loss_critic_type], reduction="none"),
                clip_low=bounds.low,
                clip_high=bounds.high,
                leash=NO_LEASH,
            )

    def _values(self, td: TensorDictBase, batch: TensorDict) -> Tensor | None:
        """Return the critic's values; write the old ones and their targets to the batch."""
        if self.critic_network is None:
            return None
        keys, mask = self.tensor_keys, batch["loss_mask"]
        old = get_dense(td, keys.value)
        if old is None and self.objective.value_clip is not None:
            raise KeyError(f"clip_value needs {keys.value} as it was at sampling, found none")
        value = per_token(require(self.critic_network(td.copy()), keys.value), mask, 0.0)
        batch["value"] = value.detach() if old is None else per_token(old, mask, 0.0)
        batch["returns"] = per_token(require(td, keys.value_target), mask, 0.0)
        return value

    def _more(self, terms: Terms, scores: Scores, batch: TensorDict) -> dict[str, Tensor]:
        """Return the critic's loss and its explained variance."""
        if scores.values is None:
            return {}
        mask, value = batch["loss_mask"], scores.values.detach()
        fit = explained_variance(return_sums(batch["returns"], value, mask))
        out = {
            "loss_critic": self._total(terms.loss["value"], batch),
            "explained_variance": value.new_tensor(fit),
        }
        if "value/clip_fraction" in terms.means:
            far = terms.means["value/clip_fraction"]
            out["value_clip_fraction"] = masked_mean(far, mask)
        return out
