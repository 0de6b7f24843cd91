"""A categorical distribution over the classes that a mask or a list of indices leaves.

Letters: *B batch, C classes, I given indices, *S sample shape, R rows (the product of *B). It holds
a column of scores per class (dense) or per given index, sorted (sparse), so sparse work costs I
instead of C. A class with probability 0 counts as masked. A row without a valid class has log-probs
but neither mode nor samples.
Left out on purpose: masks that broadcast. A mask has the shape of the logits.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributions import Categorical
from torch.distributions.utils import lazy_property

from policies.distributions.masked_rows import (
    at_index,
    check_indices,
    masked_entropy,
    masked_log_prob,
    upcast,
)

Shape = Size | Sequence[int] | None


class MaskedClasses(Categorical):
    """Be a categorical distribution over the classes that are left, as class indices.

    logits or probs [*B, C] float, exactly one; mask [*B, C] bool or indices [*B, I] int64 or
    neither. Half precision becomes float32. Its public faces are in `masked_categorical.py`.
    """

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
        validate_args: bool | None = None,
    ) -> None:
        given = self._param = _one_of(logits, probs)
        self.num_samples = self._num_events = given.shape[-1]
        self.neg_inf, self._padding_value, self._fused = neg_inf, padding_value, True
        super(Categorical, self).__init__(
            given.shape[:-1], Size([given.shape[-1]] * self._event_dims), validate_args
        )
        self._mask, self._classes, keep = mask, None, mask
        if mask is not None:
            _check_mask(mask, given.shape)
        elif indices is not None:
            self._classes, keep = _sorted_classes(indices, given.shape, padding_value)
            given = given.gather(-1, self._classes.clamp(max=self.num_samples - 1))
        given, nothing = upcast(given), 0 if logits is None else -torch.inf
        kept = given if keep is None else given.masked_fill(~keep, nothing)
        # amax and amin pass NaN on.
        if (
            self._validate_args
            and not ((kept.amax(-1) < torch.inf) & (kept.amin(-1) >= nothing)).all()
        ):
            what = "logits" if probs is None else "probs >= 0"
            raise ValueError(
                f"expected {what} without NaN or inf at valid classes, got some; mask them out"
            )
        self._scores = kept if probs is None else _log(kept)  # [*B, C or I], -inf if masked

    @lazy_property
    def logits(self) -> Tensor:
        """Return the log-probs [*B, C], `neg_inf` at masked classes."""
        return self._spread(self._log_probs.masked_fill(~self._valid, self.neg_inf), self.neg_inf)

    @lazy_property
    def probs(self) -> Tensor:
        """Return the probabilities [*B, C], exactly 0 at masked classes."""
        return self._spread(self._column_probs, 0)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probs [*S, *B] of classes [*S, *B] (or what broadcasts to it).

        `neg_inf` at masked classes; a class outside 0..C-1 or a non-integer is a ValueError.
        """
        if self._validate_args:
            check_indices(value, self.num_samples, "a class is an index, not a one-hot")
        value = value.expand(_broadcast(value.shape, self.batch_shape))
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
        """Draw classes [*S, *B]; a row without a valid class is a ValueError."""
        shape = Size(sample_shape or ())
        self._need_valid_classes()
        with torch.no_grad():
            rows = self._column_probs.reshape(-1, self._scores.shape[-1])
            drawn = torch.multinomial(rows, shape.numel(), replacement=True).T  # [S, R]
        return self._class_of(drawn.reshape(shape + self.batch_shape))

    @property
    def mode(self) -> Tensor:
        """Return the likeliest class [*B], the lowest of several."""
        self._need_valid_classes()
        return self._class_of(self._scores.argmax(-1))

    @property
    def deterministic_sample(self) -> Tensor:
        """Return `mode`, under TorchRL's name."""
        return self.mode

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
        """Return which rows have a valid class, [*B, 1]."""
        return self._scores.amax(-1, keepdim=True) > -torch.inf

    @property
    def _safe_scores(self) -> Tensor:
        # A row of -inf would be NaN, and so would its gradient.
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
        drawn = value.shape[: value.ndim - len(self.batch_shape)].numel()
        rows, wanted = self._classes.reshape(count, size), value.reshape(drawn, count).T  # [R, *]
        found = torch.searchsorted(rows.contiguous(), wanted.contiguous()).clamp(max=size - 1)
        column = found.T.reshape(value.shape)
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
        place = self._classes.masked_fill(~self._valid, size)  # a column that is cut off again
        wide = columns.new_full((*self.batch_shape, size + 1), fill)
        return wide.scatter(-1, place, columns)[..., :-1]

    def _need_valid_classes(self) -> None:
        empty = (~self._some.squeeze(-1)).nonzero().tolist()
        if empty:
            which = f"row {empty[0]} of {tuple(self.batch_shape)}" if empty[0] else "the only row"
            raise ValueError(
                f"expected a valid class in every row, got none in {which} ({len(empty)} in all); "
                "unmask one or drop the row"
            )


def _one_of(logits: Tensor | None, probs: Tensor | None) -> Tensor:
    if (logits is None) == (probs is None):
        got = "neither" if logits is None else "both"
        raise ValueError(f"expected logits or probs, got {got}; give exactly one")
    name, given = ("logits", logits) if probs is None else ("probs", probs)
    assert given is not None
    if not given.is_floating_point() or given.ndim == 0 or given.shape[-1] == 0:
        raise ValueError(
            f"expected float {name} [*B, C] with C > 0, got {given.dtype} {tuple(given.shape)}; "
            "the last dimension holds the classes"
        )
    return given


def _check_mask(mask: Tensor, shape: Size) -> None:
    if mask.dtype is not torch.bool:
        raise ValueError(
            f"expected a bool mask (True = valid), got {mask.dtype}; use .bool(), "
            "or indices= for a list of valid classes"
        )
    if mask.shape != shape:
        raise ValueError(
            f"expected a mask of shape {tuple(shape)}, got {tuple(mask.shape)}; use .expand"
        )


def _sorted_classes(indices: Tensor, shape: Size, padding: int | None) -> tuple[Tensor, Tensor]:
    """Return the classes [*B, I] sorted, padding as C, and where a class first stands."""
    if indices.ndim != len(shape) or indices.shape[:-1] != shape[:-1] or not indices.shape[-1]:
        lead = "".join(f"{n}, " for n in shape[:-1])
        raise ValueError(
            f"expected indices of shape [{lead}I] with I > 0, got {tuple(indices.shape)}; "
            "pad the rows and name the padding_value"
        )
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


def _broadcast(value: Size, batch: Size) -> Size:
    if any(a != b and 1 not in (a, b) for a, b in zip(value[::-1], batch[::-1], strict=False)):
        raise ValueError(
            f"expected values of shape [*S, *B] with *B = {tuple(batch)}, got {tuple(value)}; "
            "reshape them"
        )
    return torch.broadcast_shapes(value, batch)
