"""How a wrapper scores: whole sequences in, aligned log-probs out.

B rows, T tokens. Entries that are not scored, and the first of a row, are 0.
"""

from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from policies.chats.containers import LogProbs, Masks, Tokens
from policies.padding import unpad
from policies.wrappers.inputs import Sequences
from policies.wrappers.outputs import shown
from policies.wrappers.token_dists import flat


class ScoresSequences:
    """The scoring half of a wrapper."""

    def _score(self, td: TensorDictBase) -> TensorDictBase:
        seq = self._sequences(td)
        log_probs, parts, form = self._scored(td, seq), seq.parts(), self._form()
        if form.padded:  # a padded prompt fills the first columns of `full`; it need not here
            parts.pop("prompt", None)
        masks = {
            "all_attention_mask": seq.attention,
            "all_assistant_mask": seq.assistant,
            "all_response_mask": seq.response,
        }
        out = TensorDict(batch_size=td.batch_size)
        for key, kind, fields in (
            (self.masks_key, Masks, {k: m for k, m in masks.items() if m is not None}),
            (self.tokens_key, Tokens, {"full": seq.tokens}),
            (self.log_probs_key, LogProbs, {"full": log_probs}),
        ):
            if key is not None:
                within = None if kind is Masks else parts
                out.set(key, form.store_aligned(kind, fields, seq.attention, within))
        return out

    def _scored(self, td: TensorDictBase, seq: Sequences) -> Tensor:
        """Return the log-probs [B, T] of a td's sequences at its temperature."""
        keep = None
        if self.score_mask_key is not None:
            keep = self._mask_at(td, self.score_mask_key, "left")
        group = td.get("group_id", None)
        group = None if group is None else group.to(self.device)
        return self._ask_log_probs(seq, keep, self._temperature(td), group)

    def _temperature(self, td: TensorDictBase) -> Tensor | float:
        """Return the temperature of scoring: that of td [B], else the wrapper's; greedy is 1."""
        given = td.get("temperature", None)
        return (self.temperature or 1.0) if given is None else given.to(self.device)

    def log_prob(self, data: TensorDictBase, **get_kwargs: Any) -> Tensor | list[Tensor]:
        """Return the log-probs of the response, padded right (or ragged if outputs are).

        get_kwargs are those of `shown`: as_list, as_padded_tensor, as_nested_tensor, ...
        """
        if self.generate:
            raise RuntimeError("log_prob scores; expected generate=False, got generate=True")
        td = flat(data)
        seq = self._sequences(td)
        part = seq.parts().get("response")
        if part is None:
            raise ValueError(
                "expected prompt tokens or an assistant mask to tell the response from the prompt, "
                "found neither; use input_mode='history' or give "
                f"{self._key('tokens', 'prompt')}"
            )
        get_kwargs = get_kwargs or {"as_padded_tensor": self.pad_output}
        return shown(unpad(self._scored(td, seq), part), data.batch_size, **get_kwargs)
