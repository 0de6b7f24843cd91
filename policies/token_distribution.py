"""The distribution of each kept token, from the states before it, without logits [B, T, V].

float32 logits exist for a few slices of the kept tokens at a time. The backward reads the outputs
of the head's product if they were few enough to keep, or else computes them again.

Letters: B rows, T tokens, K kept tokens, V vocabulary, H hidden.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import Tensor
from torch.autograd.function import once_differentiable

from policies.products import linear, mm

NAMES = ("response", "assistant", "prompt", "attention")
SLICE = 2**22  # logits at a time, over the kept tokens: 16 MB of float32; on a GPU 16 times that
BLOCK = 4  # slices that the forward multiplies at once: on a CPU a product of few rows is slow
SAVED = 2**28  # bytes of outputs of the head that the backward may keep


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
    dtype: torch.dtype | None = None  # of the product, None for that of the weight

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits."""
        return self.finish(self.product(hidden))

    def product(self, hidden: Tensor) -> Tensor:
        """Return the outputs [k, V] in the dtype of the product."""
        dtype = self.dtype or self.weight.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        with torch.autocast(hidden.device.type, enabled=False):  # as the backward computes it
            return linear(hidden.to(dtype), self.weight.to(dtype), bias)

    def finish(self, outputs: Tensor) -> Tensor:
        """Return the logits of outputs of the product."""
        logits = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def columns(self, at: slice) -> "Head":
        """Return the head of some of the vocabulary."""
        return replace(
            self, weight=self.weight[at], bias=None if self.bias is None else self.bias[at]
        )

    def cast(self) -> "Head":
        """Return the head in the dtype of its product, cast once for many calls, no gradients."""
        dtype = self.dtype or self.weight.dtype
        bias = None if self.bias is None else self.bias.detach().to(dtype)
        return replace(self, weight=self.weight.detach().to(dtype), bias=bias)


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
        self.scale = _per_token(temperature, mask)

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
        reads = [(d.head.cast(), d.states.detach()) for d in both]
        count = sum(len(states) * len(head.weight) for head, states in reads)
        keep = torch.is_grad_enabled() and count * reads[0][0].weight.itemsize <= SAVED
        inputs = reads, value[self.mask], self.scale, entropy or learn, learn, keep
        columns = _Sliced.apply(self.states, self.head.weight, self.head.bias, *inputs)
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


class _Sliced(torch.autograd.Function):
    """Compute (log-prob, entropy or None, full KL or None), each [K], a slice of logits at a time.

    The forward takes some tokens at a time; the backward some columns of the vocabulary. It reads
    or computes their logits z again and turns them into their gradient. With p = softmax(z), S the
    entropy and f = log p - log q for the reference's q:
    d log p(y) / dz = onehot(y) - p, dS / dz = -p (log p + S), dKL / dz = p (f - KL).
    """

    @staticmethod
    def forward(ctx: Any, states, weight, bias, reads, target, scale, entropy, learn, keep):  # type: ignore[override]
        """Return the columns; `reads` are (head, states) of the policy and of the reference."""
        keep = keep and any(ctx.needs_input_grad[:3])
        size, parts, norms, saved = min(len(head.weight) for head, _ in reads), [], [], []
        for at, outputs in _products(reads, len(weight)):
            both = [
                _normalised(_tempered(head.finish(x), scale, at), saved=x if keep else None)
                for (head, _), x in zip(reads, outputs, strict=True)
            ]
            (mine, probs, _), *theirs = both
            norms.append([norm for *_, norm in both])
            log_prob = mine.gather(-1, target[at, None]).squeeze(-1)
            full = full_kl(mine, theirs[0][0], probs=probs) if theirs else None
            mass = probs[:, :size].sum(-1) if theirs and size < len(weight) else None
            spread = -probs.mul_(mine).sum(-1) if entropy else None
            parts.append((log_prob, spread, full, mass))
            saved += outputs if keep else []  # by slice, then by distribution
        *columns, mass = [
            torch.cat(c) if c[0] is not None else None for c in zip(*parts, strict=True)
        ]
        ctx.save_for_backward(states, weight, bias, *columns[1:], *saved)
        norms = [torch.cat(n) for n in zip(*norms, strict=True)]  # [K, 1] of each
        ctx.inputs = reads, target, scale, norms, 1 if mass is None else mass[:, None]
        ctx.set_materialize_grads(False)
        if entropy and not learn:
            ctx.mark_non_differentiable(columns[1])
        return tuple(columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor | None):  # type: ignore[override]
        """Return the gradients of states [K, H], weight [V, H] and bias [V]."""
        states, weight, bias, *sums = ctx.saved_tensors[:5]
        saved = ctx.saved_tensors[5:]
        reads, target, scale, norms, mass = ctx.inputs
        spread, kl = (None if x is None else x[:, None] for x in sums)
        log_prob, entropy, full = (None if g is None else g[:, None] for g in above)  # [K, 1]
        reads = [(head, h.to(head.weight.dtype)) for head, h in reads]
        head, hidden = reads[0]
        by_states = torch.zeros_like(states, dtype=torch.promote_types(states.dtype, torch.float32))
        by_weight, by_bias = (
            torch.empty_like(x) if needed else None
            for x, needed in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        )

        def logits(number: int, at: slice) -> Tensor:
            head, hidden = reads[number]
            if saved:
                return head.finish(torch.cat([x[:, at] for x in saved[number :: len(reads)]]))
            return head.columns(at)(hidden)

        for at in _slices(len(weight), len(target), target.device):
            mine = logits(0, at)  # [K, v]
            slope = None if head.cap is None else 1 - (mine / head.cap).square()
            mine = _tempered(mine, scale).sub_(norms[0])
            grad = mine.exp()
            factor = 0.0 if log_prob is None else -log_prob  # of p
            if full is not None:
                theirs = _tempered(logits(1, at), scale).sub_(norms[1])
                behind = log_ratio(theirs, mine).sub_(1)  # of the tokens that both have
                if behind.shape != mine.shape:
                    behind = F.pad(behind, (0, mine.shape[-1] - behind.shape[-1]))
                factor = behind.add_(kl + mass).mul_(-full).add_(factor)
            if entropy is not None:
                factor = mine.add_(spread).mul_(-entropy).add_(factor)
            grad.mul_(factor)
            if log_prob is not None:
                rows = ((target >= at.start) & (target < at.stop)).nonzero().squeeze(-1)
                grad[rows, target[rows] - at.start] += log_prob[rows, 0]
            grad = grad if slope is None else grad.mul_(slope)
            grad = _tempered(grad, scale)
            if by_bias is not None:
                by_bias[at] = grad.sum(0)
            grad = grad.to(hidden.dtype)
            by_states += mm(grad, head.weight[at])
            if by_weight is not None:
                by_weight[at] = mm(grad.T, hidden)
        return by_states, by_weight, by_bias, *[None] * 6


def _products(reads: list[tuple[Head, Tensor]], width: int) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield slices of the kept tokens and, for each head and its states, the outputs [k, V]."""
    count, device = len(reads[0][1]), reads[0][1].device
    for block in _slices(count, width, device, BLOCK):
        outputs = [head.product(states[block]) for head, states in reads]
        for at in _slices(len(outputs[0]), width, device):
            place = slice(block.start + at.start, block.start + at.stop)
            yield place, [x[at] for x in outputs]


def _slices(count: int, width: int, device: torch.device, times: int = 1) -> list[slice]:
    """Return slices of `count` rows of `width` logits, SLICE in each, on a CPU `times` SLICE."""
    step = max(SLICE * (times if device.type == "cpu" else 16) // max(width, 1), 1)
    return [slice(i, min(i + step, count)) for i in range(0, max(count, 1), step)]


def _normalised(logits: Tensor, saved: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs and probabilities [k, V], and the logsumexp of the logits [k, 1].

    The log-probs overwrite the logits, unless these are `saved`.
    """
    probs = logits.softmax(-1)
    most = logits.amax(-1, keepdim=True)
    rest = -probs.amax(-1, keepdim=True).log()  # logsumexp of logits - most: exp(0) / sum = max
    logits = logits - most if logits is saved else logits.sub_(most)
    return logits.sub_(rest), probs, most + rest


def _tempered(logits: Tensor, scale: Tensor | None, at: slice = slice(None)) -> Tensor:
    """Return logits divided by the temperature of their tokens."""
    return logits if scale is None else logits / scale[at]


def full_kl(curr: Tensor, ref: Tensor, probs: Tensor | None = None) -> Tensor:
    """Return the exact KL(curr || ref) over the vocabulary; log-probs [*, V] in and [*] out.

    `probs` is the exp of `curr`, if it is known. Overwrites `ref`, so it is not for autograd.

    Tokens ruled out under curr (-inf) contribute nothing, nor do those that only one of the two
    has: rows that pad an embedding.

    >>> round(full_kl(*torch.tensor([[0.0, 0.0], [1.0, 0.0]]).log_softmax(-1)).item(), 4)
    0.1201
    """
    probs = curr.exp() if probs is None else probs
    ratio = log_ratio(ref, curr)
    return -ratio.mul_(probs[..., : ratio.shape[-1]]).sum(-1)


def log_ratio(ref: Tensor, curr: Tensor) -> Tensor:
    """Return log ref - log curr of the tokens that both have, 0 where curr rules them out.

    The ratio overwrites `ref`.
    """
    size = min(curr.shape[-1], ref.shape[-1])
    curr, ref = curr[..., :size], ref[..., :size]
    return ref.sub_(curr).masked_fill_(curr == -torch.inf, 0)


def _per_token(temperature: Tensor | float, keep: Tensor) -> Tensor | None:
    """Return the temperature of each kept token, [K, 1], None where it is 1 everywhere."""
    value = torch.as_tensor(temperature, dtype=torch.float32, device=keep.device)
    if bool((value == 1).all()):
        return None
    return value.reshape(-1, 1).expand(keep.shape)[keep].unsqueeze(-1)


def placed(values: Tensor, keep: Tensor) -> Tensor:
    """Put values [K, *] at the kept places of a zero [B, T, *]."""
    out = values.new_zeros(*keep.shape, *values.shape[1:])
    return out.masked_scatter(keep.reshape(*keep.shape, *[1] * (values.ndim - 1)), values)
