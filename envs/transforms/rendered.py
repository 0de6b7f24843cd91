"""The assistant mask of histories as a tokenizer's template renders them.

For models that give none, and for a tokenizer or a template that the user named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from envs.transforms.ragged import read_rows

if TYPE_CHECKING:
    from envs.transforms.log_probs import RetrieveLogProb

# What of tokenizer_kwargs is as it is, and what may be chosen. Rows are padded elsewhere.
FIXED = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
FIXED |= {"add_generation_prompt": False, "return_tensors": "pt"}
CHOSEN = ("chat_template", "chat_template_name")


def rendered_mask(history: Any, tokenizer: Any, options: dict[str, Any]) -> list[Tensor]:
    """Return the assistant mask of histories, a row each, under a template in `options`."""
    chosen = {name: options[name] for name in CHOSEN if name in options}
    found = history.apply_chat_template(tokenizer=tokenizer, padding=False, **FIXED, **chosen)
    return list(read_rows(found, "assistant_masks"))


def check_rendering(transform: RetrieveLogProb, options: dict[str, Any]) -> bool:
    """Return whether the arguments ask for another mask than the model's own.

    What would change nothing is a ValueError.
    """
    tokenizer = transform.tokenizer
    own = tokenizer is None or tokenizer is getattr(transform.model, "tokenizer", None)
    if not own and not hasattr(tokenizer, "apply_chat_template"):
        raise ValueError(f"expected a tokenizer with a chat template, got {tokenizer!r:.80}")
    known = {*CHOSEN, "padding"}
    wrong = {k: v for k, v in options.items() if k not in known and (k, v) not in FIXED.items()}
    if wrong:
        raise ValueError(
            f"tokenizer_kwargs: expected {' or '.join(CHOSEN)}, and {FIXED} as it is, got "
            f"{wrong}; how the model reads a history is an argument of the model"
        )
    renders = not own or any(name in options for name in CHOSEN)
    if renders and not transform.assistant_only:
        raise ValueError(
            "tokenizer and tokenizer_kwargs render the assistant mask, got them with "
            "assistant_only=False; leave them out"
        )
    return renders
