"""How a wrapper writes ragged rows into the containers, padded or lazily stacked.

Fields named prompt are padded left, response right, everything else (full and the masks) around the
column where the prompt ends.
"""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import lazy_stack
from torch import Tensor

from policies.containers import LogProbs, Masks, Tokens
from policies.padding import pad, pad_around, unpad
from policies.sampler import Sampled


def store(
    container: type, fields: dict[str, list[Tensor]], *, padded: bool, cuts: Sequence[int]
) -> Any:
    """Return `container` [B] of the rows in `fields`; cuts [B] are the prompt lengths."""
    size = len(cuts)
    if not padded:
        rows = [{name: values[i] for name, values in fields.items()} for i in range(size)]
        return lazy_stack([container(**row, padded=False) for row in rows])
    dense = {name: _dense(name, values, cuts) for name, values in fields.items()}
    return container(**dense, padded=True, batch_size=[size])


def _dense(name: str, values: list[Tensor], cuts: Sequence[int]) -> Tensor:
    if name == "prompt":
        return pad(values, side="left")
    if name == "response":
        return pad(values)
    return pad_around(values, cuts)


def store_padded(
    container: type,
    fields: dict[str, Tensor],
    attention: Tensor,
    *,
    padded: bool,
    parts: dict[str, Tensor] | None = None,
) -> Any:
    """Return `container` [B] of dense fields [B, T], unpadded into a lazy stack unless `padded`.

    `parts` are masks [B, T]: each names a field that holds the entries of `full` inside it.
    """
    inside = {name: unpad(fields["full"], mask) for name, mask in (parts or {}).items()}
    if padded:
        dense = {name: pad(values) for name, values in inside.items()}
        return container(**fields, **dense, padded=True, batch_size=[len(attention)])
    ragged = {name: unpad(value, attention) for name, value in fields.items()}
    return store(container, ragged | inside, padded=False, cuts=[0] * len(attention))


def generated(prompts: list[Tensor], assistant: list[Tensor], drawn: Sampled) -> dict[type, dict]:
    """Return the rows of prompts and replies: container -> field -> B rows.

    `assistant` are the assistant masks of the prompts; log-probs of prompt tokens read 0.
    """
    pairs = list(zip(prompts, drawn.ids, strict=True))
    full = [torch.cat(pair) for pair in pairs]
    reply = [torch.arange(len(p) + len(r), device=p.device) >= len(p) for p, r in pairs]
    zeros = [torch.zeros(len(p), device=p.device) for p in prompts]
    values = [torch.cat(pair) for pair in zip(zeros, drawn.log_probs, strict=True)]
    marks = [torch.cat([a, m[len(a) :]]) for a, m in zip(assistant, reply, strict=True)]
    masks = {
        "all_attention_mask": [torch.ones_like(m) for m in reply],
        "all_assistant_mask": marks,
        "all_response_mask": reply,
    }
    return {
        Tokens: {"prompt": prompts, "response": drawn.ids, "full": full},
        Masks: masks,
        LogProbs: {"prompt": zeros, "response": drawn.log_probs, "full": values},
    }
