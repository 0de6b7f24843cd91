"""What a wrapper reads from a td: ids if there are any, else the rendered history or the text.

B rows, T tokens.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from policies.chats.history import History
from policies.padding import attended, is_ragged, pad, pad_mask, rows

NestedKey = str | tuple[str, ...]


@dataclass(frozen=True)
class Rows:
    """Ragged sequences: B x [t] ids, and the assistant mask of each where it is known."""

    ids: list[Tensor]
    assistant: list[Tensor] | None = None


@dataclass(frozen=True)
class Sequences:
    """Whole sequences padded on any side: ids [B, T] and bool masks [B, T], None where unknown.

    `response` holds what was sampled, `after` all that follows the prompt; `dense` ones lie as they
    were given.
    """

    tokens: Tensor
    attention: Tensor
    dense: bool
    assistant: Tensor | None = None
    response: Tensor | None = None
    after: Tensor | None = None

    def parts(self) -> dict[str, Tensor]:
        """Return where prompt, response and assistant are, as far as it is known, [B, T] each.

        The response starts where sampling, else what follows the prompt, else the assistant does.
        """
        parts = {} if self.assistant is None else {"assistant": self.assistant & self.attention}
        starts = (self.response, self.after, self.assistant)
        found = next((mask for mask in starts if mask is not None), None)
        if found is not None:
            begun = ((found & self.attention).cumsum(-1) > 0) & self.attention
            after = begun if self.after is None else self.after
            parts |= {"prompt": self.attention & ~after, "response": begun}
        return parts


class ReadsInputs:
    """The reading half of a wrapper, over its keys, tokenizer and renderer."""

    def _rows(self, td: TensorDictBase, field: str) -> Rows:
        """Return the prompt or full sequences of td as ragged ids."""
        ids = rows(td, self._ids_key(field))
        if ids is not None:
            masks = rows(td, self.attention_mask_key)
            if masks is None and field == "prompt":  # it fills the first columns of an output
                masks = rows(td, self._key("masks", "all_attention_mask"))
                masks = masks and [mask[: len(row)] for mask, row in zip(masks, ids, strict=True)]
            ids = attended(ids, masks, ragged=is_ragged(td.get(self._key("tokens"), td)))
            return Rows([row.to(self.device) for row in ids])
        value = td.get(self.in_keys[0], None)
        if value is None:
            raise ValueError(
                f"expected {self.in_keys[0]} or token ids at {self._key('tokens', field)} for "
                f"input_mode={self.input_mode!r}, got keys {sorted(map(str, td.keys()))}"
            )
        if self.input_mode == "history":
            return self._rendered(value, add_generation_prompt=field == "prompt")
        return self._tokenized(value if isinstance(value, list) else value.tolist())

    def _rendered(self, history: History, *, add_generation_prompt: bool) -> Rows:
        """Render each chat once; adjacent repeats (the samples of a group) share the work."""
        if not isinstance(history, History):
            raise TypeError(
                f"Expected History object for {self.in_keys[0]!r}, got {type(history).__name__}; "
                "make one by History.from_chats"
            )
        ids, assistant, last = [], [], None
        for chat in history.chats():
            if chat != last:
                done = self.renderer.render(chat, add_generation_prompt=add_generation_prompt)
                last = chat
                row = torch.tensor(done.ids, device=self.device)
                mask = torch.tensor(done.assistant, dtype=torch.bool, device=self.device)
            ids.append(row)
            assistant.append(mask)
        return Rows(ids, assistant)

    def _tokenized(self, texts: list[Any]) -> Rows:
        wrong = next((text for text in texts if not isinstance(text, str)), None)
        if wrong is not None:
            raise TypeError(f"expected str at {self.in_keys[0]!r}, got {type(wrong).__name__}")
        options = {"add_special_tokens": False, **self.tokenizer_kwargs}
        ids = [self.tokenizer(text, **options)["input_ids"] for text in texts]
        return Rows([torch.tensor(i, dtype=torch.int64, device=self.device) for i in ids])

    def _sequences(self, td: TensorDictBase, side: str = "left") -> Sequences:
        """Return what stands at `full`: as it lies if dense, else padded on `side`."""
        key = self._ids_key("full")
        given = rows(td, key) is not None
        dense = given and not is_ragged(td if isinstance(key, str) else td.get(key[:-1]))
        if dense:
            tokens, assistant = td.get(key).to(self.device), None
            attention = self._attention(td, tokens)
        else:
            found = self._rows(td, "full")
            tokens = pad(found.ids, self.pad_token_id, side=side)
            attention = pad_mask([len(r) for r in found.ids], side=side, device=self.device)
            assistant = found.assistant and pad(found.assistant, False, side=side)
        if assistant is None:
            assistant = self._mask_of(td, tokens, "all_assistant_mask", side, strict=given)
        if assistant is None and given and self.input_mode == "history":
            attention, assistant = self._recognised(td, tokens, attention)
        response = self._mask_of(td, tokens, "all_response_mask", side, strict=given)
        seq = Sequences(tokens, attention, dense, assistant, response)
        return replace(seq, after=self._after_prompt(td, seq, self._prompt_key()))

    def _recognised(
        self, td: TensorDictBase, tokens: Tensor, attention: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the masks of ids [B, T]: with the assistant's, if they are the td's history.

        Padding that no attention mask tells is recognised by it too.
        """
        history = td.get(self.in_keys[0], None)
        if not isinstance(history, History):
            return attention, None
        found = self._rendered(history, add_generation_prompt=False)
        sizes = [len(row) for row in found.ids]
        masks = [attention]
        if attention.all() and max(sizes) == tokens.shape[-1]:  # its padding may count as real
            masks += [pad_mask(sizes, side=s, device=self.device) for s in ("left", "right")]
        want, assistant = torch.cat(found.ids), torch.cat(found.assistant or [])
        for mask in masks:
            same = mask.sum(-1).tolist() == sizes and torch.equal(tokens[mask], want)
            if same and (mask is attention or (tokens[~mask] == self.pad_token_id).all()):
                return mask, torch.zeros_like(mask).masked_scatter(mask, assistant)
        return attention, None

    def _ids_key(self, field: str) -> NestedKey:
        """Return where ids to read stand; nowhere, if histories and texts are preferred to ids."""
        if self.input_mode == "tokens":
            return self.in_keys[0]
        return self._key("tokens", field) if self.prefer_tokens else ()

    def _mask_of(
        self, td: TensorDictBase, tokens: Tensor, name: str, side: str, *, strict: bool
    ) -> Tensor | None:
        """Return the mask of tokens [B, T] by its name in td; None without.

        One of another shape is an error if `strict`, else it is of other ids than these.
        """
        mask = self._mask_at(td, self._key("masks", name), side)
        if mask is None or mask.shape == tokens.shape:
            return mask
        if strict:
            raise ValueError(
                f"expected {name} of shape {tuple(tokens.shape)} as the tokens have, got "
                f"{tuple(mask.shape)}"
            )
        return None

    def _mask_at(self, td: TensorDictBase, key: NestedKey, side: str) -> Tensor | None:
        """Return the mask at a key as bool [B, T], ragged ones padded on `side`; None without."""
        mask = rows(td, key)
        if mask is None:
            return None
        return pad([row.bool() for row in mask], False, side=side).to(self.device)

    def _prompt_key(self) -> NestedKey:
        """Return where the prompt's ids stand; nowhere, if what is read is rendered anew."""
        return self._key("tokens", "prompt") if self._ids_key("full") else ()

    def _after_prompt(self, td: TensorDictBase, seq: Sequences, key: NestedKey) -> Tensor | None:
        """Return which attended tokens [B, T] follow the prompt ids at `key`; None without them.

        A padded prompt must fill the first columns of padded sequences.
        """
        prompt = rows(td, key)
        if prompt is None:
            return None
        if seq.dense and not is_ragged(td if isinstance(key, str) else td.get(key[:-1])):
            given = torch.stack(prompt).to(self.device)  # [B, P]
            size = given.shape[-1]
            if ((seq.tokens[:, :size] != given) & seq.attention[:, :size]).any():
                raise ValueError(
                    f"expected the padded prompts at {key} in the first {size} columns of the "
                    "sequences, found other ids there; give them ragged, or without the prompts"
                )
            return seq.attention & (torch.arange(seq.tokens.shape[-1], device=self.device) >= size)
        prompt = attended(prompt, rows(td, self.attention_mask_key), ragged=True)
        sizes = torch.tensor([len(row) for row in prompt], device=self.device)[:, None]
        return seq.attention & (seq.attention.cumsum(-1) > sizes)

    def _attention(self, td: TensorDictBase, tokens: Tensor) -> Tensor:
        """Return the attention mask of dense tokens [B, T]; without one, all count."""
        for key in (self._key("masks", "all_attention_mask"), self.attention_mask_key):
            mask = self._mask_at(td, key, "left")
            if mask is not None and mask.shape != tokens.shape:
                raise ValueError(
                    f"expected an attention mask of shape {tuple(tokens.shape)} as the tokens "
                    f"have, got {tuple(mask.shape)}"
                )
            if mask is not None:
                return mask
        return torch.ones_like(tokens, dtype=torch.bool)
