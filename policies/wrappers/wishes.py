"""What may be wished for in generate_kwargs: names, types, and why the rest is refused.

The names are those of transformers' GenerationConfig; every field of it is in one group here.
"""

from collections.abc import Callable
from dataclasses import asdict
from difflib import get_close_matches
from typing import Any

from policies.filters import NO_FILTERS

ALIASES = {
    "max_tokens": "max_new_tokens",
    "n": "num_return_sequences",
    "stop_sequences": "stop",
    "stop_strings": "stop",
}
OWN = ("max_prompt_tokens", "num_return_sequences", "pad_token_id", "skip_special_tokens")
FILTERS = tuple(asdict(NO_FILTERS))
# Processors of transformers; what they leave of the distribution has log-probs like any other.
HANDED_ON = (
    *("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size"),
    *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"),
    *("exponential_decay_length_penalty", "renormalize_logits", "remove_invalid_values"),
    *("forced_eos_token_id", "guidance_scale"),
)
# How transformers computes: the same distribution. Handed on where its `generate` is used anyway.
COMPUTES = (
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"),
    *("compile_config", "disable_compile", "low_memory"),
)
# What has no effect on a reply: what `generate` returns, or drafts of it. Never handed on.
IDLE = (
    *("output_scores", "output_logits", "output_attentions", "output_hidden_states"),
    *("return_dict_in_generate", "return_legacy_cache", "prompt_lookup_num_tokens"),
    *("max_matching_ngram_size", "continuous_batching_config", "bos_token_id"),
    "transformers_version",
)
# Reason -> what it refuses, at other values than those of NEUTRAL.
REFUSED = {
    "a beam search draws from no distribution, so its replies have no log-probs": (
        *("num_beams", "num_beam_groups", "early_stopping", "length_penalty"),
        *("diversity_penalty", "constraints", "force_words_ids"),
    ),
    "candidates or layers are compared, so a reply is drawn from no distribution of the model": (
        *("penalty_alpha", "dola_layers"),
    ),
    "lengths count new tokens here: max_new_tokens, min_new_tokens, max_prompt_tokens": (
        *("max_length", "min_length"),
    ),
    "a reply would end where no token shows it": ("max_time",),
    "say return_log_probs of the wrapper": ("logprobs", "prompt_logprobs"),
    "there is no assistant model to draft with, and drafts would change the speed only": (
        *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "use_mtp"),
        *("assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind"),
        *("assistant_ensemble_weight", "target_lookbehind", "speculation_type"),
    ),
    "a watermark shifts the logits by a key that no scoring knows": ("watermarking_config",),
    "it is for models with an encoder, this one continues its prompt": (
        *("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "decoder_start_token_id"),
        "forced_bos_token_id",
    ),
    "it would change the ids of the prompt, which are kept": ("token_healing",),
}
NEUTRAL = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "length_penalty": 1.0,
    "diversity_penalty": 0.0,
    "early_stopping": False,
    "penalty_alpha": 0.0,
    "is_assistant": False,
    "use_mtp": False,
    "token_healing": False,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "logprobs": False,
}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _is_list(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple | set | frozenset) and all(map(of, value))


# What is expected -> whether a value is that, and which wishes must be.
TYPES: dict[str, tuple[Callable[[Any], bool], tuple[str, ...]]] = {
    "an integer": (
        _is_int,
        (
            *("max_new_tokens", "max_prompt_tokens", "num_return_sequences", "top_k"),
            *("min_new_tokens", "no_repeat_ngram_size"),
        ),
    ),
    "a number": (
        lambda v: _is_int(v) or isinstance(v, float),
        (
            *("temperature", "top_p", "min_p", "repetition_penalty", "typical_p", "top_h"),
            *("epsilon_cutoff", "eta_cutoff", "guidance_scale"),
        ),
    ),
    "True or False": (
        lambda v: isinstance(v, bool),
        ("do_sample", "skip_special_tokens", "renormalize_logits", "remove_invalid_values"),
    ),
    "a list of texts": (lambda v: _is_list(v, lambda t: isinstance(t, str) and t), ("stop",)),
    "a token id": (_is_id, ("pad_token_id",)),
    "a token id or a list of them": (
        lambda v: _is_id(v) or _is_list(v, _is_id),
        ("eos_token_id", "forced_eos_token_id"),
    ),
    "a list of token ids": (
        lambda v: _is_list(v, _is_id),
        ("suppress_tokens", "begin_suppress_tokens"),
    ),
    "a list of lists of token ids": (
        lambda v: _is_list(v, lambda ids: _is_list(ids, _is_id)),
        ("bad_words_ids",),
    ),
    "a pair of numbers (start, factor)": (
        lambda v: isinstance(v, list | tuple) and len(v) == 2 and _is_int(v[0]),
        ("exponential_decay_length_penalty",),
    ),
    "a dict or list of ids and biases": (
        lambda v: isinstance(v, dict | list),
        ("sequence_bias",),
    ),
}


def renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the wishes under the names used here; two names of one or a wrong type are refused."""
    out: dict[str, Any] = {}
    for name, value in kwargs.items():
        known = ALIASES.get(name, name)
        if known in out:
            both = sorted(k for k in kwargs if ALIASES.get(k, k) == known)
            raise ValueError(f"expected {' or '.join(both)}, got both; drop one")
        for wanted, (good, names) in TYPES.items():
            if known in names and value is not None and not good(value):
                raise ValueError(f"expected {name} to be {wanted}, got {value!r}")
        out[known] = value
    return out


def refuse(asked: dict[str, Any]) -> None:
    """Raise ValueError for the first wish that nothing here fulfils."""
    reasons = {name: reason for reason, names in REFUSED.items() for name in names}
    for name, value in asked.items():
        if name in IDLE or value == NEUTRAL.get(name, ...):
            continue
        if name not in reasons:
            offered = [*FILTERS, *HANDED_ON, *ALIASES, *OWN, "temperature", "max_new_tokens"]
            near = get_close_matches(name, offered, 1)
            hint = f"did you mean {near[0]}?" if near else f"expected names of {sorted(offered)}"
            raise ValueError(f"generate_kwargs has an unknown {name!r}; {hint}")
        raise ValueError(f"generate_kwargs has {name}={value!r}: {reasons[name]}")
