"""What a generating policy may be asked for, checked: names, types, ranges, and what is refused.

Names are those of transformers' GenerationConfig, with the common other names of some; each of its
fields is in one group here. The sampler fulfils most of them; those that only transformers' own
`generate` can are handed on to it.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from policies.filters import NO_FILTERS, Filters


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ALIASES = {
    "max_tokens": "max_new_tokens",
    "n": "num_return_sequences",
    "stop_sequences": "stop",
    "stop_strings": "stop",
}
OWN = ("max_prompt_tokens", "num_return_sequences", "pad_token_id", "skip_special_tokens")
FILTERS = tuple(asdict(NO_FILTERS))
# Processors of transformers; what they leave of the distribution has log-probs like any other.
HANDED_ON = _names(
    "typical_p top_h epsilon_cutoff eta_cutoff no_repeat_ngram_size bad_words_ids suppress_tokens "
    "begin_suppress_tokens sequence_bias exponential_decay_length_penalty renormalize_logits "
    "remove_invalid_values forced_eos_token_id guidance_scale"
)
# How transformers computes: the same distribution. Handed on where its `generate` is used anyway.
COMPUTES = _names(
    "use_cache cache_implementation cache_config max_cache_len prefill_chunk_size compile_config "
    "disable_compile low_memory"
)
# What has no effect on a reply: what `generate` returns, or drafts of it. Never handed on.
IDLE = _names(
    "output_scores output_logits output_attentions output_hidden_states return_dict_in_generate "
    "return_legacy_cache prompt_lookup_num_tokens max_matching_ngram_size "
    "continuous_batching_config bos_token_id transformers_version"
)
# What is refused, at other values than those of NEUTRAL, and why.
REFUSED = {
    "num_beams num_beam_groups early_stopping length_penalty diversity_penalty constraints "
    "force_words_ids": (
        "a beam search draws from no distribution, so its replies have no log-probs"
    ),
    "penalty_alpha dola_layers": (
        "candidates or layers are compared, so a reply is drawn from no distribution of the model"
    ),
    "max_length min_length": (
        "lengths count new tokens here: max_new_tokens, min_new_tokens, max_prompt_tokens"
    ),
    "max_time": "a reply would end where no token shows it",
    "logprobs prompt_logprobs": "say return_log_probs of the wrapper",
    "is_assistant num_assistant_tokens num_assistant_tokens_schedule use_mtp "
    "assistant_confidence_threshold assistant_early_exit assistant_lookbehind "
    "assistant_ensemble_weight target_lookbehind speculation_type": (
        "there is no assistant model to draft with, and drafts would change the speed only"
    ),
    "watermarking_config": "a watermark shifts the logits by a key that no scoring knows",
    "encoder_repetition_penalty encoder_no_repeat_ngram_size decoder_start_token_id "
    "forced_bos_token_id": ("it is for models with an encoder, this one continues its prompt"),
    "token_healing": "it would change the ids of the prompt, which are kept",
}
NEUTRAL = dict.fromkeys(("num_beams", "num_beam_groups"), 1)
NEUTRAL |= dict.fromkeys(("length_penalty", "encoder_repetition_penalty"), 1)
NEUTRAL |= dict.fromkeys(_names("diversity_penalty penalty_alpha encoder_no_repeat_ngram_size"), 0)
NEUTRAL |= dict.fromkeys(
    _names("early_stopping is_assistant use_mtp token_healing logprobs"), False
)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _is_list(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple | set | frozenset) and all(map(of, value))


# The names, what they must be, and whether a value is that.
TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "max_new_tokens max_prompt_tokens num_return_sequences top_k min_new_tokens "
    "no_repeat_ngram_size": ("an integer", _is_int),
    "temperature top_p min_p repetition_penalty typical_p top_h epsilon_cutoff eta_cutoff "
    "guidance_scale": ("a number", lambda v: _is_int(v) or isinstance(v, float)),
    "do_sample skip_special_tokens renormalize_logits remove_invalid_values": (
        "True or False",
        lambda v: isinstance(v, bool),
    ),
    "stop": ("a list of texts", lambda v: _is_list(v, lambda t: isinstance(t, str) and t)),
    "pad_token_id": ("a token id", _is_id),
    "eos_token_id forced_eos_token_id": (
        "a token id or a list of them",
        lambda v: _is_id(v) or _is_list(v, _is_id),
    ),
    "suppress_tokens begin_suppress_tokens": (
        "a list of token ids",
        lambda v: _is_list(v, _is_id),
    ),
    "bad_words_ids": (
        "a list of lists of token ids",
        lambda v: _is_list(v, lambda ids: _is_list(ids, _is_id)),
    ),
    "exponential_decay_length_penalty": (
        "a pair of numbers (start, factor)",
        lambda v: isinstance(v, list | tuple) and len(v) == 2 and _is_int(v[0]),
    ),
    "sequence_bias": ("a dict or list of ids and biases", lambda v: isinstance(v, dict | list)),
}


@dataclass(frozen=True)
class GenerateKwargs:
    """How to generate: temperature 0 is greedy; lengths in tokens; stop texts end a reply."""

    temperature: float = 1.0
    max_new_tokens: int = 64
    max_prompt_tokens: int | None = None
    stop: tuple[str, ...] = ()
    num_return_sequences: int | None = None
    eos_token_id: tuple[int, ...] | None = None  # instead of the model's and the template's
    pad_token_id: int | None = None
    skip_special_tokens: bool = False  # in the texts
    filters: Filters = NO_FILTERS
    handed_on: dict[str, Any] = field(default_factory=dict)
    computes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, kwargs: dict[str, Any]) -> "GenerateKwargs":
        """Return the checked arguments; ValueErrors say the names, types and ranges expected.

        >>> GenerateKwargs.read({"do_sample": False, "max_tokens": 5}).temperature
        0.0
        """
        asked = {k: v for k, v in _renamed(kwargs).items() if v is not None}
        greedy = asked.pop("do_sample", True) is False
        if greedy and asked.get("temperature", 0) != 0:
            raise ValueError(
                "When do_sample=False (greedy decoding), temperature must be 0, got "
                f"{asked['temperature']}; drop one of them"
            )
        eos = asked.pop("eos_token_id", None)
        made = cls(
            temperature=0.0 if greedy else float(asked.pop("temperature", 1.0)),
            max_new_tokens=asked.pop("max_new_tokens", 64),
            stop=tuple(asked.pop("stop", ())),
            eos_token_id=None if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            filters=Filters(**{k: asked.pop(k) for k in FILTERS if k in asked}),
            **{k: asked.pop(k) for k in OWN if k in asked},
            handed_on={k: asked.pop(k) for k in HANDED_ON if k in asked},
            computes={k: asked.pop(k) for k in COMPUTES if k in asked},
        )
        _refuse(asked)
        made._check()
        return made

    def _check(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"expected temperature >= 0, got {self.temperature}")
        if self.max_new_tokens < 1:
            raise ValueError(f"expected max_new_tokens >= 1, got {self.max_new_tokens}")
        if self.num_return_sequences is not None and self.num_return_sequences < 1:
            raise ValueError(f"expected n >= 1, got {self.num_return_sequences}")
        if self.filters.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"expected min_new_tokens <= max_new_tokens, got {self.filters.min_new_tokens} and "
                f"{self.max_new_tokens}"
            )
        if self.handed_on and self.stop:
            raise ValueError(
                f"expected stop or {sorted(self.handed_on)}, got both: with these, only tokens "
                "(eos_token_id) can end a reply"
            )
        if self.handed_on:
            self.config()  # transformers' own checks, before anything is loaded or generated

    @property
    def num_samples(self) -> int | None:
        """Return how many replies a prompt gets; None is one, without a dimension for it."""
        count = self.num_return_sequences
        return None if count == 1 else count

    @property
    def narrowed(self) -> list[str]:
        """Return what makes the log-probs others than those of the model at the temperature."""
        return [*self._filters(), *self.handed_on]

    def _filters(self) -> dict[str, Any]:
        chosen, neutral = asdict(self.filters), asdict(NO_FILTERS)
        return {k: v for k, v in chosen.items() if v != neutral[k]}

    def config(self) -> GenerationConfig:
        """Return what transformers' own generate is asked for."""
        more = self._filters() | self.handed_on | self.computes
        if self.temperature == 0:
            return GenerationConfig(do_sample=False, **more)
        return GenerationConfig(do_sample=True, temperature=self.temperature, **more)

    def stop_finder(self, tokenizer: Any) -> Callable[[list[int]], bool] | None:
        """Return what tells whether a reply holds a stop text; None if there are none."""
        if not self.stop:
            return None
        if tokenizer is None:
            raise ValueError(f"expected a tokenizer to find stop={list(self.stop)}, got none")
        return lambda ids: any(text in tokenizer.decode(ids) for text in self.stop)

    def check_positions(self, most: int | None) -> None:
        """Raise where the longest prompt and reply together exceed the model's `most` positions."""
        asked = f"policy.max_new_tokens={self.max_new_tokens}"
        if self.max_prompt_tokens is not None:
            asked = f"policy.max_prompt_tokens={self.max_prompt_tokens} and {asked}"
        total = (self.max_prompt_tokens or 1) + self.max_new_tokens
        if most is not None and total > most:
            raise ValueError(
                f"{asked} make up to {total} tokens, the model's max_position_embeddings is "
                f"{most}; lower policy.max_prompt_tokens or policy.max_new_tokens"
            )

    def check_lengths(
        self, prompts: Tensor, attention: Tensor, tokenizer: Any, most: int | None = None
    ) -> None:
        """Raise where a prompt [B, T] exceeds max_prompt_tokens, or with its reply `most`."""
        limit, new = self.max_prompt_tokens, self.max_new_tokens
        sizes = attention.sum(-1)  # [B]
        room = float("inf") if most is None else most - new
        over = sizes > min(room, float("inf") if limit is None else limit)
        if not over.any():
            return
        i = int(over.int().argmax())
        size, end = int(sizes[i]), prompts[i][attention[i]][-40:].tolist()
        end = end if tokenizer is None else tokenizer.decode(end)
        if limit is not None and size > limit:
            raise ValueError(
                f"prompt {i} of the batch has {size} tokens, policy.max_prompt_tokens is "
                f"{limit}; raise it, or drop the row: {end!r}"
            )
        raise ValueError(
            f"prompt {i} of the batch has {size} tokens, with policy.max_new_tokens={new} "
            f"more than the model's max_position_embeddings={most}; lower "
            "policy.max_new_tokens, or drop the row (policy.max_prompt_tokens is the bound "
            f"for it): {end!r}"
        )


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by the names used here; two names of one or a wrong type are refused."""
    types = {name: kind for names, kind in TYPES.items() for name in _names(names)}
    out: dict[str, Any] = {}
    for name, value in kwargs.items():
        known = ALIASES.get(name, name)
        if known in out:
            both = sorted(k for k in kwargs if ALIASES.get(k, k) == known)
            raise ValueError(f"expected {' or '.join(both)}, got both; drop one")
        expected, good = types.get(known, ("anything", lambda v: True))
        if value is not None and not good(value):
            raise ValueError(f"expected {name} to be {expected}, got {value!r}")
        out[known] = value
    return out


def _refuse(asked: dict[str, Any]) -> None:
    """Raise ValueError for the first name that is unknown or that nothing here can follow."""
    reasons = {name: reason for names, reason in REFUSED.items() for name in _names(names)}
    for name, value in asked.items():
        if name in IDLE or value == NEUTRAL.get(name, ...):
            continue
        if name in reasons:
            raise ValueError(f"generate_kwargs has {name}={value!r}: {reasons[name]}")
        offered = [*FILTERS, *HANDED_ON, *ALIASES, *OWN, "temperature", "max_new_tokens"]
        near = get_close_matches(name, offered, 1)
        hint = f"did you mean {near[0]}?" if near else f"expected names of {sorted(offered)}"
        raise ValueError(f"generate_kwargs has an unknown {name!r}; {hint}")
