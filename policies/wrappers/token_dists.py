"""The distribution of each token of given sequences, as losses ask a scoring wrapper for it.

Entry t of the logits predicts token t. B rows, T tokens, V vocabulary; a td may have any number of
batch dimensions. Nothing here has a state, so threads may ask at once.
"""

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.distributions import Categorical

from policies.distributions.sequences import LLMMaskedCategorical
from policies.padding import rows, unpad
from policies.wrappers.inputs import NestedKey, Sequences


class RaggedCategorical(Categorical):
    """Give each token of ragged rows a categorical distribution; values are nested tensors [B, t].

    `logits` is the nested [B, t, V]. torch has no Categorical over those.

    >>> logits = torch.nested.as_nested_tensor([torch.zeros(1, 2)], layout=torch.jagged)
    >>> [row.exp().tolist() for row in RaggedCategorical(logits).log_prob(logits.argmax(-1))]
    [[0.5]]
    """

    def __init__(self, logits: Tensor) -> None:
        parts = logits.unbind()
        self._sizes, self._layout = [len(part) for part in parts], logits.layout
        super().__init__(logits=torch.cat(parts), validate_args=False)
        self.nested_logits = logits

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probs of the tokens, nested as they are."""
        return self._nest(super().log_prob(torch.cat(value.unbind())))

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw a token each; more at a time would not nest."""
        if tuple(sample_shape):
            raise ValueError(f"expected sample_shape (), got {tuple(sample_shape)}")
        return self._nest(super().sample())

    def entropy(self) -> Tensor:
        """Return the entropy of each token in nats."""
        return self._nest(super().entropy())

    def _nest(self, values: Tensor) -> Tensor:
        return torch.nested.as_nested_tensor(list(values.split(self._sizes)), layout=self._layout)


class GivesDistributions:
    """The distributions of a wrapper that scores; a generating one refuses them."""

    def get_dist(
        self,
        tensordict: TensorDictBase,
        tensordict_out: TensorDictBase | None = None,
        logits_key: NestedKey = "logits",
        mask_key: NestedKey | None = None,
        as_padded_tensor: bool | None = None,
        as_nested_tensor: bool | None = None,
        padding_value: float | None = None,
        padding_side: str = "left",
        layout: torch.layout | None = None,
    ) -> LLMMaskedCategorical | Categorical:
        """Return the distribution of each token given those before it, over [B, T, V] logits.

        Padded (the default), it is masked by the attention mask, or by that at `mask_key`: an
        LLMMaskedCategorical whose padding holds `padding_value` (0). Ragged sequences are padded on
        `padding_side`; padded ones stay as they lie. With `as_nested_tensor` it is a Categorical
        over nested logits of `layout` (strided), with as_padded_tensor=False one over rows of equal
        lengths; neither has a mask. `tensordict_out` gets the logits, at `logits_key`.
        """
        nested = as_nested_tensor is True
        if (nested or as_padded_tensor is False) and (mask_key is not None or as_padded_tensor):
            raise ValueError(
                f"expected padded logits for a mask, got {as_nested_tensor=}, {as_padded_tensor=} "
                f"and {mask_key=}; drop the one or the other"
            )
        if layout is not None and not nested:
            raise ValueError(
                f"layout is that of nested logits, got {layout} with {as_nested_tensor=}; set "
                "as_nested_tensor=True, or drop it"
            )
        seq, logits = self._with_logits(tensordict, padding_side)
        if nested:
            parts = unpad(logits, seq.attention)
            logits = torch.nested.as_nested_tensor(parts, layout=layout or torch.strided)
            self._show(tensordict_out, logits_key, logits)
            return RaggedCategorical(logits)
        if padding_value:
            logits = logits.masked_fill(~seq.attention.unsqueeze(-1), padding_value)
        if as_padded_tensor is not False:
            mask = self._find_mask(tensordict, seq, mask_key or "all_attention_mask", padding_side)
            return self._dist(tensordict, logits, mask, tensordict_out, logits_key)
        if not seq.attention.all():
            sizes = seq.attention.sum(-1).tolist()
            raise ValueError(f"expected rows of equal lengths to stack, got {sizes}; pad them")
        logits = logits.reshape(*tensordict.batch_size, *logits.shape[1:])
        self._show(tensordict_out, logits_key, logits)
        return Categorical(logits=logits)

    def _get_dist_with_prompt_mask(
        self,
        tensordict: TensorDictBase,
        tokens_key: NestedKey | None = None,
        logits_key: NestedKey = "logits",
        assistant_mask_key: NestedKey | None = None,
        attention_mask_key: NestedKey | None = None,
        padding_side: str = "left",
        *,
        tensordict_out: TensorDictBase | None = None,
    ) -> LLMMaskedCategorical:
        """Return the distribution masked to what follows the prompt, else to the assistant mask.

        `tokens_key` names the prompt's ids.
        """
        td = flat(tensordict)
        prompt = tokens_key or self._prompt_key()
        key = attention_mask_key or "all_attention_mask"
        if rows(td, prompt) is None:
            key = assistant_mask_key or "all_assistant_mask"
        seq, logits = self._with_logits(tensordict, padding_side)
        mask = self._find_mask(tensordict, seq, key, padding_side)
        after = self._after_prompt(td, seq, prompt)
        mask = mask if after is None else mask & after
        return self._dist(tensordict, logits, mask, tensordict_out, logits_key)

    def _get_dist_with_assistant_mask(
        self,
        tensordict: TensorDictBase,
        assistant_mask_key: NestedKey | None = None,
        logits_key: NestedKey = "logits",
        padding_side: str = "left",
        *,
        tensordict_out: TensorDictBase | None = None,
    ) -> LLMMaskedCategorical:
        """Return the distribution masked to assistant tokens.

        Ids that were not read from tokens.full are written there, to the caller, over others.
        """
        seq, logits = self._with_logits(tensordict, padding_side)
        key = assistant_mask_key or "all_assistant_mask"
        mask = self._find_mask(tensordict, seq, key, padding_side)
        full = self._key("tokens", "full")
        if self._ids_key("full") != full or rows(flat(tensordict), full) is None:
            tensordict.set(full, seq.tokens.reshape(*tensordict.batch_size, -1))
        return self._dist(tensordict, logits, mask, tensordict_out, logits_key)

    def _get_dist_with_attention_mask(
        self,
        tensordict: TensorDictBase,
        attention_mask_key: NestedKey | None = None,
        logits_key: NestedKey = "logits",
        padding_side: str = "left",
        *,
        tensordict_out: TensorDictBase | None = None,
    ) -> LLMMaskedCategorical:
        """Return the distribution masked to real tokens."""
        return self.get_dist(
            tensordict,
            tensordict_out,
            logits_key,
            mask_key=attention_mask_key,
            padding_side=padding_side,
        )

    def _get_dist_with_custom_mask(
        self,
        tensordict: TensorDictBase,
        mask: Tensor,
        logits_key: NestedKey = "logits",
        padding_side: str = "left",
        *,
        tensordict_out: TensorDictBase | None = None,
    ) -> LLMMaskedCategorical:
        """Return the distribution under a bool mask, one entry a token."""
        _, logits = self._with_logits(tensordict, padding_side)
        return self._dist(tensordict, logits, mask, tensordict_out, logits_key)

    _get_sft_dist = _get_dist_with_prompt_mask
    _get_rlhf_dist = _get_dist_with_assistant_mask
    _get_generic_dist = _get_dist_with_attention_mask

    def _with_logits(self, tensordict: TensorDictBase, side: str) -> tuple[Sequences, Tensor]:
        """Return the sequences of td, one batch dimension, and their aligned tempered logits."""
        if self.generate:
            raise NotImplementedError(
                "a generating policy has no distribution over given tokens; "
                "use policy.get_new_version(generate=False)"
            )
        if side not in ("left", "right"):
            raise ValueError(f"expected padding_side 'left' or 'right', got {side!r}")
        td = flat(tensordict)
        seq = self._sequences(td, side)
        if seq.dense and side == "right" and (seq.attention[:, 1:] > seq.attention[:, :-1]).any():
            raise ValueError(
                "padding_side='right' pads ragged sequences, these are padded otherwise and stay "
                "as they lie; give them ragged, or drop it"
            )
        logits = self._ask_logits(seq)
        temperature = torch.as_tensor(self._temperature(td), device=logits.device)
        return seq, logits / temperature.reshape(-1, 1, 1)

    def _find_mask(
        self, tensordict: TensorDictBase, seq: Sequences, key: NestedKey, side: str
    ) -> Tensor:
        """Return a mask [B, T] by the name of its field in the masks or by its key in td."""
        known = {"all_attention_mask": seq.attention, "all_assistant_mask": seq.assistant}
        names = {name: name for name in known} | {self._key("masks", name): name for name in known}
        mask = known.get(names.get(key, ""))
        if mask is None:
            key = self._key("masks", key) if key in known else key
            mask = self._mask_at(flat(tensordict), key, side)
        if mask is None:
            raise ValueError(
                f"expected a mask at {key}, found none; assistant masks need input_mode='history' "
                "or masks in the input"
            )
        return mask

    def _dist(
        self,
        tensordict: TensorDictBase,
        logits: Tensor,
        mask: Tensor,
        out: TensorDictBase | None,
        logits_key: NestedKey,
    ) -> LLMMaskedCategorical:
        shape = tensordict.batch_size
        logits = logits.reshape(*shape, *logits.shape[1:])
        if mask.numel() != logits[..., 0].numel() or mask.shape[-1] != logits.shape[-2]:
            raise ValueError(
                f"expected a mask of shape {tuple(logits.shape[:-1])}, one entry a token, got "
                f"{tuple(mask.shape)}; was the batch padded differently?"
            )
        self._show(out, logits_key, logits)
        return LLMMaskedCategorical(logits=logits, mask=mask.bool().reshape(logits.shape[:-1]))

    def _show(self, out: TensorDictBase | None, key: NestedKey, logits: Tensor) -> None:
        if out is not None:
            out.set(key, logits)


def flat(td: TensorDictBase) -> TensorDictBase:
    """Return a td of any batch shape with one batch dimension."""
    return td if td.ndim == 1 else td.unsqueeze(0) if td.ndim == 0 else td.reshape(-1)
