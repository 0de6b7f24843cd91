"""The distribution of each kept token, from the states before it, without logits [B, T, V].

float32 logits exist for a slice of the vocabulary at a time. The backward reads the outputs of the
head's product from the memory of the gradient to be, or else computes them again.

Letters: B rows, T tokens, K kept tokens, V vocabulary, H hidden.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.autograd.function import once_differentiable

from policies.products import linear, mm

NAMES = ("response", "assistant", "prompt", "attention")
SLICE = 2**20  # logits at a time, over the kept tokens: 4 MB of float32; on a GPU 64 times that
NARROWEST = 512  # columns at a time at least: products of fewer are slow
LOWEST = -1e30  # logit of a token that a head lacks: a probability of 0, and finite
SAVED = 2**28  # bytes of outputs that wait for the backward in memory of their own


@dataclass(frozen=True)
class Scores:
    """Per-token results, each [B, T] and 0 outside the kept tokens."""

    log_probs: Tensor
    entropy: Tensor | None = None  # nats, of the tempered distribution
    full_kl: Tensor | None = None  # nats, see `mixture` of TokenDistribution.scores
    values: Tensor | None = None  # reward, V(tokens < t) of the critic
    imbalance: Tensor | None = None  # of the experts, see `imbalance` in policies/scorer.py


@dataclass(frozen=True)
class Head:
    """The output embeddings: hidden [k, H] -> logits [k, V] in float32, of float64 in float64."""

    weight: Tensor  # [V, H]
    bias: Tensor | None
    cap: float | None  # of the logits, as Gemma 2 has it
    dtype: torch.dtype | None = None  # of the product, None for that of the weight
    factor: float = 1.0  # of the logits, before the cap, as Granite and Cohere have it

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits."""
        return self.finish(self.product(self.scaled(hidden)))

    def scaled(self, hidden: Tensor) -> Tensor:
        """Return the hidden states times the factor."""
        return hidden if self.factor == 1 else hidden * self.factor

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
        self.head, self.states, self.mask = head, head.scaled(states), mask
        self.scale = _per_token(temperature, mask)

    def scores(
        self,
        value: Tensor,
        *,
        entropy: bool = False,
        learn: bool = False,
        reference: "TokenDistribution | None" = None,
        mixture: float = 1.0,
    ) -> Scores:
        """Return log-probs of tokens [B, T] and what else is asked of the same logits.

        The entropy has a gradient with `learn` only. With `reference`, also the exact divergence
        from it. `mixture` is the reference's weight b in m = b reference + (1 - b) policy:
        1 = KL(policy || reference), 0 = KL(reference || policy), between them the generalised
        Jensen-Shannon divergence b KL(reference || m) + (1 - b) KL(policy || m) (GKD, arXiv
        2306.13649 eq. 1).
        """
        both = [self] if reference is None else [self, reference]
        reads, scales = [(d.head, d.states) for d in both], [d.scale for d in both]
        options = {"entropy": entropy, "learn": learn, "mixture": mixture}
        columns = score_columns(reads, value[self.mask], scales, **options)
        return Scores(*(None if c is None else placed(c.squeeze(-1), self.mask) for c in columns))


def score_columns(
    reads: list[tuple[Head, Tensor]],
    target: Tensor,
    scales: list[Tensor | None],
    *,
    entropy: bool = False,
    learn: bool = False,
    mixture: float = 1.0,
) -> tuple[Tensor | None, ...]:
    """Return log-prob, entropy or None, divergence or None of the kept tokens, [K, 1] each.

    reads: head and states [K, H] of the policy, and of the reference for a divergence; target [K]:
    the ids; scales: the temperature [K, 1] of each of `reads`, None for 1.
    """
    head, states = reads[0]
    fixed = [(h, x.detach().to(h.dtype or h.weight.dtype)) for h, x in reads]
    options = entropy or learn, learn, torch.is_grad_enabled(), mixture
    return _Sliced.apply(states, head.weight, head.bias, fixed, target, scales, *options)


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
    """Compute (log-prob, entropy or None, full KL or None), each [K, 1], from slices of the logits.

    A slice z [K, v] has the logits of all kept tokens for v columns of the vocabulary. The forward
    sums over slices; the backward turns each into its gradient. With p = softmax(z), S the entropy
    and f = log p - log q for the reference's q:
    d log p(y) / dz = onehot(y) - p, dS / dz = -p (log p + S), dKL / dz = p (f - KL). Any divergence
    D has dD / dz = g - p sum(g) with g = dD / d log p; for the KL that is p (f + 1).
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, states, weight, bias, reads, target, scales, entropy, learn, keep, mixture
    ):
        """Return the columns; `reads` are (head, states) of the policy and of the reference."""
        keep = keep and any(ctx.needs_input_grad[:3])
        outputs = _Outputs(reads, ctx.needs_input_grad[1], keep)
        sizes, chosen = [len(head.weight) for head, _ in reads], 0.0
        sums, means, gaps = [[] for _ in reads], [], []
        for at in _slices(sizes, target):
            both = [_tempered(outputs.compute(i, at), scale) for i, scale in enumerate(scales)]
            mine, index, inside = both[0], *_columns(target, at)
            chosen = mine.gather(1, index).where(inside, 0.0) + chosen
            probs = [z.softmax(-1) for z in both]  # within the slice
            for rows, z, p in zip(sums, both, probs, strict=True):
                most = z.amax(-1, keepdim=True)
                rows.append((most, 1 / p.amax(-1, keepdim=True)))  # max p = exp(0) / total
            # Rows of one head alone pad its embedding.
            if len(both) > 1 and at.stop <= min(sizes) and mixture == 1:
                gaps.append(_mean(both[1].sub_(mine), probs[0]))
            if entropy:
                means.append(_mean(mine.sub_(sums[0][-1][0]), probs[0]))
        (top, rest, tops, share), *other = (_joined(rows) for rows in sums)
        ctx.norms, spread, full, slopes = [top + rest], None, None, None
        if entropy:
            spread = rest - ((torch.cat(means, -1) + tops - top) * share).sum(-1, keepdim=True)
        if other:
            their_top, their_rest, *_ = other[0]
            ctx.norms.append(their_top + their_rest)
            if mixture == 1:
                common = share[:, : len(gaps)]
                mass = common.sum(-1, keepdim=True)
                gap = (torch.cat(gaps, -1) * common).sum(-1, keepdim=True)  # of log q / p
                full = mass * (their_top - top + their_rest - rest) - gap
                slopes = full + mass
            else:
                full, slopes = _divergence(outputs, target, scales, ctx.norms, mixture)
        ctx.save_for_backward(states, weight, bias, spread, slopes)
        ctx.outputs, ctx.inputs = outputs, (target, scales, sizes, mixture)
        ctx.set_materialize_grads(False)
        if entropy and not learn:
            ctx.mark_non_differentiable(spread)
        return chosen - top - rest, spread, full

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor | None):  # type: ignore[override]
        """Return the gradients of states [K, H], weight [V, H] and bias [V]."""
        states, weight, bias, spread, slopes = ctx.saved_tensors
        outputs, (target, scales, sizes, mixture) = ctx.outputs, ctx.inputs
        log_prob, entropy, full = above  # [K, 1] each
        head, hidden = outputs.reads[0]
        by_states = torch.zeros_like(states, dtype=torch.promote_types(states.dtype, torch.float32))
        by_weight = outputs.by_weight
        if by_weight is None and ctx.needs_input_grad[1]:
            by_weight = torch.empty_like(weight)
        by_bias = torch.empty_like(bias) if ctx.needs_input_grad[2] else None
        for at in _slices(sizes, target):
            if at.start >= len(weight):
                break
            mine = outputs.read(0, at)  # [K, v]
            slope = None if head.cap is None else 1 - (mine / head.cap).square()
            mine = _tempered(mine, scales[0]).sub_(ctx.norms[0])
            grad, more = mine.exp(), None
            factor = 0.0 if log_prob is None else -log_prob  # of p
            if full is not None:
                behind = slopes.clone()
                if at.stop <= min(sizes):
                    theirs = _tempered(outputs.read(1, at), scales[1]).sub_(ctx.norms[1])
                    if mixture == 0:
                        more = theirs.exp_().mul_(-full)
                    elif mixture == 1:
                        behind = theirs.sub_(mine).add_(behind - 1)
                    else:
                        gap = _log_mixture(mine, theirs, mixture).sub_(mine)
                        behind = gap.mul_(1 - mixture).add_(behind)
                factor = behind.mul_(-full).add_(factor)
            if entropy is not None:
                factor = mine.add_(spread).mul_(-entropy).add_(factor)
            grad.mul_(factor)
            if more is not None:
                grad.add_(more)
            if log_prob is not None:
                index, inside = _columns(target, at)
                grad.scatter_add_(1, index, log_prob.where(inside, 0.0))
            grad = grad if slope is None else grad.mul_(slope)
            grad = _tempered(grad, scales[0])
            if by_bias is not None:
                by_bias[at] = grad.sum(0)
            grad = grad.to(hidden.dtype)
            by_states += mm(grad, weight[at].to(hidden.dtype))
            if by_weight is not None:
                by_weight[at] = mm(grad.T, hidden)
        outputs.memory = outputs.by_weight = None  # another backward computes the outputs again
        return by_states, by_weight, by_bias, *[None] * 7


class _Outputs:
    """Outputs of heads, which wait for the backward in the memory of the weights' gradient.

    The backward reads the outputs of some columns and then writes the gradient of their weights to
    the same place. Outputs that do not fit there take up to SAVED bytes of other memory.
    """

    def __init__(self, reads: list[tuple[Head, Tensor]], learns: bool, keep: bool) -> None:
        self.reads, self.memory, self.by_weight = reads, None, None
        head, states = reads[0]
        count = len(states)
        if keep and learns:
            self.by_weight = torch.empty_like(head.weight, memory_format=torch.contiguous_format)
            self.memory = self.by_weight.view(states.dtype)  # [V, *]
        if keep and (self.memory is None or self.memory.shape[1] < count):
            self.by_weight = None
            size = len(head.weight) * count * states.itemsize
            fits = min(SAVED // max(size, 1), len(reads))
            self.memory = states.new_empty(len(head.weight), fits * count)

    def compute(self, number: int, at: slice) -> Tensor:
        """Return the logits [K, v] of some columns; of columns that a head lacks, LOWEST."""
        head, states = self.reads[number]
        if at.start >= len(head.weight):
            dtype = torch.promote_types(states.dtype, torch.float32)
            return states.new_full((len(states), at.stop - at.start), LOWEST, dtype=dtype)
        outputs = head.columns(at).product(states)
        if (place := self._place(number, at)) is not None:
            place.copy_(outputs)
        return head.finish(outputs)

    def read(self, number: int, at: slice) -> Tensor:
        """Return the same logits, from memory if they are there; the caller may overwrite them."""
        place = self._place(number, at)
        return self.compute(number, at) if place is None else self.reads[number][0].finish(place)

    def _place(self, number: int, at: slice) -> Tensor | None:
        """Return the memory of outputs [K, v], None if there is none."""
        states = self.reads[number][1]
        count, columns = len(states), at.stop - at.start
        if self.memory is None or states.dtype != self.memory.dtype:
            return None
        if (number + 1) * count > self.memory.shape[1] or at.start >= len(self.memory):
            return None
        size = count * columns
        return self.memory[at].flatten()[number * size :][:size].view(count, columns)


def _divergence(
    outputs: _Outputs, target: Tensor, scales: list, norms: list[Tensor], mixture: float
) -> tuple[Tensor, Tensor]:
    """Return the divergence of a mixture below 1, and the sum of its slopes g, [K, 1] each.

    Another pass over the columns of both vocabularies, since it needs normalised log-probs.
    """
    sizes = [len(head.weight) for head, _ in outputs.reads]
    value, slopes = torch.zeros_like(norms[0]), torch.zeros_like(norms[0])
    for at in _slices(sizes, target):
        if at.stop > min(sizes):
            break
        mine, theirs = (  # not in place: what is read may be the memory
            (outputs.read(i, at) / (1 if scales[i] is None else scales[i])) - norms[i]
            for i in (0, 1)
        )  # [K, v] each
        if mixture == 0:
            value += _mean(theirs - mine, theirs.exp())
            slopes -= theirs.exp().sum(-1, keepdim=True)
            continue
        middle = _log_mixture(mine, theirs, mixture)  # [K, v]
        rest = (1 - mixture) * _mean(mine - middle, mine.exp())
        value += mixture * _mean(theirs - middle, theirs.exp()) + rest
        slopes += rest
    return value, slopes


def _log_mixture(mine: Tensor, theirs: Tensor, mixture: float) -> Tensor:
    """Return the log-probs of mixture * reference + (1 - mixture) * policy, [K, v]."""
    return torch.logaddexp(theirs + math.log(mixture), mine + math.log1p(-mixture))


def _slices(sizes: list[int], target: Tensor) -> list[slice]:
    """Return slices of the columns, SLICE logits in each, which end where a vocabulary ends."""
    step = max(SLICE * (1 if target.device.type == "cpu" else 64) // max(len(target), 1), NARROWEST)
    step = step // 64 * 64 or step  # kernels are slower on other widths
    spans = pairwise(sorted({0, *sizes}))
    return [slice(i, min(i + step, end)) for start, end in spans for i in range(start, end, step)]


def _columns(target: Tensor, at: slice) -> tuple[Tensor, Tensor]:
    """Return each token's place in a slice [K, 1], and whether it is there."""
    index = target[:, None] - at.start
    inside = (index >= 0) & (index < at.stop - at.start)
    return index.clamp(0, at.stop - at.start - 1), inside


def _mean(values: Tensor, probs: Tensor) -> Tensor:
    """Return the mean [K, 1] of values [K, v]."""
    return torch.linalg.vecdot(probs, values)[:, None]


def _joined(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what (max z, sum of exp(z - max z)), [K, 1] each, of n slices are together.

    That is max z and log sum of exp(z - max z), [K, 1], and of each slice max z and p, [K, n].
    """
    tops, totals = (torch.cat(part, -1) for part in zip(*rows, strict=True))
    top = tops.amax(-1, keepdim=True)
    totals = totals * (tops - top).exp()
    total = totals.sum(-1, keepdim=True)
    return top, total.log(), tops, totals / total


def _tempered(logits: Tensor, scale: Tensor | None) -> Tensor:
    """Divide logits by the temperature of their tokens."""
    return logits if scale is None else logits.div_(scale)


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
