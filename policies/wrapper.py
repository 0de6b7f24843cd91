"""The policy as a TensorDict module: what every engine shares.

A wrapper either generates (prompt -> response) or scores (full -> log-probs). An engine fills two
methods, `_generate` and `_score`; keys, batch shapes, copies and distributions live here.
Alignment everywhere: entry t of a `full` belongs to token t; unscored entries are 0.
"""

from collections.abc import Callable
from typing import Any, Literal
from weakref import ref

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from policies.distributions import LLMMaskedCategorical
from policies.padding import is_ragged, pad, rows

InputMode = Literal["history", "text", "tokens"]
NestedKey = str | tuple[str, ...]


class LLMWrapperBase(TensorDictModuleBase):
    """Common behaviour of policies over language models.

    Subclasses implement `_generate(td) -> td`, `_score(td) -> td` and `_logits(td) -> td` on a
    one-dimensional batch, and list their constructor arguments in `_settings`.
    """

    generate: bool
    input_mode: InputMode
    pad_output: bool
    return_log_probs: bool
    inplace: bool | Literal["empty"]
    _settings: dict[str, Any]

    def _set_keys(self, input_mode: InputMode, settings: dict[str, Any]) -> None:
        """Check the mode, store the key names and derive in_keys and out_keys from them."""
        if input_mode not in ("history", "text", "tokens"):
            raise ValueError(f"input_mode must be one of history, text, tokens; got {input_mode!r}")
        self.input_mode = input_mode
        for name in ("history_key", "text_key", "tokens_key", "masks_key", "log_probs_key"):
            setattr(self, name, settings[name])
        container = getattr(self, f"{input_mode}_key")
        self.in_keys = [settings["input_key"] or (container, "prompt" if self.generate else "full")]
        keys = [self.masks_key, self.tokens_key]
        keys += [self.log_probs_key] if self.return_log_probs else []
        if self.generate:  # words are only written where there is a reply to write
            keys += [] if input_mode == "tokens" else [self.text_key]
            keys += [self.history_key] if input_mode == "history" else []
        self.out_keys = keys

    def get_new_version(self, **changes: Any) -> "LLMWrapperBase":
        """Return a wrapper over the same weights with some arguments changed.

        Every constructor argument may be named; an unknown one is a ValueError.
        """
        unknown = set(changes) - set(self._settings)
        if unknown:
            raise ValueError(
                f"get_new_version got {sorted(unknown)}, expected names among "
                f"{sorted(self._settings)}"
            )
        settings = {**self._settings, **changes}
        moved = [k for k in ("generate", "input_mode") if settings[k] != self._settings[k]]
        if moved and "input_key" not in changes:
            settings["input_key"] = None  # the other direction or mode reads another field
        return type(self)(**settings)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Generate or score; batches of any number of dimensions, unbatched ones too."""
        td = _flat(tensordict)
        out = self._generate(td) if self.generate else self._score(td)
        return self._place(tensordict, _shaped(out, tensordict))

    def _place(self, tensordict: TensorDictBase, out: TensorDictBase) -> TensorDictBase:
        """Write the outputs where `inplace` says: into the input, a new td, or an empty copy."""
        if self.inplace is True:
            for key, value in out.items():  # padded and ragged fields do not share a container
                if is_ragged(value) != is_ragged(tensordict.get(key, value)):
                    tensordict.set(key, value)
            return tensordict.update(out)
        if self.inplace == "empty":
            return tensordict.empty().update(out)
        return out

    def _generate(self, td: TensorDictBase) -> TensorDictBase:
        raise NotImplementedError

    def _score(self, td: TensorDictBase) -> TensorDictBase:
        raise NotImplementedError

    def _logits(self, td: TensorDictBase, side: str) -> TensorDictBase:
        raise NotImplementedError

    # The collector, for transforms that ask for the policy behind an env.
    def register_collector(self, collector: Any) -> None:
        """Remember the collector by a weak reference."""
        self._collector: Callable[[], Any] = ref(collector)

    @property
    def collector(self) -> Any:
        """Return the registered collector, or None."""
        return self._collector() if hasattr(self, "_collector") else None

    # Distributions over given tokens; a generating wrapper refuses them.

    def get_dist(
        self,
        tensordict: TensorDictBase,
        *,
        mask_key: NestedKey | None = None,
        padding_side: str = "left",
    ) -> LLMMaskedCategorical:
        """Return the distribution of each token given those before it, over [B, T, V] logits.

        The default mask is the attention mask; `mask_key` names another one. Ragged sequences are
        padded on `padding_side`; padded ones stay as they lie.
        """
        td = self._with_logits(tensordict, padding_side)
        key = mask_key or (self.masks_key, "all_attention_mask")
        mask = td.get(key, None)
        if mask is None:
            mask = self._mask(_flat(tensordict), key, padding_side)
            mask = None if mask is None else mask.reshape(*tensordict.batch_size, -1)
        if mask is None:
            raise ValueError(
                f"expected a mask at {key}, found none; assistant masks need input_mode='history' "
                "or masks in the input"
            )
        return self._dist(td, mask)

    def _get_dist_with_prompt_mask(
        self, tensordict: TensorDictBase, *, padding_side: str = "left"
    ) -> LLMMaskedCategorical:
        """Return the distribution masked to what follows the prompt, else to the assistant mask."""
        if rows(_flat(tensordict), (self.tokens_key, "prompt")) is None:
            key = (self.masks_key, "all_assistant_mask")
            return self.get_dist(tensordict, mask_key=key, padding_side=padding_side)
        td = self._with_logits(tensordict, padding_side)
        attention = td.get((self.masks_key, "all_attention_mask"))
        after = self._after_prompt(_flat(tensordict), attention.reshape(-1, attention.shape[-1]))
        assert after is not None  # there are prompt tokens
        return self._dist(td, after.reshape(attention.shape))

    def _get_dist_with_assistant_mask(
        self, tensordict: TensorDictBase, *, padding_side: str = "left"
    ) -> LLMMaskedCategorical:
        """Return the distribution masked to assistant tokens; writes tokens.full to the caller."""
        td = self._with_logits(tensordict, padding_side)
        mask = td.get((self.masks_key, "all_assistant_mask"), None)
        if mask is None:
            raise ValueError(
                "expected an assistant mask, found none; use input_mode='history' or give "
                f"({self.masks_key!r}, 'all_assistant_mask')"
            )
        if rows(tensordict, (self.tokens_key, "full")) is None:
            tensordict.set((self.tokens_key, "full"), td.get((self.tokens_key, "full")))
        return self._dist(td, mask)

    def _get_dist_with_attention_mask(
        self, tensordict: TensorDictBase, *, padding_side: str = "left"
    ) -> LLMMaskedCategorical:
        """Return the distribution masked to real tokens."""
        return self.get_dist(tensordict, padding_side=padding_side)

    def _get_dist_with_custom_mask(
        self, tensordict: TensorDictBase, mask: Tensor, *, padding_side: str = "left"
    ) -> LLMMaskedCategorical:
        """Return the distribution under a bool mask [B, T]."""
        return self._dist(self._with_logits(tensordict, padding_side), mask)

    _get_sft_dist = _get_dist_with_prompt_mask
    _get_rlhf_dist = _get_dist_with_assistant_mask
    _get_generic_dist = _get_dist_with_attention_mask

    def _with_logits(self, tensordict: TensorDictBase, side: str) -> TensorDictBase:
        """Return a new td with tokens, masks and aligned logits; the caller's is not touched."""
        if self.generate:
            raise NotImplementedError(
                "a generating policy has no distribution over given tokens; "
                "use policy.get_new_version(generate=False)"
            )
        return _shaped(self._logits(_flat(tensordict), side), tensordict)

    def _mask(self, td: TensorDictBase, key: NestedKey, side: str) -> Tensor | None:
        """Return the mask at a key as bool [B, T], ragged ones padded on `side`; None without."""
        mask = rows(td, key)
        return None if mask is None else pad([row.bool() for row in mask], False, side=side)

    def _after_prompt(self, td: TensorDictBase, attention: Tensor) -> Tensor | None:
        """Return which attended tokens [B, T] follow tokens.prompt; None without prompt tokens."""
        prompt = rows(td, (self.tokens_key, "prompt"))
        if prompt is None:
            return None
        sizes = torch.tensor([len(p) for p in prompt], device=attention.device)[:, None]
        if is_ragged(td.get(self.tokens_key)):
            return attention & (attention.cumsum(-1) > sizes)
        # A padded prompt takes its full width of columns.
        columns = torch.arange(attention.shape[-1], device=attention.device)
        return attention & (columns >= sizes)

    def _dist(self, td: TensorDictBase, mask: Tensor) -> LLMMaskedCategorical:
        logits = td.get("logits")
        if mask.shape != logits.shape[:-1]:
            raise ValueError(
                f"expected a mask of shape {tuple(logits.shape[:-1])}, one entry a token, got "
                f"{tuple(mask.shape)}; was the batch padded differently?"
            )
        return LLMMaskedCategorical(logits=logits, mask=mask.bool())

    def log_prob(self, data: TensorDictBase, **get_kwargs: Any) -> Tensor:
        """Return the log-probs of the response; get_kwargs go to `TensorDict.get`."""
        if self.generate:
            raise RuntimeError("log_prob scores; expected generate=False, got generate=True")
        out = _shaped(self._score(_flat(data)), data).get(self.log_probs_key)
        if rows(out, "response") is None:
            raise ValueError(
                "expected prompt tokens or an assistant mask to tell the response from the prompt, "
                f"found neither; use input_mode='history' or give {(self.tokens_key, 'prompt')}"
            )
        if is_ragged(out):
            return out.get("response", **get_kwargs)
        padded = out.get("response")
        return list(padded) if get_kwargs.get("as_list") else padded

    @property
    def log_prob_keys(self) -> list[NestedKey]:
        """Return the keys that log-probs are written to."""
        return getattr(self, "_log_prob_keys", [(self.log_probs_key, "full")])

    @log_prob_keys.setter
    def log_prob_keys(self, value: list[NestedKey]) -> None:
        self._log_prob_keys = value

    @property
    def dist_params_keys(self) -> list[NestedKey]:
        """Return the key of the distribution's parameters."""
        return ["logits"]

    @property
    def dist_sample_keys(self) -> list[NestedKey]:
        """Return the key of the sampled tokens."""
        return [(self.tokens_key, "response")]


def _flat(td: TensorDictBase) -> TensorDictBase:
    """Return a td of any batch shape with one batch dimension."""
    return td if td.ndim == 1 else td.unsqueeze(0) if td.ndim == 0 else td.reshape(-1)


def _shaped(out: TensorDictBase, like: TensorDictBase) -> TensorDictBase:
    """Return a td [B] or [B, n] in the batch shape of `like`, and n."""
    if like.ndim == 0:
        return out.squeeze(0)
    return out if like.ndim == 1 else out.reshape(*like.batch_size, *out.batch_size[1:])
