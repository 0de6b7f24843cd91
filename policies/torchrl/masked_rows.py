"""Log-probabilities and entropies of masked rows of logits, without copying the logits.

Letters: *B batch, C classes, R rows (the product of *B), *S sample shape. `allowed` is bool:
[*B, C] masks entries, [*B, 1] rows; a row without an allowed entry may hold anything, even NaN.
Rows are processed in blocks, and the backward recomputes the softmax instead of storing it, so
there are no second derivatives.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Size, Tensor
from torch.autograd.function import once_differentiable

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_ROWS = 256  # maximum rows per block (50 MB of float32 at C = 50,000)
_BLOCKS = 16  # minimum number of blocks, to keep temporaries small compared to the logits
_ENTRIES = 65_536  # minimum entries per block, to limit overhead


def masked_log_prob(logits: Tensor, index: Tensor, keep: Tensor, allowed: Tensor) -> Tensor:
    """Return log softmax(logits [*B, C])[index] over the allowed entries, [*S, *B].

    index and keep are [*S, *B], every index in 0..C-1; 0 where not kept. Kept entries must be
    allowed. Half-precision logits give float32 results.

    >>> row = torch.tensor([1.0, 1.0, 5.0])
    >>> one = torch.tensor(0)
    >>> masked_log_prob(row, one, one == 0, torch.tensor([True, True, False]))
    tensor(-0.6931)
    """
    rows = logits.shape[:-1].numel()
    draws = index.shape[: index.ndim - logits.ndim + 1].numel()
    columns = [x.reshape(draws, rows).T for x in (index.long(), keep)]  # [R, S]
    out = _LogProb.apply(logits, *columns, allowed.reshape(rows, allowed.shape[-1]))
    return out.T.reshape(index.shape)


def masked_entropy(logits: Tensor, allowed: Tensor) -> Tensor:
    """Return the entropy in nats [*B] of softmax(logits [*B, C]) over the allowed entries.

    0 for a row without any. Half-precision logits give float32 results.
    """
    rows = logits.shape[:-1].numel()
    return _Entropy.apply(logits, allowed.reshape(rows, allowed.shape[-1]))


def at_index(x: Tensor, index: Tensor, size: int) -> Tensor:
    """Return x [*B, size or 1] at each index [*S, *B], [*S, *B].

    >>> at_index(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[0, 1], [1, 0]]), 2).tolist()
    [[1, 4], [2, 3]]
    """
    return x.expand(*index.shape, size).gather(-1, index.long().unsqueeze(-1)).squeeze(-1)


def check_indices(index: Tensor, size: int, remedy: str) -> None:
    """Raise ValueError unless every entry of `index` is an integer in 0..size-1."""
    if index.dtype not in _INTEGERS:
        raise ValueError(f"expected integers in 0..{size - 1}, got {index.dtype}; use .long()")
    outside = index[(index < 0) | (index >= size)]
    if outside.numel():
        got = outside[0].item()
        raise ValueError(f"expected integers in 0..{size - 1}, got {got}; {remedy}")


def check_mask(mask: Tensor, *shapes: Size) -> None:
    """Raise ValueError unless a mask is bool and has one of the shapes."""
    if mask.dtype is not torch.bool or mask.shape not in shapes:
        wanted = " or ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"expected a bool mask {wanted}, got {mask.dtype} {tuple(mask.shape)}")


def upcast(x: Tensor) -> Tensor:
    """Return half-precision values as float32, others as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class _LogProb(torch.autograd.Function):
    """logits [*B, C], target [R, S], keep [R, S], allowed [R, C or 1] -> [R, S]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, keep: Tensor, allowed: Tensor) -> Tensor:
        out = logits.new_empty(target.shape, dtype=upcast(logits[..., :0]).dtype)
        for at, rows in _blocks(logits):
            out[at] = _masked(rows, allowed[at]).log_softmax(-1).gather(-1, target[at])
        ctx.save_for_backward(logits, target, keep, allowed)
        return out.masked_fill_(~keep, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:  # type: ignore[override]
        logits, target, keep, allowed = ctx.saved_tensors
        grad = grad_outputs[0].masked_fill(~keep, 0)  # [R, S]
        out = logits.new_empty(len(target), logits.shape[-1])
        for at, rows in _blocks(logits):
            part = _masked(rows, allowed[at]).softmax(-1).mul_(-grad[at].sum(-1, keepdim=True))
            part.masked_fill_(~keep[at].any(-1, keepdim=True), 0)
            out[at] = part.scatter_add_(-1, target[at], grad[at])
        return out.view(logits.shape), None, None, None


class _Entropy(torch.autograd.Function):
    """logits [*B, C], allowed [R, C or 1] -> [*B]; its gradient is -p (log p + entropy)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, allowed: Tensor) -> Tensor:
        out = logits.new_empty(len(allowed), dtype=upcast(logits[..., :0]).dtype)
        for at, rows in _blocks(logits):
            out[at] = torch.special.entr(_masked(rows, allowed[at]).softmax(-1)).sum(-1)
        out.masked_fill_(~allowed.any(-1), 0)
        ctx.save_for_backward(logits, allowed, out)
        return out.view(logits.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:  # type: ignore[override]
        logits, allowed, entropy = ctx.saved_tensors
        grad = grad_outputs[0].reshape(-1, 1)
        out = logits.new_empty(len(allowed), logits.shape[-1])
        for at, rows in _blocks(logits):
            probs = _masked(rows, allowed[at]).softmax(-1)
            part = torch.special.entr(probs).sub_(probs.mul_(entropy[at].unsqueeze(-1)))
            out[at] = part.mul_(grad[at]).masked_fill_(~allowed[at].any(-1, keepdim=True), 0)
        return out.view(logits.shape), None


def _masked(rows: Tensor, allowed: Tensor) -> Tensor:
    """Return rows with -inf at masked entries; results of fully masked rows are not used."""
    rows = upcast(rows)
    return rows if allowed.shape[-1] == 1 else rows.masked_fill(~allowed, -torch.inf)


def _blocks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield (slice of rows, their logits [n, C]), views of logits [*B, C] in order."""
    rows, classes = logits.shape[:-1].numel(), logits.shape[-1]
    size = max(1, min(_ROWS, rows // _BLOCKS), _ENTRIES // max(classes, 1))
    start = 0
    for flat in _flat_views(logits):
        for block in flat.split(size):
            yield slice(start, start + len(block)), block
            start += len(block)


def _flat_views(x: Tensor) -> Iterator[Tensor]:
    """Yield x [*B, C] as [n, C] views: one if it is contiguous, else one per entry of *B."""
    if x.ndim <= 2 or x.is_contiguous():
        yield x.view(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    else:
        for part in x:
            yield from _flat_views(part)
