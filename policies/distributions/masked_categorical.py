"""The public categorical distributions: masked, one-hot, and both. `choice.py` does the work.

Letters: *B batch, C classes, I given indices, *S sample shape.
Left out on purpose: TorchRL's `sparse_mask` argument (`indices` are sparse, a `mask` is dense) and
its dropping of a last dimension of size 1 (one class is one class).
"""

from enum import Enum

import torch
from torch import Size, Tensor
from torch.distributions import RelaxedOneHotCategorical, constraints
from torch.nn.functional import one_hot

from policies.distributions.masked_classes import MaskedClasses, Shape


class ReparamGradientStrategy(Enum):
    """Name the gradient of a one-hot sample: that of the probabilities, or of a relaxed sample."""

    PassThrough = 1  # sample + probs - stop_gradient(probs)
    RelaxedOneHot = 2  # the same with softmax(logits + Gumbel noise) as probs, sample its argmax


class _OneHot(MaskedClasses):
    """Read and give one-hots [*S, *B, C] instead of classes."""

    _event_dims = 1
    has_rsample = True
    grad_method: ReparamGradientStrategy

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self):
        """Return the constraint that a value is one-hot."""
        return constraints.one_hot

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probs [*S, *B] of one-hots [*S, *B, C]; another value is a ValueError."""
        if value.shape[-1:] != self.event_shape:
            raise ValueError(
                f"expected one-hots with {self.num_samples} entries, got {tuple(value.shape)}; "
                "use torch.nn.functional.one_hot"
            )
        if self._validate_args and not constraints.one_hot.check(value).all():
            raise ValueError(
                "expected one-hots: a single 1 and otherwise 0, got something else; "
                "use torch.nn.functional.one_hot"
            )
        return super().log_prob(value.long().argmax(-1))

    def sample(self, sample_shape: Shape = None) -> Tensor:
        """Draw one-hots [*S, *B, C], int64; a row without a valid class is a ValueError."""
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

    @property
    def mean(self) -> Tensor:
        """Return the probabilities."""
        return self.probs

    @property
    def variance(self) -> Tensor:
        """Return p (1 - p)."""
        return self.probs * (1 - self.probs)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Return all C one-hots, [C, *B, C] (with `expand=False` [C, *1, C])."""
        return one_hot(super().enumerate_support(expand), self.num_samples)


class MaskedCategorical(MaskedClasses):
    """Hold a categorical distribution over the classes that a mask or a list of indices leaves.

    logits or probs [*B, C] float, unnormalised; exactly one of `mask` (bool, same shape) and
    `indices` (int64 [*B, I]; entries equal to `padding_value` are ignored, repeated ones count
    once). What is left shares all the probability; `neg_inf` is the log-prob reported for the rest.
    `use_cross_entropy` scores without storing normalised log-probs (and without a second
    derivative). Nothing is padded here, and `padding_value` is ignored wherever it stands, so
    `padding_side` takes its default only. Anything else is a ValueError.
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
        if padding_side != "left":
            raise ValueError(
                f"expected padding_side 'left', got {padding_side!r}: nothing is padded here and "
                "padding_value may stand on any side; leave it out"
            )
        if not neg_inf <= 0:
            raise ValueError(f"expected a log-probability <= 0 as neg_inf, got {neg_inf}")
        super().__init__(
            logits, probs, mask=mask, indices=indices, neg_inf=neg_inf, padding_value=padding_value
        )
        self._fused = use_cross_entropy

    @property
    def mask(self) -> Tensor:
        """Return the bool mask [*B, C]; also made from `indices`."""
        if self._mask is not None:
            return self._mask
        assert self._classes is not None
        width = (*self.batch_shape, self.num_samples + 1)  # the last column takes the padding
        empty = torch.zeros(width, dtype=torch.bool, device=self._classes.device)
        return empty.scatter(-1, self._classes, True)[..., :-1]

    @property
    def padding_value(self) -> int:
        """Return the padding value, 0 if none was given."""
        return 0 if self._padding_value is None else self._padding_value


class OneHotCategorical(_OneHot):
    """Hold a categorical distribution over one-hots [*B, C].

    logits or probs [*B, C], exactly one; `validate_args=False` skips the checks of values.

    >>> OneHotCategorical(torch.tensor([0.0, 2.0, 2.0])).mode  # a tie is one class
    tensor([0, 1, 0])
    """

    def __init__(
        self,
        logits: Tensor | None = None,
        probs: Tensor | None = None,
        grad_method: ReparamGradientStrategy = ReparamGradientStrategy.PassThrough,
        validate_args: bool | None = None,
    ) -> None:
        self.grad_method = _strategy(grad_method)
        super().__init__(logits, probs, validate_args=validate_args)


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
        self.grad_method = _strategy(grad_method)
        MaskedCategorical.__init__(
            self,
            logits,
            probs,
            mask=mask,
            indices=indices,
            neg_inf=neg_inf,
            padding_value=padding_value,
        )


def _strategy(value: ReparamGradientStrategy) -> ReparamGradientStrategy:
    if not isinstance(value, ReparamGradientStrategy):
        names = ", ".join(map(str, ReparamGradientStrategy))
        raise ValueError(f"expected a grad_method among {names}, got {value!r}")
    return value
