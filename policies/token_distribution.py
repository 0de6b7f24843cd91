"""The distribution of each kept token, from the states before it, without logits [B, T, V].

float32 logits exist for a slice of the vocabulary at a time. The forward saves the outputs of the
head's matmul in the memory of the coming gradient; if they do not fit, the backward computes them
again.

Letters: B rows, T tokens, K kept tokens, V vocabulary, H hidden.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from policies.host import kept, placed, send
from policies.models.fast.products import linear, mm

SLICE = 2**20  # logits per slice over the kept tokens, 4 MB of float32; 64 times as many on a GPU
NARROWEST = 512  # smallest number of columns per slice: matmuls with fewer are slow
LOWEST = -1e30  # logit of a token that a head lacks: finite, with probability 0
SAVED = 2**28  # largest number of bytes of outputs saved outside the memory of the gradient


@dataclass(frozen=True)
class Scores:
    """Per-token results, each [B, T] and 0 outside the kept tokens."""

    log_probs: Tensor
    entropy: Tensor | None = None  # nats, at the temperature
    divergence: Tensor | None = None  # nats, see `mixture` of TokenDistribution.scores
    values: Tensor | None = None  # reward, V(tokens < t) of the critic
    imbalance: Tensor | None = None  # load-balancing loss of experts, see policies/scorer.py


@dataclass(frozen=True)
class Head:
    """The output embeddings: hidden [k, H] -> logits [k, V], in float32 or float64."""

    weight: Tensor  # [V, H]
    bias: Tensor | None
    cap: float | None  # soft cap of the logits, as in Gemma 2
    dtype: torch.dtype | None = None  # dtype of the matmul; None: the weight's
    factor: float = 1.0  # multiplies the logits before the cap, as in Granite and Cohere
    compiled: bool = False  # whether torch.compile fuses what follows the matmul

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits."""
        return self.finish(self.product(self.scaled(hidden)))

    def scaled(self, hidden: Tensor) -> Tensor:
        """Return the hidden states times the factor."""
        return hidden if self.factor == 1 else hidden * self.factor

    def product(self, hidden: Tensor) -> Tensor:
        """Return the outputs [k, V] of the matmul, in its dtype."""
        dtype = self.dtype or self.weight.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        with torch.autocast(hidden.device.type, enabled=False):  # as the backward computes it
            return linear(hidden.to(dtype), self.weight.to(dtype), bias)

    def finish(self, outputs: Tensor) -> Tensor:
        """Return the logits for outputs of the matmul."""
        return _finished(outputs, self.cap)

    def columns(self, at: slice) -> "Head":
        """Return the head for some columns of the vocabulary."""
        return replace(
            self, weight=self.weight[at], bias=None if self.bias is None else self.bias[at]
        )


class TokenDistribution:
    """Give each kept token a categorical distribution over the vocabulary.

    states [K, H] predict the kept tokens, row by row; `head` computes logits from them. mask [B, T]
    bool marks the kept tokens; temperature, a number or [B], divides the logits. Results are [B, T]
    and 0 outside the mask, as from LLMMaskedCategorical with the same mask.

    >>> head = Head(torch.eye(2), None, None)
    >>> dist = TokenDistribution(head, torch.zeros(1, 2), torch.tensor([[False, True]]))
    >>> dist.scores(torch.tensor([[0, 1]])).log_probs.exp().log2().tolist()
    [[0.0, -1.0]]
    """

    def __init__(
        self, head: Head, states: Tensor, mask: Tensor, *, temperature: Tensor | float = 1.0
    ) -> None:
        self.head, self.states, self.mask = head, head.scaled(states), mask
        scale = _per_token(temperature, mask)  # [K, 1]
        self.scale = None if scale is None else send(scale, states.device)

    def scores(
        self,
        value: Tensor,
        *,
        entropy: bool = False,
        learn: bool = False,
        reference: "TokenDistribution | None" = None,
        mixture: float = 1.0,
    ) -> Scores:
        """Return log-probs of tokens [B, T], and if asked entropy and exact divergence.

        The entropy has a gradient only if `learn`. The divergence is from `reference`. `mixture` is
        the reference's weight b in m = b reference + (1 - b) policy: 1 = KL(policy || reference),
        0 = KL(reference || policy), between them the generalised Jensen-Shannon divergence
        b KL(reference || m) + (1 - b) KL(policy || m) (GKD, arXiv 2306.13649 eq. 1).
        """
        both = [self] if reference is None else [self, reference]
        models, scales = [(d.head, d.states) for d in both], [d.scale for d in both]
        options = {"entropy": entropy, "learn": learn, "mixture": mixture}
        target = send(kept(value, self.mask), self.states.device)  # [K]
        columns = score_columns(models, target, scales, **options)
        return Scores(*(None if c is None else placed(c.squeeze(-1), self.mask) for c in columns))


def score_columns(
    models: list[tuple[Head, Tensor]],
    target: Tensor,
    scales: list[Tensor | None],
    *,
    entropy: bool = False,
    learn: bool = False,
    mixture: float = 1.0,
) -> tuple[Tensor | None, ...]:
    """Return log-prob, entropy or None, divergence or None of the kept tokens, [K, 1] each.

    models: head and states [K, H] of the policy, and of the reference for a divergence; target [K]:
    the ids; scales: the temperature [K, 1] of each of `models`, None for 1.
    """
    head, states = models[0]
    fixed = [(h, x.detach().to(h.dtype or h.weight.dtype)) for h, x in models]
    options = entropy or learn, learn, torch.is_grad_enabled(), mixture
    return _Sliced.apply(states, head.weight, head.bias, fixed, target, scales, *options)


class _Sliced(torch.autograd.Function):
    """Compute (log-prob, entropy or None, divergence or None), each [K, 1], from slices of logits.

    A slice z [K, v] has the logits of all kept tokens for v columns of the vocabulary. The forward
    sums over slices; the backward turns each slice into its gradient. With p = softmax(z), S the
    entropy and f = log p - log q for the reference's q:
    d log p(y) / dz = onehot(y) - p, dS / dz = -p (log p + S), dKL / dz = p (f - KL). Any divergence
    D has dD / dz = g - p sum(g) with g = dD / d log p; for the KL that is p (f + 1).
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, states, weight, bias, models, target, scales, entropy, learn, keep, mixture
    ):
        """Return the columns; `models` are (head, states) of the policy and of the reference."""
        keep = keep and any(ctx.needs_input_grad[:3])
        outputs = _Outputs(models, ctx.needs_input_grad[1], keep)
        sizes = [len(head.weight) for head, _ in models]
        exact_kl = len(models) > 1 and mixture == 1  # others need a second pass
        read = _compiled(_read) if models[0][0].compiled else _read
        chosen = 0.0  # the logit of each target, [K, 1]
        parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in models]  # per slice, for `_joined`
        mean_logits: list[Tensor] = []  # per slice: E[z - max z] under p within the slice, [K, 1]
        mean_gaps: list[Tensor] = []  # per slice: E[z of the reference - z] in the same way, [K, 1]
        for at in _slices(sizes, target):
            # If the vocabularies differ in size, the extra columns are padding of an embedding.
            gaps = exact_kl and at.stop <= min(sizes)
            inputs = [outputs.compute(i, at) for i in range(len(models))]
            done = read(inputs, scales, target, at.start, gaps=gaps, entropy=entropy)
            chosen = done.chosen + chosen  # [K, 1]
            for part, sums in zip(parts, done.sums, strict=True):
                part.append(sums)
            mean_gaps += [done.gap] if done.gap is not None else []
            mean_logits += [done.mean] if done.mean is not None else []
        norms = [_joined(part) for part in parts]
        log_norms = [norm.top + norm.log_total for norm in norms]  # log sum exp z, [K, 1] each
        entropies = divergence = slope_sum = None
        if entropy:
            entropies = _entropy(norms[0], mean_logits)  # [K, 1]
        if exact_kl:
            divergence, slope_sum = _exact_kl(*norms, mean_gaps)  # [K, 1] each
        elif len(models) > 1:
            divergence, slope_sum = _mixture_divergence(outputs, target, scales, log_norms, mixture)
        ctx.save_for_backward(states, weight, bias, entropies, slope_sum)
        ctx.outputs, ctx.log_norms = outputs, log_norms
        ctx.inputs = target, scales, sizes, mixture
        ctx.set_materialize_grads(False)
        if entropy and not learn:
            ctx.mark_non_differentiable(entropies)
        return chosen - norms[0].top - norms[0].log_total, entropies, divergence

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, d_log_prob: Tensor | None, d_entropy: Tensor | None, d_divergence: Tensor | None
    ):
        """Return the gradients of states [K, H], weight [V, H] and bias [V].

        Arguments: the gradients of the outputs of `forward`, [K, 1] each.
        """
        states, weight, bias, entropies, slope_sum = ctx.saved_tensors
        outputs, (target, scales, sizes, mixture) = ctx.outputs, ctx.inputs
        head, hidden = outputs.models[0]
        by_states = torch.zeros_like(states, dtype=torch.promote_types(states.dtype, torch.float32))
        by_weight = outputs.by_weight  # [V, H]: the memory from which `outputs.read` reads
        if by_weight is None and ctx.needs_input_grad[1]:
            by_weight = torch.empty_like(weight)
        by_bias = torch.empty_like(bias) if ctx.needs_input_grad[2] else None
        slope = _compiled(_slope) if head.compiled else _slope
        for at in _slices(sizes, target):
            if at.start >= len(weight):
                break
            both = d_divergence is not None and at.stop <= min(sizes)
            inputs = [outputs.read(i, at) for i in range(1 + both)]  # [K, v] each
            grad = slope(
                inputs,
                scales,
                ctx.log_norms,
                target,
                at.start,
                slopes=(d_log_prob, d_entropy, d_divergence),
                entropies=entropies,
                slope_sum=slope_sum,
                mixture=mixture,
            )  # [K, v]
            if by_bias is not None:
                by_bias[at] = grad.sum(0)
            grad = grad.to(hidden.dtype)
            by_states += mm(grad, weight[at].to(hidden.dtype))
            if by_weight is not None:  # overwrites the outputs of these columns, now read
                by_weight[at] = mm(grad.T, hidden)
        outputs.memory = outputs.by_weight = None  # another backward computes the outputs again
        return by_states, by_weight, by_bias, *[None] * 7


class _Outputs:
    """Outputs of heads, saved for the backward in the memory of the weights' gradient.

    The backward reads the outputs of some columns and then writes the gradient of their weights to
    the same place. Outputs that do not fit there use up to SAVED bytes of other memory.
    """

    def __init__(self, models: list[tuple[Head, Tensor]], learns: bool, keep: bool) -> None:
        self.models, self.memory, self.by_weight = models, None, None
        head, states = models[0]
        count = len(states)
        if keep and learns:
            self.by_weight = torch.empty_like(head.weight, memory_format=torch.contiguous_format)
            self.memory = self.by_weight.view(states.dtype)  # [V, *]
        if keep and (self.memory is None or self.memory.shape[1] < count):
            self.by_weight = None
            size = len(head.weight) * count * states.itemsize
            fits = min(SAVED // max(size, 1), len(models))
            self.memory = states.new_empty(len(head.weight), fits * count)

    def compute(self, number: int, at: slice) -> tuple[Tensor, float | None]:
        """Return outputs [K, v] of some columns and their cap; LOWEST for columns a head lacks."""
        head, states = self.models[number]
        if at.start >= len(head.weight):
            dtype = torch.promote_types(states.dtype, torch.float32)
            return states.new_full((len(states), at.stop - at.start), LOWEST, dtype=dtype), None
        outputs = head.columns(at).product(states)
        if (place := self._place(number, at)) is not None:
            place.copy_(outputs)
        return outputs, head.cap

    def read(self, number: int, at: slice) -> tuple[Tensor, float | None]:
        """Return the same outputs, from memory if they are there; the caller may overwrite them."""
        place = self._place(number, at)
        return self.compute(number, at) if place is None else (place, self.models[number][0].cap)

    def _place(self, number: int, at: slice) -> Tensor | None:
        """Return the memory of outputs [K, v], None if there is none."""
        states = self.models[number][1]
        count, columns = len(states), at.stop - at.start
        if self.memory is None or states.dtype != self.memory.dtype:
            return None
        if (number + 1) * count > self.memory.shape[1] or at.start >= len(self.memory):
            return None
        size = count * columns
        return self.memory[at].flatten()[number * size :][:size].view(count, columns)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function by torch.compile, for slices of all sizes."""
    return torch.compile(function, dynamic=True)


class _Read(NamedTuple):
    """Results of the forward for a slice of n columns, [K, 1] each; None if not asked for."""

    chosen: Tensor  # the logit of each target, 0 if it is not in the slice
    sums: list[tuple[Tensor, Tensor]]  # for each model: max z, and the sum of exp(z - max z)
    gap: Tensor | None  # E[z of the reference - z] under p within the slice
    mean: Tensor | None  # E[z - max z], in the same way


def _read(
    outputs: list[tuple[Tensor, float | None]],
    scales: list[Tensor | None],
    target: Tensor,
    start: int,
    *,
    gaps: bool,
    entropy: bool,
) -> _Read:
    """Read a slice, whose first column is `start`; outputs: [K, n] and the cap of each model."""
    pairs = zip(outputs, scales, strict=True)
    logits = [_tempered(_finished(*each), scale) for each, scale in pairs]
    policy = logits[0]  # [K, n]
    index, inside = _columns(target, start, policy.shape[1])  # [K, 1] each
    chosen = policy.gather(1, index).where(inside, 0.0)  # [K, 1]
    probs = [z.softmax(-1) for z in logits]  # [K, n] each, within the slice
    # max p = exp(0) / total
    tops = [z.amax(-1, keepdim=True) for z in logits]  # [K, 1] each
    sums = [(top, 1 / p.amax(-1, keepdim=True)) for top, p in zip(tops, probs, strict=True)]
    gap = _mean(logits[1].sub_(policy), probs[0]) if gaps else None
    mean = _mean(policy.sub_(tops[0]), probs[0]) if entropy else None  # last: it overwrites z
    return _Read(chosen, sums, gap, mean)


def _slope(
    outputs: list[tuple[Tensor, float | None]],
    scales: list[Tensor | None],
    log_norms: list[Tensor],
    target: Tensor,
    start: int,
    *,
    slopes: tuple[Tensor | None, Tensor | None, Tensor | None],
    entropies: Tensor | None,
    slope_sum: Tensor | None,
    mixture: float,
) -> Tensor:
    """Return the gradient of a slice's outputs, [K, n]; outputs, scales, target: see `_read`.

    slopes: the gradients of log-prob, entropy and divergence, [K, 1] each. If the divergence has
    one, a slice without outputs of the reference has none of the reference's columns.
    """
    d_log_prob, d_entropy, d_divergence = slopes
    logits, cap = _finished(*outputs[0]), outputs[0][1]  # [K, n]
    cap_slope = None if cap is None else 1 - (logits / cap).square()  # [K, n]
    log_p = _tempered(logits, scales[0]).sub_(log_norms[0])  # [K, n]
    grad = log_p.exp()  # [K, n], p for now; dz = p * factor + added
    factor: Tensor | float = 0.0 if d_log_prob is None else -d_log_prob  # [K, 1]
    added = None
    if d_divergence is not None:
        assert slope_sum is not None
        log_q = None
        if len(outputs) > 1:
            log_q = _tempered(_finished(*outputs[1]), scales[1]).sub_(log_norms[1])  # [K, n]
        pull, added = _slopes(log_p, log_q, slope_sum, mixture)  # [K, n] or smaller
        factor = pull.mul_(-d_divergence).add_(factor)
        added = None if added is None else added.mul_(-d_divergence)
    if d_entropy is not None:
        factor = log_p.add_(entropies).mul_(-d_entropy).add_(factor)  # [K, n]
    grad.mul_(factor)
    if added is not None:
        grad.add_(added)
    if d_log_prob is not None:
        index, inside = _columns(target, start, grad.shape[1])  # [K, 1] each
        grad.scatter_add_(1, index, d_log_prob.where(inside, 0.0))
    grad = grad if cap_slope is None else grad.mul_(cap_slope)
    return _tempered(grad, scales[0])


def _entropy(norm: "_Norm", mean_logits: list[Tensor]) -> Tensor:
    """Return S = log sum exp z - E[z], [K, 1], from E[z - max z] of each slice."""
    mean = torch.cat(mean_logits, -1) + norm.tops - norm.top  # [K, slices]
    return norm.log_total - (mean * norm.shares).sum(-1, keepdim=True)


def _exact_kl(norm: "_Norm", reference: "_Norm", mean_gaps: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return KL(policy || reference) and the sum of p (f + 1), [K, 1] each.

    f = log p - log q = z - z' - (log sum exp z - log sum exp z'), with z' of the reference;
    `mean_gaps` has E[z' - z] of each slice that both vocabularies have.
    """
    common = norm.shares[:, : len(mean_gaps)]  # [K, slices]
    mass = common.sum(-1, keepdim=True)  # [K, 1], 1 but for rounding and padded rows
    gap = (torch.cat(mean_gaps, -1) * common).sum(-1, keepdim=True)  # [K, 1]
    kl = mass * (reference.top - norm.top + reference.log_total - norm.log_total)
    kl = kl - gap  # [K, 1]
    return kl, kl + mass


def _slopes(
    log_p: Tensor, log_q: Tensor | None, slope_sum: Tensor, mixture: float
) -> tuple[Tensor, Tensor | None]:
    """Return (first, second) with -dD / dz = p * first + second; second is None for 0.

    The first is [K, v] or [K, 1], the second [K, v]. -dD / dz = p sum(g) - g with g = dD / d log p.
    Columns that only one head has have no log_q, and g = 0. Overwrites log_q.
    """
    if log_q is None:
        return slope_sum.clone(), None
    if mixture == 0:  # g = -q
        return slope_sum.clone(), log_q.exp_()
    if mixture == 1:  # g = p (f + 1)
        return log_q.sub_(log_p).add_(slope_sum - 1), None
    log_m = _log_mixture(log_p, log_q, mixture)  # [K, v]; g = (1 - mixture) p (log p - log m)
    return log_m.sub_(log_p).mul_(1 - mixture).add_(slope_sum), None


def _mixture_divergence(
    outputs: _Outputs, target: Tensor, scales: list, log_norms: list[Tensor], mixture: float
) -> tuple[Tensor, Tensor]:
    """Return the divergence of a mixture below 1, and the sum of its slopes g, [K, 1] each.

    Another pass over the columns of both vocabularies, since it needs normalised log-probs.
    """
    sizes = [len(head.weight) for head, _ in outputs.models]
    value, slope_sum = torch.zeros_like(log_norms[0]), torch.zeros_like(log_norms[0])  # [K, 1]
    for at in _slices(sizes, target):
        if at.stop > min(sizes):
            break
        log_p, log_q = (  # not in place: the outputs may be the saved memory
            _finished(*outputs.read(i, at)) / (1 if scales[i] is None else scales[i]) - log_norms[i]
            for i in (0, 1)
        )  # [K, v] each
        if mixture == 0:
            value += _mean(log_q - log_p, log_q.exp())
            slope_sum -= log_q.exp().sum(-1, keepdim=True)
            continue
        log_m = _log_mixture(log_p, log_q, mixture)  # [K, v]
        of_policy = (1 - mixture) * _mean(log_p - log_m, log_p.exp())  # [K, 1]
        value += mixture * _mean(log_q - log_m, log_q.exp()) + of_policy
        slope_sum += of_policy
    return value, slope_sum


def _log_mixture(log_p: Tensor, log_q: Tensor, mixture: float) -> Tensor:
    """Return the log-probs of mixture * reference + (1 - mixture) * policy, [K, v]."""
    return torch.logaddexp(log_q + math.log(mixture), log_p + math.log1p(-mixture))


def _slices(sizes: list[int], target: Tensor) -> list[slice]:
    """Return slices of the columns with SLICE logits each; no slice crosses a vocabulary's end."""
    step = max(SLICE * (1 if target.device.type == "cpu" else 64) // max(len(target), 1), NARROWEST)
    step = step // 64 * 64 or step  # kernels are slower on other widths
    spans = pairwise(sorted({0, *sizes}))
    return [slice(i, min(i + step, end)) for start, end in spans for i in range(start, end, step)]


def _columns(target: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """Return each token's place in a slice of `count` columns [K, 1], and whether it is there."""
    index = target[:, None] - start
    inside = (index >= 0) & (index < count)
    return index.clamp(0, count - 1), inside


def _mean(values: Tensor, probs: Tensor) -> Tensor:
    """Return the mean [K, 1] of values [K, v]."""
    return torch.linalg.vecdot(probs, values)[:, None]


class _Norm(NamedTuple):
    """The normaliser of a softmax over n slices, and each slice's largest z and probability."""

    top: Tensor  # max z, [K, 1]
    log_total: Tensor  # log sum exp(z - top), [K, 1]
    tops: Tensor  # max z of each slice, [K, n]
    shares: Tensor  # the probability of each slice, [K, n]


def _joined(parts: list[tuple[Tensor, Tensor]]) -> _Norm:
    """Join (max z, sum of exp(z - max z)), [K, 1] each, of n slices."""
    tops, totals = (torch.cat(part, -1) for part in zip(*parts, strict=True))  # [K, n] each
    top = tops.amax(-1, keepdim=True)  # [K, 1]
    totals = totals * (tops - top).exp()  # [K, n]
    total = totals.sum(-1, keepdim=True)  # [K, 1]
    return _Norm(top, total.log(), tops, totals / total)


def _finished(outputs: Tensor, cap: float | None) -> Tensor:
    """Return the logits for outputs of the head's matmul, in at least float32."""
    wide = torch.promote_types(outputs.dtype, torch.float32)
    # A compiled function would write in-place changes back to its input.
    logits = outputs.to(wide, copy=torch.compiler.is_compiling())
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _tempered(logits: Tensor, scale: Tensor | None) -> Tensor:
    """Divide logits by the temperature of their tokens."""
    return logits if scale is None else logits.div_(scale)


def _per_token(temperature: Tensor | float, keep: Tensor) -> Tensor | None:
    """Return the temperature of each kept token, [K, 1], None where it is 1 everywhere."""
    value = torch.as_tensor(temperature, dtype=torch.float32, device=keep.device)
    if bool((value == 1).all()):
        return None
    return value.reshape(-1, 1).expand(keep.shape)[keep].unsqueeze(-1)
