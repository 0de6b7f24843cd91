"""Read a wrapper's input from a td: ids if present, else the rendered history or the text.

Ids have priority over a history or text, so that exactly the sampled ids are scored. The results
are dense: ids [B, T] with bool masks [B, T]; ragged rows are padded here, once.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from policies.chat_policy import NestedKey, Records, Sequences
from policies.chats.history import History
from policies.chats.messages import records_of
from policies.padding import attended, is_ragged, pad, rows, unpad


@dataclass(frozen=True)
class InputReader:
    """Read ids, histories and texts with the keys and tokenizer of a wrapper.

    `key` is the key of the wrapper's `input_mode`.
    """

    policy: Any  # an LLMWrapperBase
    key: NestedKey

    def records(self, td: TensorDictBase) -> Records | None:
        """Return the messages of each chat; None without a history."""
        value = td.get(self.key, None) if self.policy.input_mode == "history" else None
        if value is None:
            return None
        if not isinstance(value, History):
            raise TypeError(f"Expected History object for {self.key!r}, got {type(value).__name__}")
        return [records_of(chat) for chat in value.unbind(0)]

    def prompts(self, td: TensorDictBase, records: Records | None) -> Sequences:
        """Return the prompts, padded left; `records` are td's messages."""
        key = self.ids_key("prompt")
        ids = rows(td, key)
        if ids is None:
            return self._fresh(td, "prompt", records, "left")
        masks, ragged = self._prompt_masks(td, ids), _ragged(td, key)
        return self.policy.padded(attended(ids, masks, ragged=ragged), "left")

    def _prompt_masks(self, td: TensorDictBase, ids: list[Tensor]) -> list[Tensor] | None:
        """Return the attention masks of prompts; in an output they are the mask's first columns."""
        masks = rows(td, self.policy.attention_mask_key)
        if masks is None:
            masks = rows(td, self.policy.key_of("masks", "all_attention_mask"))
            masks = masks and [mask[: len(row)] for mask, row in zip(masks, ids, strict=True)]
        return masks

    def sequences(self, td: TensorDictBase, side: str = "left") -> Sequences:
        """Return the sequences at `full`: unchanged if dense, else padded on `side`.

        Without ids, chats are rendered or texts tokenised. The assistant mask comes from the
        rendered chats, else from the td, else from a history that renders to the td's ids.
        """
        key = self.ids_key("full")
        ids = rows(td, key)
        if ids is None:
            seq = self._fresh(td, "full", self.records(td), side)
        elif _ragged(td, key):
            seq = self._stacked(td, ids, side)
        else:
            tokens = td.get(key).to(self.policy.device)  # [B, T]
            seq = Sequences(tokens, self._attention(td, tokens))
        has_ids = ids is not None  # so the td's masks must fit its ids
        if seq.assistant is None:
            key = self.policy.key_of("masks", "all_assistant_mask")
            assistant = self._mask_of(td, seq.tokens, key, side, strict=has_ids)  # [B, T]
            seq = replace(seq, assistant=assistant)
        if seq.assistant is None and has_ids:
            records = self.records(td)
            if records is not None:
                seq = self._with_assistant(seq, self._fresh(td, "full", records, "left"))
        key = self.policy.key_of("masks", "all_response_mask")
        response = self._mask_of(td, seq.tokens, key, side, strict=has_ids)  # [B, T]
        return replace(seq, response=response)

    def parts(self, td: TensorDictBase, seq: Sequences) -> dict[str, Tensor]:
        """Return the known masks of prompt, response and assistant in td's sequences, [B, T] each.

        The response starts at the first sampled token, else after the prompt, else at the
        assistant's tokens.
        """
        parts = {} if seq.assistant is None else {"assistant": seq.assistant & seq.attention}
        after = self.after_prompt(td, seq, self.prompt_key)
        starts = (seq.response, after, seq.assistant)
        start = next((mask for mask in starts if mask is not None), None)
        if start is not None:
            begun = ((start & seq.attention).cumsum(-1) > 0) & seq.attention
            after = begun if after is None else after
            parts |= {"prompt": seq.attention & ~after, "response": begun}
        return parts

    def _with_assistant(self, seq: Sequences, fresh: Sequences) -> Sequences:
        """Add the assistant mask of the td's history if it renders to exactly these ids.

        A td without an attention mask may still be padded on either side, so the history's padding
        and its mirror image are tried too.
        """
        sizes = fresh.attention.sum(-1)  # [B]
        masks = [seq.attention]
        if seq.attention.all() and fresh.tokens.shape == seq.tokens.shape:
            masks += [fresh.attention, fresh.attention.flip(-1)]
        ids = fresh.tokens[fresh.attention]  # [K], of all rows
        assistant = fresh.assistant[fresh.attention]  # [K]
        padding = seq.tokens == self.policy.pad_token_id  # [B, T]
        for mask in masks:
            same = torch.equal(mask.sum(-1), sizes) and torch.equal(seq.tokens[mask], ids)
            if same and (mask is seq.attention or padding[~mask].all()):
                marks = torch.zeros_like(mask).masked_scatter(mask, assistant)
                return replace(seq, attention=mask, assistant=marks)
        return seq

    def mask_at(self, td: TensorDictBase, key: NestedKey, side: str = "left") -> Tensor | None:
        """Return the mask at a key as bool [B, T], a ragged mask padded on `side`, or None."""
        mask = rows(td, key)
        if mask is None:
            return None
        return pad([row.bool() for row in mask], False, side=side).to(self.policy.device)

    def ids_key(self, field: str) -> NestedKey:
        """Return the key of the ids to read; () if histories and texts have priority over ids."""
        if self.policy.input_mode == "tokens":
            return self.key
        return self.policy.key_of("tokens", field) if self.policy.prefer_tokens else ()

    @property
    def prompt_key(self) -> NestedKey:
        """Return the key of the prompt's ids; () if the input is rendered."""
        return self.policy.key_of("tokens", "prompt") if self.ids_key("full") else ()

    def after_prompt(self, td: TensorDictBase, seq: Sequences, key: NestedKey) -> Tensor | None:
        """Return the mask [B, T] of attended tokens after the prompt ids at `key`, or None.

        A padded prompt must fill the first columns of padded sequences.
        """
        prompt = rows(td, key)
        if prompt is None:
            return None
        full = self.ids_key("full")
        has_dense = rows(td, full) is not None and not _ragged(td, full)
        if has_dense and not _ragged(td, key):
            dense = torch.stack(prompt).to(self.policy.device)  # [B, P]
            size = dense.shape[-1]
            if ((seq.tokens[:, :size] != dense) & seq.attention[:, :size]).any():
                where = f"in the first {size} columns"
                raise ValueError(f"expected the padded prompts at {key} {where}, found other ids")
            return seq.attention & (torch.arange(seq.tokens.shape[-1], device=dense.device) >= size)
        prompt = attended(prompt, self._prompt_masks(td, prompt), ragged=True)
        pairs = zip(prompt, unpad(seq.tokens, seq.attention), strict=True)
        if not all(torch.equal(row.to(ids), ids[: len(row)]) for row, ids in pairs):
            raise ValueError(f"expected the prompts at {key} to start the rows, found other ids")
        sizes = torch.tensor([len(row) for row in prompt], device=self.policy.device)[:, None]
        return seq.attention & (seq.attention.cumsum(-1) > sizes)

    def _fresh(
        self, td: TensorDictBase, field: str, records: Records | None, side: str
    ) -> Sequences:
        """Return the ids of histories or texts, and the assistant mask if known."""
        mode = self.policy.input_mode
        if td.get(self.key, None) is None:
            raise ValueError(
                f"expected {self.key} or {self.policy.key_of('tokens', field)} for "
                f"input_mode={mode!r}, got keys {sorted(map(str, td.keys()))}"
            )
        if mode == "history":
            prompts = field == "prompt"
            return self.policy.rendered(records or [], side, add_generation_prompt=prompts)
        options = {"add_special_tokens": False, **self.policy.tokenizer_kwargs}
        ids = [self.policy.tokenizer(text, **options)["input_ids"] for text in self.texts(td)]
        return self.policy.padded([torch.tensor(row, dtype=torch.int64) for row in ids], side)

    def texts(self, td: TensorDictBase) -> list[str]:
        """Return the texts at the key."""
        value = td.get(self.key)
        return value if isinstance(value, list) else value.tolist()

    def _stacked(self, td: TensorDictBase, ids: list[Tensor], side: str) -> Sequences:
        """Return rows of a lazy stack or a nested tensor, which may contain padding."""
        key, sizes = self.policy.key_of("masks", "all_attention_mask"), [len(row) for row in ids]
        for place in (key, self.policy.attention_mask_key):
            masks = rows(td, place)
            if masks and [len(mask) for mask in masks] == sizes:
                tokens, keep = self.policy.padded(ids, side).tokens, self.mask_at(td, place, side)
                return Sequences(tokens, keep)
            if masks and place == key:  # the other key may have masks of prompts
                got = [len(mask) for mask in masks]
                raise ValueError(f"expected {key} with an entry for each id, {sizes}, got {got}")
        return self.policy.padded(ids, side)

    def _mask_of(
        self, td: TensorDictBase, tokens: Tensor, key: NestedKey, side: str, *, strict: bool
    ) -> Tensor | None:
        """Return the mask at a key, or None; for a wrong shape raise ValueError if `strict`."""
        mask = self.mask_at(td, key, side)
        if mask is None or mask.shape == tokens.shape:
            return mask
        if strict:
            shapes = tuple(tokens.shape), tuple(mask.shape)
            raise ValueError(f"expected {key} of the tokens' shape {shapes[0]}, got {shapes[1]}")
        return None

    def _attention(self, td: TensorDictBase, tokens: Tensor) -> Tensor:
        """Return the attention mask of dense tokens [B, T], all True by default."""
        key = self.policy.key_of("masks", "all_attention_mask")
        for place in (key, self.policy.attention_mask_key):
            mask = self._mask_of(td, tokens, place, "left", strict=True)
            if mask is not None:
                return mask
        return torch.ones_like(tokens, dtype=torch.bool)


def flat(td: TensorDictBase) -> TensorDictBase:
    """Return a td of any batch shape with one batch dimension."""
    return td if td.ndim == 1 else td.unsqueeze(0) if td.ndim == 0 else td.reshape(-1)


def _ragged(td: TensorDictBase, key: NestedKey) -> bool:
    """Return whether the rows at a key have different lengths."""
    return is_ragged(td if isinstance(key, str) else td.get(key[:-1]))
