"""Categorical distributions restricted by a mask or a list of indices.

Letters: *B batch, C classes, I indices, *S sample shape, R rows (the product of *B). Scores have a
column per class (dense) or per sorted index (sparse), so sparse work costs I instead of C. A class
with probability 0 counts as masked. A row without a valid class has log-probs but neither mode nor
samples. Masks do not broadcast, and a last dimension of size 1 stays. There is no argument
`sparse_mask`: `indices` are sparse, a `mask` is dense.
"""

import copy
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributions import Categorical, RelaxedOneHotCategorical, constraints
from torch.distributions.utils import lazy_property
from torch.nn.functional import one_hot

from policies.torchrl.masked_rows import (
    at_index,
    check_indices,
    check_mask,
    masked_entropy,
    masked_log_prob,
    upcast,
)

Shape = Size | Sequence[int] | None


class MaskedClasses(Categorical):
    """A categorical distribution over the valid classes, as class indices."""

    _event_dims = 0

    def __init__(
        self,
        logits: Tensor | None,
        probs: Tensor | None,
        *,
        mask: Tensor | None = None,
        indices: Tensor | None = None,
        neg_inf: float = -torch.inf,
        padding_value: int | None = None,
    ) -> None:
        values = self._param = _one_of(logits, probs)
        self.num_samples = self._num_events = values.shape[-1]
        self.neg_inf, self._padding_value, self._fused = neg_inf, padding_value, True
        event = Size([values.shape[-1]] * self._event_dims)
        super(Categorical, self).__init__(values.shape[:-1], event)
        self._mask, self._classes, keep = mask, None, mask
        if mask is not None:
            check_mask(mask, values.shape)
        elif indices is not None:
            self._classes, keep = _sorted_classes(indices, values.shape, padding_value)
            values = values.gather(-1, self._classes.clamp(max=self.num_samples - 1))
        values, nothing = upcast(values), 0 if logits is None else -torch.inf
        masked = values if keep is None else values.masked_fill(~keep, nothing)
        fits = (masked.amax(-1) < torch.inf) & (masked.amin(-1) >= nothing)  # NaN does not
        if self._validate_args and not fits.all():
            label = "logits" if probs is None else "probs >= 0"
            raise ValueError(f"expected {label} without NaN or inf at valid classes; mask them out")
        self._scores = masked if probs is None else _log(masked)  # [*B, C or I], -inf if masked

    @lazy_property
    def logits(self) -> Tensor:
        """Return the log-probs [*B, C], `neg_inf` at masked classes."""
        return self._spread(self._log_probs.masked_fill(~self._valid, self.neg_inf), self.neg_inf)

    @lazy_property
    def probs(self) -> Tensor:
        """Return the probabilities [*B, C], exactly 0 at masked classes."""
        return self._spread(self._column_probs, 0)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probs [*S, *B] of broadcastable classes; `neg_inf` at masked ones.

        Raise ValueError for a class outside 0..C-1 or a non-integer.
        """
        if self._validate_args:
            check_indices(value, self.num_samples, "a class is an index, not a one-hot")
        value = value.expand(torch.broadcast_shapes(value.shape, self.batch_shape))
        column, inside = self._columns(value)
        if self._fused:
            known = masked_log_prob(self._scores, column, inside, self._some)
        else:
            known = at_index(self._log_probs, column, self._scores.shape[-1])
        return known.masked_fill(~inside, self.neg_inf)

    def entropy(self) -> Tensor:
        """Return the entropy in nats [*B] over the valid classes; 0 where there is none."""
        return masked_entropy(self._scores, self._some)

    def sample(self, sample_shape: Shape = None) -> Tensor:
        """Draw classes [*S, *B]; raise ValueError if a row has no valid class."""
        shape = Size(sample_shape or ())
        self._need_valid_classes()
        with torch.no_grad():
            rows = self._column_probs.reshape(-1, self._scores.shape[-1])
            sampled = torch.multinomial(rows, shape.numel(), replacement=True).T  # [S, R]
        return self._class_of(sampled.reshape(shape + self.batch_shape))

    @property
    def mode(self) -> Tensor:
        """Return the likeliest class [*B], the lowest of several."""
        self._need_valid_classes()
        return self._class_of(self._scores.argmax(-1))

    deterministic_sample = property(lambda self: self.mode, doc="`mode`, under TorchRL's name.")

    def expand(self, batch_shape: Size | Sequence[int], _instance: Any = None):
        """Return the same distribution over a larger batch, without copying."""
        new = copy.copy(self)
        new._batch_shape = Size(batch_shape)
        for name in ("_param", "_mask", "_classes", "_scores"):
            value = getattr(self, name)
            setattr(new, name, None if value is None else value.expand(*batch_shape, -1))
        for name in ("logits", "probs", "_log_probs", "_column_probs"):
            new.__dict__.pop(name, None)
        return new

    @property
    def _valid(self) -> Tensor:
        return self._scores > -torch.inf

    @property
    def _some(self) -> Tensor:
        """Return the mask of rows with a valid class, [*B, 1]."""
        return self._scores.amax(-1, keepdim=True) > -torch.inf

    @property
    def _safe_scores(self) -> Tensor:
        # A row of -inf would give NaN, also in the gradient.
        return self._scores.masked_fill(~self._some, 0)

    @lazy_property
    def _log_probs(self) -> Tensor:
        return self._safe_scores.log_softmax(-1).masked_fill(~self._some, -torch.inf)

    @lazy_property
    def _column_probs(self) -> Tensor:
        return self._safe_scores.softmax(-1).masked_fill(~self._some, 0)

    def _columns(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the column of each class [*S, *B], and whether it is a valid one."""
        size = self._scores.shape[-1]
        if self._classes is None:
            return value, at_index(self._valid, value, size)
        count = self.batch_shape.numel()
        draws = value.shape[: value.ndim - len(self.batch_shape)].numel()
        rows, wanted = self._classes.reshape(count, size), value.reshape(draws, count).T  # [R, *]
        position = torch.searchsorted(rows.contiguous(), wanted.contiguous()).clamp(max=size - 1)
        column = position.T.reshape(value.shape)
        same = at_index(self._classes, column, size) == value
        return column, same & at_index(self._valid, column, size)

    def _class_of(self, column: Tensor) -> Tensor:
        if self._classes is None:
            return column
        return at_index(self._classes, column, self._scores.shape[-1])

    def _spread(self, columns: Tensor, fill: float) -> Tensor:
        """Return columns [*B, I] at their classes in [*B, C], `fill` elsewhere."""
        if self._classes is None:
            return columns
        size = self.num_samples
        place = self._classes.masked_fill(~self._valid, size)  # an extra column, cut off below
        wide = columns.new_full((*self.batch_shape, size + 1), fill)
        return wide.scatter(-1, place, columns)[..., :-1]

    def _need_valid_classes(self) -> None:
        if empty := (~self._some.squeeze(-1)).nonzero().tolist():
            raise ValueError(f"expected a valid class in every row, got none in row {empty[0]}")


class ReparamGradientStrategy(Enum):
    """Choose the gradient of a one-hot sample: of the probabilities, or of a relaxed sample."""

    PassThrough = 1  # sample + probs - stop_gradient(probs)
    RelaxedOneHot = 2  # the same with softmax(logits + Gumbel noise) as probs, sample its argmax


class _OneHot(MaskedClasses):
    """Read and return one-hots [*S, *B, C] instead of classes."""

    _event_dims = 1
    has_rsample = True
    grad_method: ReparamGradientStrategy

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self):
        """Return the constraint that a value is one-hot."""
        return constraints.one_hot

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probs [*S, *B] of one-hots [*S, *B, C]; raise ValueError for others."""
        fits = value.shape[-1:] == self.event_shape
        if not fits or (self._validate_args and not constraints.one_hot.check(value).all()):
            raise ValueError(f"expected one-hots with {self.num_samples} entries, a single 1")
        return super().log_prob(value.long().argmax(-1))

    def sample(self, sample_shape: Shape = None) -> Tensor:
        """Draw one-hots [*S, *B, C], int64; raise ValueError if a row has no valid class."""
        return one_hot(super().sample(sample_shape), self.num_samples)

    def rsample(self, sample_shape: Shape = None) -> Tensor:
        """Draw one-hots [*S, *B, C] with the gradient that `grad_method` names."""
        if self.grad_method is ReparamGradientStrategy.PassThrough:
            hot, soft = self.sample(sample_shape), self.probs
        else:
            self._need_valid_classes()
            scores = self._spread(self._log_probs, -torch.inf)
            relaxed = RelaxedOneHotCategorical(scores.new_tensor(1.0), logits=scores)
            soft = relaxed.rsample(Size(sample_shape or ()))
            hot = one_hot(soft.argmax(-1), self.num_samples)
        return hot.to(soft.dtype) + (soft - soft.detach())

    @property
    def mode(self) -> Tensor:
        """Return the one-hot [*B, C] of the likeliest class, the lowest of several."""
        return one_hot(super().mode, self.num_samples)

    mean = property(lambda self: self.probs)
    variance = property(lambda self: self.probs * (1 - self.probs))

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Return all C one-hots, [C, *B, C] (with `expand=False` [C, *1, C])."""
        return one_hot(super().enumerate_support(expand), self.num_samples)


class MaskedCategorical(MaskedClasses):
    """Hold a categorical distribution restricted by a mask or a list of indices.

    logits or probs [*B, C] float, unnormalised; exactly one of `mask` (bool, same shape) and
    `indices` (int64 [*B, I]; entries equal to `padding_value` are ignored, repeated ones count
    once). The valid classes share all the probability; other classes have log-prob `neg_inf`.
    Half precision becomes float32. `use_cross_entropy` scores without storing normalised log-probs
    (and without a second derivative). `padding_side` has no effect: nothing is padded here.
    Source: the TorchRL reference of the same name.

    >>> dist = MaskedCategorical(torch.zeros(4), mask=torch.tensor([True, False, True, True]))
    >>> dist.log_prob(torch.tensor([0, 1]))
    tensor([-1.0986,    -inf])
    """

    def __init__(
        self,
        logits: Tensor | None = None,
        probs: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        indices: Tensor | None = None,
        neg_inf: float = -torch.inf,
        padding_value: int | None = None,
        use_cross_entropy: bool = True,
        padding_side: str = "left",
    ) -> None:
        if (mask is None) == (indices is None):
            got = "neither" if mask is None else "both"
            raise ValueError(f"expected a mask or indices, got {got}; give exactly one")
        super().__init__(
            logits, probs, mask=mask, indices=indices, neg_inf=neg_inf, padding_value=padding_value
        )
        self._fused = use_cross_entropy

    @property
    def mask(self) -> Tensor:
        """Return the bool mask [*B, C], built from `indices` if needed."""
        if self._mask is not None:
            return self._mask
        assert self._classes is not None
        width = (*self.batch_shape, self.num_samples + 1)  # the last column takes the padding
        empty = torch.zeros(width, dtype=torch.bool, device=self._classes.device)
        return empty.scatter(-1, self._classes, True)[..., :-1]

    padding_value = property(lambda self: self._padding_value or 0, doc="0 by default.")


class OneHotCategorical(_OneHot):
    """Hold a categorical distribution over one-hots [*B, C].

    logits or probs [*B, C], exactly one.

    >>> OneHotCategorical(torch.tensor([0.0, 2.0, 2.0])).mode  # a tie is one class
    tensor([0, 1, 0])
    """

    def __init__(
        self,
        logits: Tensor | None = None,
        probs: Tensor | None = None,
        grad_method: ReparamGradientStrategy = ReparamGradientStrategy.PassThrough,
    ) -> None:
        self.grad_method = ReparamGradientStrategy(grad_method)
        super().__init__(logits, probs)


class MaskedOneHotCategorical(_OneHot, MaskedCategorical):
    """Hold a `MaskedCategorical` over one-hots [*B, C], sparse ones at full width too.

    >>> dist = MaskedOneHotCategorical(torch.zeros(4), indices=torch.tensor([3, 1]))
    >>> dist.mode, dist.log_prob(dist.mode)
    (tensor([0, 1, 0, 0]), tensor(-0.6931))
    """

    def __init__(
        self,
        logits: Tensor | None = None,
        probs: Tensor | None = None,
        mask: Tensor | None = None,
        indices: Tensor | None = None,
        neg_inf: float = -torch.inf,
        padding_value: int | None = None,
        grad_method: ReparamGradientStrategy = ReparamGradientStrategy.PassThrough,
    ) -> None:
        self.grad_method = ReparamGradientStrategy(grad_method)
        left: dict[str, Any] = {"mask": mask, "indices": indices, "padding_value": padding_value}
        MaskedCategorical.__init__(self, logits, probs, neg_inf=neg_inf, **left)


def _one_of(logits: Tensor | None, probs: Tensor | None) -> Tensor:
    if (logits is None) == (probs is None):
        got = "neither" if logits is None else "both"
        raise ValueError(f"expected logits or probs, got {got}; give exactly one")
    name, values = ("logits", logits) if probs is None else ("probs", probs)
    assert values is not None
    if not values.is_floating_point() or values.ndim == 0 or values.shape[-1] == 0:
        raise ValueError(f"expected float {name} [*B, C], got {values.dtype} {tuple(values.shape)}")
    return values


def _sorted_classes(indices: Tensor, shape: Size, padding: int | None) -> tuple[Tensor, Tensor]:
    """Return the classes [*B, I] sorted, padding as C, and the mask of first occurrences."""
    if indices.shape[:-1] != shape[:-1] or not indices.shape[-1]:
        lead, got = tuple(shape[:-1]), tuple(indices.shape)
        raise ValueError(f"expected indices [*{lead}, I] with I > 0, got {got}; pad the rows")
    size = shape[-1]
    padded = torch.zeros_like(indices, dtype=torch.bool) if padding is None else indices == padding
    check_indices(indices.masked_fill(padded, 0), size, f"padding_value is {padding}")
    classes = indices.long().masked_fill(padded, size).sort(-1).values
    keep = classes < size
    keep[..., 1:] &= classes[..., 1:] != classes[..., :-1]
    return classes, keep


def _log(probs: Tensor) -> Tensor:
    """Return log(probs), -inf with a gradient of 0 (not NaN) at 0."""
    none = probs == 0
    return probs.masked_fill(none, 1).log().masked_fill(none, -torch.inf)
