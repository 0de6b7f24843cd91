"""SFTLoss: the trainer's SFT objectives with TorchRL's keys and outputs."""

from dataclasses import dataclass
from typing import Any, Literal

from tensordict import NestedKey, TensorClass, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from policies.padding import is_ragged, rows
from policies.scorer import Scores
from policies.torchrl.wrapper import LLMWrapperBase
from trainer.kl.estimators import k3
from trainer.objectives import MinorSFTObjective, SFTObjective
from trainer.torchrl.loss_inputs import (
    REDUCTIONS,
    LossModule,
    aligned,
    check_choice,
    masked_mean,
    require,
)


class SFTLossOutput(TensorClass["nocast"]):  # pyright: ignore[reportInvalidTypeArguments]
    """Hold the output of SFTLoss; losses that are off are None."""

    loss_sft: Tensor
    loss_kl_to_ref: Tensor | None = None
    kl_to_ref: Tensor | None = None


@dataclass(frozen=True)
class SFTKeys:
    """Keys of SFTLoss's input, and of the log-probs in the actor's output."""

    history: NestedKey = ("history", "full")
    ref_log_prob: NestedKey = ("next", "ref_log_probs", "full")
    log_probs: NestedKey = ("log_probs", "full")


class SFTLoss(LossModule):
    """Sum the log-probs of the assistant's tokens per sample, then reduce over samples.

    `normalize_by_seq_length` replaces the sum l over a sample's tokens by their mean.
    `loss_function`: sft, -l; minor_sft, -log sigmoid(beta (l - l_ref)) (arXiv 2408.10642).
    `reduction` is over samples; none gives [B]. The KL term is `kl_to_ref_coeff` times the token
    mean of k3 to the reference. `tokenizer` and `tokenizer_kwargs` (of History.apply_chat_template)
    render the history if ids and masks are missing; by default the actor does. Padded and ragged
    actors give equal losses. Raise ValueError for samples without assistant tokens.
    """

    def __init__(
        self,
        actor_network: LLMWrapperBase,
        tokenizer: Any = None,
        tokenizer_kwargs: dict[str, Any] | None = None,
        reduction: Literal["mean", "sum", "none"] = "mean",
        normalize_by_seq_length: bool = True,
        kl_to_ref_coeff: float | None = None,
        loss_function: Literal["sft", "minor_sft"] = "sft",
        beta: float = 0.1,
    ) -> None:
        super().__init__()
        check_choice("reduction", reduction, REDUCTIONS)
        check_choice("loss_function", loss_function, ("sft", "minor_sft"))
        if loss_function == "minor_sft" and kl_to_ref_coeff:
            raise ValueError(f"minor_sft takes no kl_to_ref_coeff, got {kl_to_ref_coeff}")
        minor = MinorSFTObjective(beta=beta)
        self.actor_network, self.tensor_keys = actor_network, SFTKeys()
        self.tokenizer, self.tokenizer_kwargs = tokenizer, tokenizer_kwargs
        self.reduction, self.normalize = reduction, normalize_by_seq_length
        self.kl_to_ref_coeff, self.loss_function = kl_to_ref_coeff, loss_function
        # TorchRL's minor_sft lacks the factor 2 / beta that gives MinorSFT the scale of SFT.
        plain = loss_function == "sft"
        self.objective, self.factor = (SFTObjective(), 1.0) if plain else (minor, beta / 2)

    def forward(self, tensordict: TensorDictBase) -> SFTLossOutput:
        """Return loss_sft (a scalar, or [B] with reduction="none") and the KL if on."""
        td = tensordict.reshape(-1) if tensordict.ndim > 1 else tensordict
        keys, masks = self.tensor_keys, getattr(self.actor_network, "masks_key", "masks")
        out = self.actor_network(self._rendered(td))
        real = require(out, (masks, "all_attention_mask")).bool()  # [B, T]
        ragged = is_ragged(out.get(masks))
        mask = aligned(out, (masks, "all_assistant_mask"), real, ragged=ragged) & real
        empty = (~mask.any(-1)).nonzero().flatten().tolist()
        if empty:
            raise ValueError(f"expected assistant tokens in each sample; samples {empty} have none")
        curr = aligned(out, keys.log_probs, real, ragged=ragged)  # [B, T]
        # Weights of the log-probs: the objective sums over a row, or averages it.
        weight = mask / (mask.sum(-1, keepdim=True) if self.normalize else 1)  # [B, T]
        batch, more = TensorDict(loss_mask=mask, batch_size=[len(mask)]), {}
        if self.kl_to_ref_coeff is not None or self.loss_function == "minor_sft":
            ref = aligned(td, keys.ref_log_prob, real, ragged=ragged).detach()  # [B, T]
            batch["ref_log_probs", "full"] = ref.where(mask, 0.0) * weight
            if self.kl_to_ref_coeff is not None:
                kl = masked_mean(k3(curr - ref), mask)
                more = {"kl_to_ref": kl.detach(), "loss_kl_to_ref": self.kl_to_ref_coeff * kl}
        terms = self.objective(Scores(curr.where(mask, 0.0) * weight), batch)
        loss = self.factor * terms.loss["policy"].where(mask, 0.0).sum(-1)  # [B]
        reduced = {"mean": loss.mean, "sum": loss.sum, "none": lambda: loss}[self.reduction]()
        return SFTLossOutput(loss_sft=reduced, **more, batch_size=[])

    def _rendered(self, td: TensorDictBase) -> TensorDictBase:
        """Return the actor's input: the td, with ids and masks if this loss renders them."""
        actor, td = self.actor_network, td.copy()
        history = td.get(self.tensor_keys.history, None)
        if history is None:
            return td
        if self.tensor_keys.history != SFTKeys.history:
            td.set(actor.in_keys[0], history)
        known = any(rows(td, key) for key in (("masks", "all_assistant_mask"), ("tokens", "full")))
        if not known and (self.tokenizer is not None or self.tokenizer_kwargs):
            settings = {"tokenize": True, "return_dict": True, "add_generation_prompt": False}
            settings |= {"return_assistant_tokens_mask": True, **(self.tokenizer_kwargs or {})}
            tokenizer = actor.tokenizer if self.tokenizer is None else self.tokenizer
            encoded = history.apply_chat_template(tokenizer=tokenizer, **settings)
            ids, marks = (rows(encoded, key) or [] for key in ("input_ids", "assistant_masks"))
            td.set("tokens", lazy_stack([TensorDict(full=row) for row in ids]))
            td.set(
                "masks", lazy_stack([TensorDict(all_assistant_mask=row.bool()) for row in marks])
            )
            return td.exclude(actor.in_keys[0])  # else the actor would render it again
        return td
