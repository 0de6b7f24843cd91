"""Sampling: prompts in, exact ids and their log-probabilities out.

The log-prob of a token comes from the very logits it was sampled from, at the sampling temperature
and after the filters (see Filters).
A token is drawn by inverse CDF from a uniform number that depends only on the row's stream and the
position, so a response does not depend on the other rows of the batch. If adjacent rows have the
same prompt, its forward runs once. Finished rows are removed from the batch. Not supported: beam
search, because it does not sample; logits processors (see torchrl/generate_kwargs.py).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from policies.decoding import decode
from policies.host import send
from policies.padding import pad
from policies.random import inverse_cdf, uniforms


@dataclass(frozen=True)
class Filters:
    """Filters of the sampling distribution; the defaults filter nothing."""

    top_k: int = 0  # the k likeliest tokens; 0 = all
    top_p: float = 1.0  # the likeliest tokens that hold this probability together
    min_p: float = 0.0  # tokens at least this probable, relative to the likeliest
    min_new_tokens: int = 0  # no end token before this many tokens
    repetition_penalty: float = 1.0  # divides logits > 0 of seen tokens, multiplies logits < 0

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range."""
        most = {"top_p": 1, "min_p": 1}
        for name, value in vars(self).items():
            if not 0 <= value <= most.get(name, value):
                wanted = "between 0 and 1" if name in most else ">= 0"
                raise ValueError(f"expected {name} {wanted}, got {value}")
        if self.repetition_penalty == 0:
            raise ValueError("expected repetition_penalty > 0, got 0")

    def process(self, logits: Tensor, *, seen: Tensor | None, step: int, ends: Tensor) -> Tensor:
        """Return logits with the penalty on `seen`, and -inf at `ends` before min_new_tokens."""
        if seen is not None:
            weaker = torch.where(
                logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty
            )
            logits = torch.where(seen, weaker, logits)
        if step < self.min_new_tokens:
            logits = logits.index_fill(-1, ends, -torch.inf)
        return logits

    def cut(self, logits: Tensor) -> Tensor:
        """Return logits [..., V] with -inf for the tokens that top-k, top-p and min-p remove.

        The logits are already divided by the temperature.

        >>> Filters(top_p=0.7).cut(torch.tensor([[2.0, 1.0, 0.0]])).tolist()
        [[2.0, 1.0, -inf]]
        """
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p < 1:
            ranked, order = logits.sort(descending=True)
            probs = ranked.softmax(-1)
            over = probs.cumsum(-1) - probs >= self.top_p  # the tokens before suffice
            over[..., 0] = False
            logits = logits.masked_fill(over.scatter(-1, order, over), -torch.inf)
        if self.min_p > 0:
            probs = logits.softmax(-1)
            least = self.min_p * probs.amax(-1, keepdim=True)
            logits = logits.masked_fill(probs < least, -torch.inf)
        return logits


NO_FILTERS = Filters()


@dataclass(frozen=True)
class Sampled:
    """Responses of B rows, padded right with 0; they include the token that ended them."""

    ids: Tensor  # [B, n] int64
    log_probs: Tensor  # [B, n] float32; the first entry is a real log-prob
    lengths: Tensor  # [B] int64
    complete: Tensor  # [B] bool, False if the token limit cut it

    @property
    def mask(self) -> Tensor:
        """Return the mask of tokens, [B, n] bool."""
        index = torch.arange(self.ids.shape[1], device=self.lengths.device)
        return index < self.lengths.unsqueeze(-1)

    def ends(self, stop_ids: Collection[int]) -> Tensor:
        """Return the mask of last tokens that are in `stop_ids`, [B, n] bool."""
        last = self.mask & (self.mask.cumsum(-1) == self.lengths.unsqueeze(-1))
        return last & torch.isin(self.ids, self.ids.new_tensor(sorted(stop_ids)))

    @classmethod
    def of_parts(cls, parts: Sequence["Sampled"]) -> "Sampled":
        """Return the responses of several parts of the rows, in order."""
        ids = pad([row for part in parts for row in part.ids])  # [B, n]
        log_probs = pad([row for part in parts for row in part.log_probs])  # [B, n]
        lengths = torch.cat([part.lengths for part in parts])
        return cls(ids, log_probs, lengths, torch.cat([part.complete for part in parts]))

    @classmethod
    def of_rows(cls, ids: Sequence[Tensor], log_probs: Sequence[Tensor], complete: Tensor):
        """Return the responses of B rows of ids [n] and log-probs [n]."""
        lengths = torch.tensor([len(row) for row in ids], device=ids[0].device)
        return cls(pad(ids), pad(log_probs), lengths, complete)


@dataclass(frozen=True)
class Stop:
    """What ends a response: a token id, or a text that the decoded response contains."""

    ids: frozenset[int]
    text: Callable[[list[int]], bool] | None = None  # whether a row's response contains a stop text

    def __call__(self, responses: Tensor, ids: Tensor) -> Tensor:
        """Return the mask [n] of responses [n, t] that end here; ids: `self.ids` as a tensor."""
        ended = torch.isin(responses[:, -1], ids)
        if self.text is None:
            return ended
        return ended | ended.new_tensor([self.text(r) for r in responses.tolist()])


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # policy.compile is for updates
def sample(
    model: nn.Module,
    prompts: Tensor,
    attention: Tensor | None = None,
    *,
    streams: Tensor,
    stop: Stop,
    max_new_tokens: int,
    temperature: float = 1.0,
    filters: Filters = NO_FILTERS,
) -> Sampled:
    """Sample one response to each prompt of [B, T], padded left; temperature 0 is greedy.

    attention [B, T] bool, by default all True; streams [B] int64. Greedy sampling returns log-probs
    at temperature 1, and top-k, top-p and min-p have no effect.
    """
    attention = torch.ones_like(prompts, dtype=torch.bool) if attention is None else attention
    if not attention.any(-1).all():
        raise ValueError("expected at least one prompt token, got an empty prompt")
    size, device = len(prompts), prompts.device
    stop_ids = send(torch.tensor(sorted(stop.ids), dtype=torch.int64), device)
    starts = attention.sum(-1)  # [B]
    streams = send(streams, device)
    responses = torch.zeros(size, max_new_tokens, dtype=torch.int64, device=device)
    log_probs = torch.zeros(size, max_new_tokens, device=device)
    lengths = torch.zeros(size, dtype=torch.int64, device=device)
    complete = torch.zeros(size, dtype=torch.bool, device=device)
    alive = torch.arange(size, device=device)  # rows still running
    greedy = temperature == 0
    steps = torch.arange(0 if greedy else max_new_tokens, device=device)
    draws = uniforms(streams[:, None], starts[:, None] + steps)  # [B, max_new_tokens]
    state = decode(model, prompts, attention)
    seen = None
    if filters.repetition_penalty != 1:  # mask of tokens in each row so far, [B, V]
        seen = torch.zeros(size, state.logits.shape[-1], dtype=torch.bool, device=device)
        seen[attention.nonzero()[:, 0], prompts[attention]] = True
    for step in range(max_new_tokens):
        past = None if seen is None else seen[alive]
        logits = filters.process(state.logits, seen=past, step=step, ends=stop_ids)  # [n, V]
        scaled = logits if temperature in (0, 1) else logits / temperature
        if not greedy:
            scaled = filters.cut(scaled)
        probs = scaled.softmax(-1)
        if greedy:
            sampled = logits.argmax(-1)
        else:
            sampled = inverse_cdf(probs, draws[:, step].to(device)[alive])
        if seen is not None:
            seen[alive, sampled] = True
        picked = probs.gather(-1, sampled[:, None]).squeeze(-1).log()  # [n]
        responses[alive, step], log_probs[alive, step] = sampled, picked
        lengths[alive] = step + 1
        ended = stop(responses[alive, : step + 1], stop_ids)
        complete[alive] = ended
        active = (~ended).nonzero().squeeze(-1)  # [n] rows; synchronises the GPU, once per token
        alive = alive[active]
        if len(alive) == 0 or step + 1 == max_new_tokens:
            break
        state.advance(sampled, active)
    longest = int(lengths.max())
    return Sampled(responses[:, :longest], log_probs[:, :longest], lengths, complete)
