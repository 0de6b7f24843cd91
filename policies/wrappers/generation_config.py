"""Replies as a GenerationConfig of transformers asks for, by the model's own `generate`.

For what leash's sampler leaves out (see generate_kwargs.py). The log-prob of a token is
that of the processed scores it was drawn from.
"""

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from policies.sampler import Sampled

# What a row of a batch cannot hold: several replies a prompt, or an end that no token shows.
REFUSED = {"num_return_sequences": 1, "num_beams": 1, "stop_strings": None, "max_time": None}
# What a config leaves open is this, not what the model's own config says.
NEUTRAL = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
}


def follow(
    model: nn.Module,
    prompts: Tensor,
    attention: Tensor,
    config: Any,
    *,
    max_new_tokens: int,
    ends: Collection[int],
    pad_token_id: int,
    log_probs: bool = True,
    **objects: Any,
) -> Sampled:
    """Return a reply to each prompt [B, T], padded left, as `config` asks for it.

    `max_new_tokens` and the EOS ids `ends` replace those of the config. Beams, several replies a
    prompt and ends that no token shows are ValueErrors; without `log_probs`, which then read 0,
    they are not. `objects` are further arguments of `generate`.
    """
    for name, only in REFUSED.items() if log_probs else ():
        value = getattr(config, name, None)
        if value is not None and value != only:
            raise ValueError(f"expected a generation_config without {name}, got {value!r}")
    config = copy.deepcopy(config)
    for name, value in NEUTRAL.items():
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    config.max_new_tokens, config.max_length = max_new_tokens, None
    config.eos_token_id, config.pad_token_id = sorted(ends) or None, pad_token_id
    config.return_dict_in_generate = config.output_scores = True
    out = model.generate(prompts, attention_mask=attention, generation_config=config, **objects)
    reply = out.sequences[:, prompts.shape[1] :]  # [B, n]
    values = torch.zeros(reply.shape, device=reply.device)
    if log_probs:
        told = [
            scores.float().log_softmax(-1).gather(-1, token[:, None]).squeeze(-1)
            for scores, token in zip(out.scores, reply.unbind(-1), strict=True)
        ]
        values = torch.stack(told, -1)
    played = until_end(reply, ends)
    complete = torch.isin(reply, _tensor(ends, reply)).any(-1)
    if not log_probs:  # rows that something else than a token has ended are filled up
        filled = (reply == pad_token_id).flip(-1).cumprod(-1).flip(-1).bool()
        played &= ~filled | complete[:, None]
    ids, values = reply.masked_fill(~played, 0), values.masked_fill(~played, 0)
    return Sampled(ids, values, played.sum(-1), complete)


def temperature(config: Any) -> float:
    """Return the temperature that a config samples at; greedy and no config count as 1."""
    asked = getattr(config, "temperature", None)
    return 1.0 if asked is None or not config.do_sample else float(asked)


def until_end(reply: Tensor, ends: Collection[int]) -> Tensor:
    """Return which tokens of replies [B, n] count: all up to the first of `ends`, itself included.

    >>> until_end(torch.tensor([[7, 2, 2], [2, 7, 7]]), {2}).int().tolist()
    [[1, 1, 0], [1, 0, 0]]
    """
    stops = torch.isin(reply, _tensor(ends, reply)).long()
    return stops.cumsum(-1) - stops == 0


def _tensor(ids: Collection[int], like: Tensor) -> Tensor:
    return torch.tensor(sorted(ids), dtype=like.dtype, device=like.device)
