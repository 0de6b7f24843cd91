"""Sampling: prompts in, exact ids and their log-probabilities out.

The log-prob of a token comes from the very logits it was drawn from, at the sampling temperature
and after the filters (see policies/filters.py).
Draws are by inverse CDF on counter-based uniforms, so a row's reply does not depend on the batch.
A prompt that several adjacent rows share is run once; rows that have ended leave the batch.
Left out on purpose: beams, and what only transformers' processors do (policies/generation_config).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from policies.filters import NO_FILTERS, Filters
from policies.padding import pad, pad_mask
from policies.random import inverse_cdf, uniforms


@dataclass(frozen=True)
class Sampled:
    """Replies of B rows; ids include the token that ended the reply."""

    ids: list[Tensor]  # B x [n] int64
    log_probs: list[Tensor]  # B x [n] float32, 0-free: every entry is a real log-prob
    complete: Tensor  # [B] bool, ended by itself


@dataclass(frozen=True)
class Stop:
    """What ends a reply: a token id, or a text that the decoded reply contains."""

    ids: frozenset[int]
    found: Callable[[list[int]], bool] | None = None  # called on a row's reply so far

    def __call__(self, replies: Tensor, ids: Tensor) -> Tensor:
        """Return which replies [n, t] end with their last token, [n] bool; ids as a tensor."""
        ended = torch.isin(replies[:, -1], ids)
        if self.found is None:
            return ended
        return ended | ended.new_tensor([self.found(r) for r in replies.tolist()])


@torch.no_grad()
def sample(
    model: nn.Module,
    prompts: Sequence[Tensor],
    *,
    streams: Tensor,
    stop: Stop,
    max_new_tokens: int,
    temperature: float = 1.0,
    filters: Filters = NO_FILTERS,
) -> Sampled:
    """Sample one reply per prompt (1-D ids); streams [B] int64; temperature 0 is greedy.

    Greedy log-probs are those of temperature 1; top-k, top-p and min-p change nothing there.
    """
    if any(len(p) == 0 for p in prompts):
        raise ValueError("expected at least one prompt token, got an empty prompt")
    size, device = len(prompts), prompts[0].device
    stop_ids = torch.tensor(sorted(stop.ids), dtype=torch.int64, device=device)
    starts = torch.tensor([len(p) for p in prompts], device=device)
    streams = streams.to(device)
    replies = torch.zeros(size, max_new_tokens, dtype=torch.int64, device=device)
    log_probs = torch.zeros(size, max_new_tokens, device=device)
    lengths = torch.zeros(size, dtype=torch.int64, device=device)
    complete = torch.zeros(size, dtype=torch.bool, device=device)
    alive = torch.arange(size, device=device)  # rows still running
    state = _Prefilled(model, prompts)
    seen = None if filters.repetition_penalty == 1 else _seen(prompts, state.logits.shape[-1])
    for step in range(max_new_tokens):
        said = None if seen is None else seen[alive]
        logits = filters.process(state.logits, seen=said, step=step, ends=stop_ids)  # [n, V]
        scaled = logits if temperature == 0 else filters.cut(logits / temperature)
        if temperature == 0:
            drawn = logits.argmax(-1)
        else:
            u = uniforms(streams[alive], starts[alive] + step)
            drawn = inverse_cdf(scaled.softmax(-1), u)
        if seen is not None:
            seen[alive, drawn] = True
        picked = scaled.gather(-1, drawn[:, None]).squeeze(-1) - scaled.logsumexp(-1)  # [n]
        replies[alive, step], log_probs[alive, step] = drawn, picked
        lengths[alive] = step + 1
        ended = stop(replies[alive, : step + 1], stop_ids)
        complete[alive] = ended
        going = (~ended).nonzero().squeeze(-1)  # the one wait for the device of a token
        alive = alive[going]
        if len(alive) == 0 or step + 1 == max_new_tokens:
            break
        state.advance(drawn, going)
    sizes = lengths.tolist()
    ids = [row[:n].clone() for row, n in zip(replies, sizes, strict=True)]
    values = [row[:n].clone() for row, n in zip(log_probs, sizes, strict=True)]
    return Sampled(ids, values, complete)


class _Prefilled:
    """The running forward: cache, mask and the next-token logits of the rows still alive."""

    def __init__(self, model: nn.Module, prompts: Sequence[Tensor]) -> None:
        self.model = model
        unique, owner = _unique(prompts)
        mask = pad_mask([len(p) for p in unique], side="left", device=prompts[0].device)
        position = (mask.cumsum(-1) - 1).clamp(min=0)
        out = model(
            input_ids=pad(unique, side="left"),
            attention_mask=mask,
            position_ids=position,
            use_cache=True,
            logits_to_keep=1,
        )
        self.cache = out.past_key_values
        self.cache.batch_select_indices(owner)
        self.mask = mask[owner]  # [n, L]
        self.position = position[owner, -1:] + 1  # [n, 1]
        self.logits = out.logits[owner, -1].float()  # [n, V]

    def advance(self, drawn: Tensor, going: Tensor) -> None:
        """Feed the drawn tokens of the rows `going` on; the others leave."""
        if len(going) < len(drawn):
            self.cache.batch_select_indices(going)
            self.mask, self.position = self.mask[going], self.position[going]
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(going), 1)], -1)
        out = self.model(
            input_ids=drawn[going, None],
            attention_mask=self.mask,
            position_ids=self.position,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.position = self.position + 1
        self.logits = out.logits[:, -1].float()


def _seen(prompts: Sequence[Tensor], size: int) -> Tensor:
    """Return which of `size` tokens are in each prompt, [B, V]."""
    seen = torch.zeros(len(prompts), size, dtype=torch.bool, device=prompts[0].device)
    for row, prompt in zip(seen, prompts, strict=True):
        row[prompt] = True
    return seen


def _unique(prompts: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return the prompts with adjacent repeats run together, and which one each row uses [B]."""
    unique, owner = [], []
    for prompt in prompts:
        if not unique or not (unique[-1] is prompt or torch.equal(unique[-1], prompt)):
            unique.append(prompt)
        owner.append(len(unique) - 1)
    return unique, torch.tensor(owner, device=prompts[0].device)
