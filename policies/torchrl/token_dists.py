"""The distribution of each token of a td's sequences, for losses that score with a wrapper.

Entry t of the logits [B, T, V] predicts token t.
"""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.distributions import Categorical

from policies.padding import pad, rows, unpad
from policies.torchrl.inputs import InputReader, NestedKey, flat
from policies.torchrl.sequences import LLMMaskedCategorical


class RaggedCategorical(Categorical):
    """Give each token of ragged rows a categorical distribution; values are nested tensors [B, t].

    `logits` is nested, [B, t, V]; torch's Categorical does not take nested tensors.

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
        """Return the log-probs of the tokens, nested as the tokens are."""
        return self._nest(super().log_prob(torch.cat(value.unbind())))

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Sample one token each; a sample shape is not supported."""
        assert not sample_shape
        return self._nest(super().sample())

    def entropy(self) -> Tensor:
        """Return the entropy of each token in nats."""
        return self._nest(super().entropy())

    def _nest(self, values: Tensor) -> Tensor:
        return torch.nested.as_nested_tensor(list(values.split(self._sizes)), layout=self._layout)


class TokenDists:
    """The distributions over the sequences of a td, read by the scoring wrapper `policy`.

    The td may have any number of batch dimensions. Other arguments are ignored.
    """

    def __init__(
        self,
        policy: Any,
        td: TensorDictBase,
        *,
        padding_side: str = "left",
        tensordict_out: TensorDictBase | None = None,
        logits_key: NestedKey = "logits",
        **_: Any,
    ) -> None:
        if policy.generate:
            raise NotImplementedError("a generating policy; use get_new_version(generate=False)")
        rows = flat(td)
        self.td, self.side = td, padding_side
        self.out, self.logits_key = tensordict_out, logits_key
        self.reader: InputReader = policy.reader(rows)
        self.seq = seq = self.reader.sequences(rows, padding_side)
        # Losses need the ratio at the sampling temperature.
        scale = policy.scoring_temperature(rows, "temperature")
        values = policy._logits(seq.tokens, seq.attention)
        self.logits = values / torch.as_tensor(scale, device=values.device).reshape(-1, 1, 1)

    def mask_at(self, key: NestedKey) -> Tensor:
        """Return a mask [B, T] by its field name in the masks or by its key in td."""
        known = {"all_attention_mask": self.seq.attention, "all_assistant_mask": self.seq.assistant}
        place = self.reader.policy.key_of("masks", key) if key in known else key
        places = {self.reader.policy.key_of("masks", name): mask for name, mask in known.items()}
        mask = places.get(place)
        if mask is None:
            mask = self.reader.mask_at(flat(self.td), place, self.side)
        if mask is None:
            raise ValueError(f"expected a mask at {place}, found none; use input_mode='history'")
        return mask

    def after_prompt(self, key: NestedKey | None) -> Tensor | None:
        """Return the mask [B, T] of tokens after the prompt ids at `key`; None without prompts."""
        return self.reader.after_prompt(flat(self.td), self.seq, key or self.reader.prompt_key)

    def masked(self, mask: Tensor, filler: float | None = None) -> LLMMaskedCategorical:
        """Return the distribution under a mask, one entry per token; `filler` fills padding."""
        logits = self.logits
        if filler:
            logits = logits.masked_fill(~self.seq.attention.unsqueeze(-1), filler)
        logits = logits.reshape(*self.td.batch_size, *logits.shape[1:])
        shape = logits.shape[:-1]
        if mask.numel() != shape.numel() or mask.shape[-1] != shape[-1]:
            raise ValueError(f"expected one entry a token, {tuple(shape)}, got {tuple(mask.shape)}")
        mask = mask.bool().reshape(shape)
        return LLMMaskedCategorical(logits=self._shown(logits), mask=mask)

    def nested(self, layout: torch.layout) -> RaggedCategorical:
        """Return the distribution over nested logits, without padding."""
        parts = unpad(self.logits, self.seq.attention)
        return RaggedCategorical(self._shown(torch.nested.as_nested_tensor(parts, layout=layout)))

    def stacked(self) -> Categorical:
        """Return the distribution over rows of equal lengths, without a mask."""
        if not self.seq.attention.all():
            sizes = self.seq.attention.sum(-1).tolist()
            raise ValueError(f"expected rows of equal lengths to stack, got {sizes}; pad them")
        logits = self.logits.reshape(*self.td.batch_size, *self.logits.shape[1:])
        return Categorical(logits=self._shown(logits))

    def keep_ids(self, key: NestedKey) -> None:
        """Write the ids to td unless they were read from it."""
        if self.reader.ids_key("full") != key or rows(flat(self.td), key) is None:
            self.td.set(key, self.seq.tokens.reshape(*self.td.batch_size, -1))

    def _shown(self, logits: Tensor) -> Tensor:
        if self.out is not None:
            self.out.set(self.logits_key, logits)
        return logits


def show_rows(
    rows: list[Tensor],
    batch_size: Sequence[int],
    *,
    as_list: bool = False,
    as_padded_tensor: bool = False,
    as_nested_tensor: bool = False,
    layout: torch.layout | None = None,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Tensor | list[Tensor]:
    """Return ragged rows as a list, a nested tensor, or dense in a batch shape."""
    if as_list:
        return rows
    if as_nested_tensor:
        return torch.nested.as_nested_tensor(rows, layout=layout or torch.strided)
    sizes = [len(row) for row in rows]
    if not as_padded_tensor and len(set(sizes)) > 1:
        raise ValueError(f"expected rows of one length, got {sizes}; ask as_padded_tensor=True")
    return pad(rows, padding_value, side=padding_side).reshape(*batch_size, -1)
