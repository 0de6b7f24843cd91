"""The distribution of each kept token, from the states before it, without logits [B, T, V].

Logits exist for a slice of the kept tokens at a time, in the backward too.

Letters: B rows, T tokens, K kept tokens, V vocabulary, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import Tensor
from torch.utils.checkpoint import checkpoint

NAMES = ("response", "assistant", "prompt", "attention")
SLICE = 2**26  # logits held at a time, over the kept tokens: 256 MB of float32


@dataclass(frozen=True)
class Scores:
    """Per-token results, each [B, T] and 0 outside the kept tokens."""

    log_probs: Tensor
    entropy: Tensor | None = None  # nats, of the tempered distribution
    full_kl: Tensor | None = None  # nats, KL(policy || reference), over the whole distribution
    values: Tensor | None = None  # reward, V(tokens < t) of the critic


@dataclass(frozen=True)
class Head:
    """The output embeddings: hidden [k, H] -> logits [k, V] in float32, of float64 in float64."""

    weight: Tensor  # [V, H]
    bias: Tensor | None
    cap: float | None  # of the logits, as Gemma 2 has it

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits."""
        logits = F.linear(hidden.to(self.weight.dtype), self.weight, self.bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


class TokenDistribution:
    """Give each kept token a categorical distribution over the vocabulary.

    states [K, H] predict the kept tokens, row by row; `head` makes logits of them; mask [B, T] bool
    says where they stand; temperature a number or [B] divides the logits. What comes out is [B, T]
    and 0 outside the mask, as from LLMMaskedCategorical under the same mask.

    >>> head = Head(torch.eye(2), None, None)
    >>> dist = TokenDistribution(head, torch.zeros(1, 2), torch.tensor([[False, True]]))
    >>> dist.scores(torch.tensor([[0, 1]])).log_probs.exp().log2().tolist()
    [[0.0, -1.0]]
    """

    def __init__(
        self, head: Head, states: Tensor, mask: Tensor, *, temperature: Tensor | float = 1.0
    ) -> None:
        self.head, self.states, self.mask = head, states, mask
        self.scale = _per_kept(temperature, mask)

    def scores(
        self,
        value: Tensor,
        *,
        entropy: bool = False,
        learn: bool = False,
        reference: "TokenDistribution | None" = None,
    ) -> Scores:
        """Return log-probs of tokens [B, T] and what else is asked of the same logits.

        The entropy has a gradient with `learn` only. With `reference`, also the exact KL to it.
        """
        both = [self] if reference is None else [self, reference]
        states, heads = [d.states for d in both], [d.head for d in both]
        score: Callable[..., Any] = partial(_score, heads, entropy=entropy, learn=learn)
        target, scale = value[self.mask], self.scale
        step = max(SLICE // len(self.head.weight), 1)
        slices = [slice(i, i + step) for i in range(0, max(len(target), 1), step)]
        if len(slices) > 1 and torch.is_grad_enabled():
            # One slice's logits at a time in the backward too, for one more product with the head.
            score = partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False)
        parts = [score([x[at] for x in states], target[at], scale[at]) for at in slices]
        columns = [torch.cat(c) if c[0] is not None else None for c in zip(*parts, strict=True)]
        return Scores(*(None if c is None else placed(c, self.mask) for c in columns))


def named_mask(batch: TensorDictBase, name: str) -> Tensor:
    """Return which tokens of trajectories a name means, [B, T].

    response: what was sampled; prompt: of that what follows the last prompt, the last turn;
    assistant: the assistant's messages, a data set's too; attention: all tokens.
    """
    if name not in NAMES:
        raise ValueError(f"expected a mask among {NAMES}, got {name!r}")
    if name != "prompt":
        return batch.get(("masks", f"all_{name}_mask"))
    sampled = batch.get(("masks", "all_response_mask"))  # [B, T]
    begins = sampled.clone()
    begins[:, 1:] &= ~sampled[:, :-1]
    turn = begins.cumsum(-1)  # of each token, from 1
    return sampled & (turn == turn[:, -1:])


def _score(heads: list[Head], states: list[Tensor], target, scale, *, entropy=False, learn=False):
    """Return (log-prob, entropy or None, full KL or None), each [k], of target [k]; scale [k, 1].

    `heads` and `states` [k, H] are those of the policy and, for the KL, of the reference.
    """
    mine = (heads[0](states[0]) / scale).log_softmax(-1)  # [k, V]
    log_prob = mine.gather(-1, target[:, None]).squeeze(-1)
    spread, full = None, None
    if learn:
        spread = -(mine.exp() * mine).sum(-1)
    elif entropy:
        with torch.no_grad():
            spread = -mine.exp().mul_(mine).sum(-1)
    if len(heads) > 1:
        with torch.no_grad():
            theirs = (heads[1](states[1]) / scale).log_softmax(-1)
        full = full_kl(mine, theirs)
    return log_prob, spread, full


def full_kl(curr: Tensor, ref: Tensor) -> Tensor:
    """Return the exact KL(curr || ref) over the vocabulary; log-probs [*, V] in and [*] out.

    Tokens ruled out under curr (-inf) contribute nothing, nor do those that only one of the two
    has: rows that pad an embedding.

    >>> round(full_kl(*torch.tensor([[0.0, 0.0], [1.0, 0.0]]).log_softmax(-1)).item(), 4)
    0.1201
    """
    size = min(curr.shape[-1], ref.shape[-1])
    curr, ref = curr[..., :size], ref[..., :size]
    log_ratio = (curr - ref).masked_fill(curr == -torch.inf, 0)
    return (curr.exp() * log_ratio).sum(-1)


def _per_kept(temperature: Tensor | float, keep: Tensor) -> Tensor:
    """Return the temperature of each kept token, [K, 1]."""
    value = torch.as_tensor(temperature, dtype=torch.float32, device=keep.device)
    return value.reshape(-1, 1).expand(keep.shape)[keep].unsqueeze(-1)


def placed(values: Tensor, keep: Tensor) -> Tensor:
    """Put values [K] at the kept places of a zero [B, T]."""
    return values.new_zeros(keep.shape).masked_scatter(keep, values)
