"""The arguments of a wrapper, checked against each other; every fault is a ValueError."""

from typing import Any

import torch

from policies.wrappers.batching import BatchQueue
from policies.wrappers.generate_kwargs import GenerateKwargs


def check_settings(settings: dict[str, Any], limits: GenerateKwargs) -> None:
    """Raise ValueError for arguments of a wrapper that do not go together."""
    mode, generate = settings["input_mode"], settings["generate"]
    if mode not in ("history", "text", "tokens"):
        raise ValueError(f"input_mode must be one of history, text, tokens; got {mode!r}")
    if not isinstance(settings["pad_output"], bool):
        raise ValueError(f"pad_output must be a boolean, got {settings['pad_output']!r}")
    if settings["inplace"] not in (True, False, "empty", None):
        raise ValueError(f"inplace must be True, False or 'empty', got {settings['inplace']!r}")
    silent = settings["return_log_probs"] is False or settings["log_probs_key"] is None
    if not generate and silent:
        raise ValueError(
            "return_log_probs must be True when generate=False. It is what scoring returns; give "
            "it a log_probs_key too"
        )
    if generate and settings["pad_model_input"] is not None:
        raise ValueError(
            "pad_model_input is not supported when generate=True: it is how sequences are scored"
        )
    layout = settings["layout"]
    if layout not in (None, torch.strided, torch.jagged):
        raise ValueError(f"expected layout torch.strided or torch.jagged, got {layout!r}")
    if generate:
        _check_samples(settings, limits)


def _check_samples(settings: dict[str, Any], limits: GenerateKwargs) -> None:
    asked, count = settings["num_samples"], settings["num_samples"] or limits.num_samples
    if asked is not None and asked < 1:
        raise ValueError(f"expected num_samples >= 1, got {asked}")
    if asked is not None and limits.num_samples not in (None, asked):
        raise ValueError(
            f"num_samples={asked} differs from generate_kwargs['n']={limits.num_samples}; drop one"
        )
    if count is None:
        return
    if settings["inplace"] in (True, "empty"):
        raise ValueError("num_samples changes the batch shape; expected inplace=False (or None)")
    if count > 1 and limits.temperature == 0:
        raise ValueError(f"num_samples={count} greedy replies are all the same; raise temperature")
    if settings["layout"] is not None and not settings["pad_output"]:
        raise ValueError("nested outputs have one batch dimension; drop num_samples or layout")


def queue_of(
    batching: bool | None, min_size: int | None, max_size: int | None, timeout: float
) -> BatchQueue | None:
    """Return the queue that the batching arguments ask for; sizes alone ask for one."""
    sized = min_size is not None or max_size is not None
    if batching is False and sized:
        raise ValueError("min_batch_size and max_batch_size must be None if batching is False.")
    if not batching and not sized:
        return None
    size = 1 if min_size is None else min_size
    return BatchQueue(min_size=size, max_size=max_size, timeout=timeout)


def tokenizer_options(kwargs: dict[str, Any] | None, input_mode: str) -> dict[str, Any]:
    """Return what of tokenizer_kwargs changes the ids of a text.

    Padding, masks and tensors are the wrapper's own business: it pads left, by lengths.
    """
    options = dict(kwargs or {})
    options.pop("padding", None)
    for name, only in (
        ("return_attention_mask", (True, None)),
        ("return_tensors", ("pt", None)),
        ("padding_side", ("left", None)),
    ):
        value = options.pop(name, None)
        if value not in only:
            raise ValueError(f"expected tokenizer_kwargs with {name}={only[0]!r}, got {value!r}")
    if options and input_mode != "text":
        raise ValueError(
            f"tokenizer_kwargs {sorted(options)} are for input_mode='text', got {input_mode!r}: a "
            "chat's ids come from its template, tokens are ids already"
        )
    return options
