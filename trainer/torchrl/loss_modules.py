"""GRPOLoss, DAPO and CISPOLoss: the trainer's objective with TorchRL's keys and outputs.

For custom training loops. A loss builds the trainer's batch from its keys, calls the objective and
converts the output. Averages are over the mask, without masked tokens and padding. Values may be
[B, T], [B, T, 1], one per row, or ragged rows.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorClass, TensorDict, TensorDictBase
from torch import Tensor

from policies.padding import predicted
from policies.scorer import Scores
from policies.torchrl.wrapper import LLMWrapperBase
from trainer.batch import RESPONSE
from trainer.kl.controllers import ConstantKLController
from trainer.kl.estimators import k3
from trainer.kl.leash import Leash
from trainer.losses import half_square, token_weights
from trainer.objectives import GRPOObjective, Terms
from trainer.torchrl.loss_inputs import (
    REDUCTIONS,
    LossModule,
    check_choice,
    get_dense,
    masked_mean,
    per_token,
    require,
)

DISTS = {"sft": "_get_sft_dist", "rlhf": "_get_rlhf_dist", "generic": "_get_generic_dist"}
AGGREGATIONS = ("token_mean", "prompt_mean", "sequence_mean", "constant", "none")
NO_LEASH = Leash(ConstantKLController(kl_coef=0.0))  # these losses have separate KL keys
TINY = torch.finfo(torch.float32).tiny


class LLMLossOutput(TensorClass["nocast"]):  # pyright: ignore[reportInvalidTypeArguments]
    """Hold the losses (loss_*), to be summed and minimised, and masked means without a gradient.

    Losses that are off are None. `output.sum(reduce=True).backward()` descends all losses.
    """

    loss_objective: Tensor
    clip_fraction: Tensor
    kl_approx: Tensor
    ESS: Tensor
    entropy: Tensor | None = None
    loss_entropy: Tensor | None = None
    loss_kl_to_ref: Tensor | None = None
    kl_to_ref: Tensor | None = None
    loss_kl_to_inference: Tensor | None = None
    kl_to_inference: Tensor | None = None


@dataclass(frozen=True)
class GRPOKeys:
    """Keys of GRPOLoss's input."""

    advantage: NestedKey = "advantage"
    action: NestedKey = ("tokens", "full")
    sample_log_prob: NestedKey = ("log_probs", "full")
    ref_log_probs: NestedKey = ("next", "ref_log_probs", "full")


class GRPOLoss(LossModule):
    """Clipped surrogate with optional entropy bonus and k3 KL to the reference and the generator.

    `masking_strategy` picks the tokens: sft (after the prompt), rlhf (assistant), both only where
    masks.all_response_mask (if any) marks them as sampled; generic (all). "loss_mask" (if any) and,
    with `kl_mask_threshold`, the condition (curr - gen)^2 / 2 <= it narrow the mask further.
    `aggregation`: token_mean, prompt_mean (= sequence_mean), constant (divides by `max_tokens`),
    none ([B, T]); `reduction="sum"` replaces the last mean by a sum, "none" is aggregation none.
    kl_to_ref_coeff=0 only measures the KL. Source: arXiv 2402.03300 eq. 3; two bounds of
    `clip_epsilon` (low, high): arXiv 2503.14476 eq. 8. Keep the model in eval mode.
    """

    output_type = LLMLossOutput
    surrogate = "clip"

    def __init__(
        self,
        actor_network: LLMWrapperBase,
        *,
        clip_epsilon: float | tuple[float, float] = 0.2,
        kl_mask_threshold: float | None = None,
        aggregation: str | None = "token_mean",
        entropy_bonus: bool = True,
        entropy_coeff: float = 0.01,
        reduction: str | None = None,
        kl_to_ref_coeff: float | None = None,
        kl_to_inference_coeff: float | None = None,
        masking_strategy: Literal["sft", "rlhf", "generic"] = "sft",
        max_tokens: int | None = None,
    ) -> None:
        super().__init__()
        low, high = clip_epsilon if isinstance(clip_epsilon, tuple) else (clip_epsilon,) * 2
        if not 0 <= low < 1 or high < 0:
            raise ValueError(f"expected clip_epsilon 0 <= low < 1 and high >= 0, got {low, high}")
        aggregation, reduction = aggregation or "token_mean", reduction or "mean"
        check_choice("masking_strategy", masking_strategy, DISTS)
        check_choice("aggregation", aggregation, AGGREGATIONS)
        check_choice("reduction", reduction, REDUCTIONS)
        if aggregation == "constant" and not max_tokens:
            raise ValueError(f"aggregation='constant' needs max_tokens of a row, got {max_tokens}")
        self.actor_network, self.tensor_keys = actor_network, GRPOKeys()
        bounds = {"clip_low": low, "clip_high": high}
        self.objective = GRPOObjective(**bounds, surrogate=self.surrogate, leash=NO_LEASH)
        self.aggregation = "none" if reduction == "none" else aggregation
        self.reduction, self.max_tokens = reduction, max_tokens
        self.kl_mask_threshold = kl_mask_threshold
        self.entropy_coeff = entropy_coeff if entropy_bonus else None
        self.kl_to_ref_coeff, self.kl_to_inference_coeff = kl_to_ref_coeff, kl_to_inference_coeff
        self.masking_strategy = masking_strategy

    def forward(self, tensordict: TensorDictBase) -> LLMLossOutput:
        """Return the losses and their statistics; the td is unchanged."""
        td = tensordict.reshape(-1) if tensordict.ndim > 1 else tensordict.copy()
        keys, limits = self.tensor_keys, getattr(self.actor_network, "limits", None)
        if limits is not None and (narrowing := limits.unscored()):
            raise ValueError(f"expected an actor without filters of its samples, got {narrowing}")
        dist = getattr(self.actor_network, DISTS[self.masking_strategy])(td)
        tokens = require(td, keys.action)  # the actor writes the tokens of a history
        mask = self._mask(td, dist.mask)
        curr = dist.log_prob(tokens.masked_fill(~dist.mask, dist.ignore_index))
        gen = per_token(require(td, keys.sample_log_prob), mask, 0.0)
        if gen.requires_grad:
            raise RuntimeError("expected the generation log-probs without a gradient; detach them")
        batch = TensorDict({"log_probs": {"full": gen}}, batch_size=[len(gen)])
        batch["advantage"] = per_token(require(td, keys.advantage), mask, 0.0).detach()
        rows = mask.any(-1).sum()  # a divisor independent of kl_mask_threshold
        if self.kl_mask_threshold is not None:
            mask = mask & (half_square(curr.detach(), gen) <= self.kl_mask_threshold)
        batch["loss_mask"], batch["weight"] = mask, self._weights(mask, rows)
        entropy = dist.entropy() if self.entropy_coeff is not None else None
        scores = Scores(curr, entropy, values=self._values(td, batch))
        terms = self.objective(scores, batch)
        ratio = terms.maxima["policy/ratio_max"][mask]
        out = {
            "loss_objective": self._total(terms.loss["policy"], batch),
            "clip_fraction": masked_mean(terms.means["policy/clip_fraction"], mask),
            "kl_approx": masked_mean(terms.means["kl/behaviour"], mask),
            "ESS": ratio.sum() ** 2 / (ratio**2).sum().clamp(min=TINY) / max(len(ratio), 1),
        }
        if entropy is not None:
            out["entropy"] = masked_mean(terms.means["policy/entropy"].detach(), mask)
            out["loss_entropy"] = -(self.entropy_coeff or 0.0) * self._total(entropy, batch)
        leashes = (
            ("ref", self.kl_to_ref_coeff, keys.ref_log_probs),
            ("inference", self.kl_to_inference_coeff, keys.sample_log_prob),
        )
        for name, coeff, key in leashes:
            if coeff is not None:
                kl = k3(curr - per_token(require(td, key), mask, 0.0).detach())
                out[f"kl_to_{name}"] = masked_mean(kl.detach(), mask)
                out[f"loss_kl_to_{name}"] = coeff * self._total(kl, batch)
        return self.output_type(**out, **self._more(terms, scores, batch), batch_size=[])

    def _values(self, td: TensorDictBase, batch: TensorDict) -> Tensor | None:
        """Return the values of a subclass's critic and write their targets, or return None."""
        return None

    def _more(self, terms: Terms, scores: Scores, batch: TensorDict) -> dict[str, Tensor]:
        """Return additional outputs of a subclass."""
        return {}

    def _mask(self, td: TensorDictBase, mask: Tensor) -> Tensor:
        """Return the strategy's mask, narrowed to sampled tokens and the loss mask."""
        keys: tuple[NestedKey, ...] = ("loss_mask", RESPONSE)
        if self.masking_strategy == "generic":
            keys, mask = keys[:1], predicted(mask)  # a first token has no prediction
        for key in keys:
            value = get_dense(td, key)
            if value is not None:
                mask = mask & per_token(value, mask).bool()
        return mask

    def _weights(self, mask: Tensor, rows: Tensor) -> Tensor:
        """Return the weight of each token, [B, T]; a constant divisor counts `rows` rows."""
        if self.aggregation == "none":
            return mask.float()
        summed, constant = self.reduction == "sum", self.aggregation == "constant"
        return token_weights(
            mask,
            "sequence_mean" if self.aggregation == "prompt_mean" else self.aggregation,
            total_tokens=1 if summed else mask.sum(),
            total_rows=1 if summed else rows if constant else mask.any(-1).sum(),
            max_tokens=self.max_tokens or 1,
        )

    def _total(self, term: Tensor, batch: TensorDict) -> Tensor:
        weight = batch["weight"]
        term = torch.where(weight > 0, term, 0.0) * weight  # no NaN from a masked token
        return term if self.aggregation == "none" else term.sum()


class DAPO(GRPOLoss):
    """GRPOLoss with the clip range (0.2, 0.28) of DAPO (arXiv 2503.14476)."""

    def __init__(self, actor_network: LLMWrapperBase, **settings: Any) -> None:
        super().__init__(actor_network, **{"clip_epsilon": (0.2, 0.28), **settings})


class CISPOLoss(GRPOLoss):
    """GRPOLoss with the objective -sg(clip(r)) A log pi: clipped tokens keep a gradient.

    MiniMax-M1 (arXiv 2506.13585) eq. 4 and 5. `clip_fraction` counts all ratios outside the bounds.
    """

    surrogate = "cispo"
