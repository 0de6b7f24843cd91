"""Arguments of transformers' GenerationConfig that leash's sampler does not follow itself.

Each field of it is here or in generate_kwargs.py, in one group.
"""

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from policies.wrappers.generate_kwargs import (
    ALIASES,
    FLAG,
    IDS,
    NUMBER,
    OWN,
    WHOLE,
    check_type,
    is_id,
    is_int,
    is_list,
)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Processors of transformers: what they leave of the distribution has log-probs like any other.
HANDED_ON: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(_names("typical_p top_h epsilon_cutoff eta_cutoff guidance_scale"), NUMBER),
    **dict.fromkeys(_names("renormalize_logits remove_invalid_values"), FLAG),
    **dict.fromkeys(
        _names("suppress_tokens begin_suppress_tokens"),
        ("a list of token ids", lambda v: is_list(v, is_id)),
    ),
    "no_repeat_ngram_size": WHOLE,
    "forced_eos_token_id": IDS,
    "bad_words_ids": (
        "a list of lists of token ids",
        lambda v: is_list(v, lambda ids: is_list(ids, is_id)),
    ),
    "exponential_decay_length_penalty": (
        "a pair of numbers (start, factor)",
        lambda v: isinstance(v, list | tuple) and len(v) == 2 and is_int(v[0]),
    ),
    "sequence_bias": ("a dict or list of ids and biases", lambda v: isinstance(v, dict | list)),
}
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
# Arguments of `generate` that are in no config: processors whose log-probs are followed.
OBJECTS = _names("logits_processor prefix_allowed_tokens_fn")
# What draws from no distribution, or ends where no token shows it: only without log-probs.
SILENT = _names(
    "num_beams num_beam_groups early_stopping length_penalty diversity_penalty constraints "
    "force_words_ids penalty_alpha dola_layers max_time watermarking_config"
)
SILENT_OBJECTS = _names("stopping_criteria assistant_model streamer custom_generate")
# What is refused, at other values than those of NEUTRAL, and why.
REFUSED = {
    "max_length min_length": (
        "lengths count new tokens here: max_new_tokens, min_new_tokens, max_prompt_tokens"
    ),
    "logprobs prompt_logprobs": "say return_log_probs of the wrapper",
    "is_assistant num_assistant_tokens num_assistant_tokens_schedule use_mtp "
    "assistant_confidence_threshold assistant_early_exit assistant_lookbehind "
    "assistant_ensemble_weight target_lookbehind speculation_type": (
        "there is no assistant model to draft with, and drafts would change the speed only"
    ),
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


def sort(asked: dict[str, Any], *, log_probs: bool) -> dict[str, dict[str, Any]]:
    """Return what is handed on, and how transformers is to compute; refuse what has no use here.

    Without `log_probs` also what draws from no distribution.
    """
    reasons = {name: reason for names, reason in REFUSED.items() for name in _names(names)}
    silent = "it has no log-probs that could be followed; say return_log_probs=False with it"
    reasons |= dict.fromkeys((*SILENT, *SILENT_OBJECTS), silent)
    done: dict[str, dict[str, Any]] = {"handed_on": {}, "computes": {}, "objects": {}}
    for name, value in asked.items():
        if name in HANDED_ON:
            check_type(name, value, HANDED_ON[name])
            done["handed_on"][name] = value
        elif name in COMPUTES:
            done["computes"][name] = value
        elif name in IDLE or (name in NEUTRAL and value == NEUTRAL[name]):
            continue
        elif name in SILENT and not log_probs:
            done["handed_on"][name] = value
        elif name in OBJECTS or (name in SILENT_OBJECTS and not log_probs):
            done["objects"][name] = value
        elif name in reasons:
            raise ValueError(f"generate_kwargs has {name}={value!r}: {reasons[name]}")
        else:
            offered = [*OWN, *HANDED_ON, *OBJECTS, *ALIASES]
            near = get_close_matches(name, offered, 1)
            hint = f"did you mean {near[0]}?" if near else f"expected names of {sorted(offered)}"
            raise ValueError(f"generate_kwargs has an unknown {name!r}; {hint}")
    return done
