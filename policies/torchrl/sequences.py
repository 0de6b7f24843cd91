"""Distributions over the tokens of a sequence: masked, or of known log-probabilities.

Letters: *B batch, T tokens, C vocabulary, *S sample shape. logits[t] predicts token t: nothing is
shifted here, and no mask is guessed from token ids.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributions import Categorical, Distribution
from torch.nn.functional import one_hot

from policies.torchrl.masked_rows import (
    at_index,
    check_indices,
    check_mask,
    masked_entropy,
    masked_log_prob,
)


class LLMMaskedCategorical(Distribution):
    """Give each token a categorical distribution, some positions or some tokens masked out.

    logits [*B, T, C] float, unnormalised; mask bool, True = valid: [*B, T] masks positions,
    [*B, T, C] masks tokens at each position (and is itself that much larger). A position without a
    valid token has `ignore_index` as `sample` and `mode`, and `entropy` 0.
    Raise ValueError for a mask of another shape or dtype. `probs` and `logits` are unmasked.
    Source: the torchrl reference of the same name.

    >>> logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]]).log_softmax(-1)
    >>> dist = LLMMaskedCategorical(logits, torch.tensor([False, True]))
    >>> dist.mode.tolist(), [round(x, 3) for x in dist.log_prob(torch.tensor([-100, 1])).tolist()]
    ([-100, 1], [0.0, -0.313])
    """

    has_rsample = True

    def __init__(self, logits: Tensor, mask: Tensor, ignore_index: int = -100) -> None:
        check_mask(mask, logits.shape[:-1], logits.shape)
        self._logits, self._mask, self.ignore_index = logits, mask, ignore_index
        self._cache: dict[str, tuple[bool, Any]] = {}
        super().__init__(batch_shape=logits.shape[:-1], validate_args=False)

    arg_constraints = {}  # type: ignore[assignment]  # noqa: RUF012  # checked by the constructor
    logits = property(lambda self: self._logits, doc="The original logits [*B, T, C].")
    mask = property(lambda self: self._mask, doc="The mask passed to the constructor.")

    @property
    def probs(self) -> Tensor:
        """Return the softmax of the unmasked logits; see also `masked_dist.probs`."""
        return self._logits.softmax(-1)

    @property
    def position_level_masking(self) -> bool:
        """Return True if the mask covers positions, False if it covers tokens."""
        return self._mask.ndim < self._logits.ndim

    @property
    def masked_logits(self) -> Tensor:
        """Return the logits with -inf where masked; cached until clear_cache."""
        return self._cached("logits", lambda: self._logits.masked_fill(~self._wide, -torch.inf))

    @property
    def masked_dist(self) -> Categorical:
        """Return the masked Categorical, cached as well; uniform without a valid token."""
        return self._cached("dist", self._build_dist)

    def clear_cache(self) -> None:
        """Free the masked copies of the logits."""
        self._cache.clear()

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probabilities [*S, *B, T] of tokens [*S, *B, T].

        0 at masked positions and wherever the token is `ignore_index`; -inf for a masked token.
        Half-precision logits give float32 results. No copy of the logits is made.
        """
        shape = self.batch_shape
        if value.shape[max(0, value.ndim - len(shape)) :] != shape:
            got = tuple(value.shape)
            raise ValueError(f"expected tokens of shape [*S, *{tuple(shape)}], got {got}")
        ignored = value == self.ignore_index
        if self.position_level_masking:
            ignored = ignored | ~self._mask
        token = value.masked_fill(ignored, 0)  # any valid index
        check_indices(token, self._logits.shape[-1], f"ignore_index is {self.ignore_index}")
        inside = at_index(self._wide, token, self._logits.shape[-1])
        known = masked_log_prob(self._logits, token, inside & ~ignored, self._wide)
        return known.masked_fill(~inside & ~ignored, -torch.inf)

    def sample(self, sample_shape: Size | Sequence[int] | None = None) -> Tensor:
        """Draw tokens [*S, *B, T]; `ignore_index` at positions without a valid token."""
        with torch.no_grad():
            sampled = self.masked_dist.sample(Size(sample_shape or ()))
        return sampled.masked_fill(~self._valid, self.ignore_index)

    def rsample(self, sample_shape: Size | Sequence[int] | None = None) -> Tensor:
        """Draw one-hots [*S, *B, T, C] with the gradient of the probabilities.

        Straight-through estimator (Bengio et al. 2013, section 4); masked positions are all zero.
        """
        sampled = self.sample(sample_shape).masked_fill(~self._valid, 0)
        probs = self.masked_dist.probs  # [*B, T, C]
        hot = one_hot(sampled, probs.shape[-1]).to(probs.dtype)
        return (hot + (probs - probs.detach())).masked_fill(~self._valid.unsqueeze(-1), 0)

    @property
    def mode(self) -> Tensor:
        """Return the likeliest valid tokens [*B, T], else `ignore_index`."""
        logits = self._logits if self.position_level_masking else self.masked_logits
        return logits.argmax(-1).masked_fill(~self._valid, self.ignore_index)

    deterministic_sample = property(lambda self: self.mode, doc="`mode`, under TorchRL's name.")

    def entropy(self) -> Tensor:
        """Return the entropy in nats [*B, T] over the valid tokens; 0 where there is none."""
        return masked_entropy(self._logits, self._wide)

    def expand(self, batch_shape: Size | Sequence[int], _instance: Any = None):
        """Return the same distribution over `batch_shape` (which ends in T)."""
        logits = self._logits.expand(*batch_shape, -1)
        shape = batch_shape if self.position_level_masking else logits.shape
        return type(self)(logits, self._mask.expand(shape), self.ignore_index)

    @property
    def _valid(self) -> Tensor:
        return self._mask if self.position_level_masking else self._mask.any(-1)  # [*B, T]

    @property
    def _wide(self) -> Tensor:
        return self._mask.unsqueeze(-1) if self.position_level_masking else self._mask

    def _build_dist(self) -> Categorical:
        logits = self._logits
        if not self.position_level_masking:
            logits = logits.masked_fill(~self._mask, -torch.inf)
        # A row of -inf (or of padding values) would give NaN, also in the gradient.
        return Categorical(logits=logits.masked_fill(~self._valid.unsqueeze(-1), 0))

    def _cached(self, name: str, build: Callable[[], Any]) -> Any:
        """Return the cached value; build it again if it lacks the gradient now needed."""
        tracked = torch.is_grad_enabled() and self._logits.requires_grad
        if name not in self._cache or (tracked and not self._cache[name][0]):
            self._cache[name] = (tracked, build())
        return self._cache[name][1]


class LogProbDistribution(Distribution):
    """Wrap log-probabilities of known tokens, without logits.

    log_probs [B, T]; mask [B, T] bool, True = valid. Only the `log_prob` of these tokens is known:
    it checks the shape of `value`, not its ids. Raise ValueError for a mask of another shape or
    dtype.

    >>> dist = LogProbDistribution(torch.tensor([[-1.0, -2.0]]), torch.tensor([[True, False]]))
    >>> dist.log_prob(torch.tensor([[7, 8]])).tolist()
    [[-1.0, 0.0]]
    """

    def __init__(self, log_probs: Tensor, mask: Tensor | None = None) -> None:
        if mask is not None:
            check_mask(mask, log_probs.shape)
        self.log_probs, self.mask = log_probs, mask
        batch, event = log_probs.shape[:-1], log_probs.shape[-1:]
        if log_probs.ndim < 2:
            batch, event = log_probs.shape, Size()
        super().__init__(batch_shape=batch, event_shape=event, validate_args=False)

    arg_constraints = {}  # type: ignore[assignment]  # noqa: RUF012  # any log-probs are valid

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probs [B, T], 0 where masked; `value` must have their shape."""
        if value.shape != self.log_probs.shape:
            shapes = tuple(value.shape), tuple(self.log_probs.shape)
            raise ValueError(f"value shape {shapes[0]} must match log_probs shape {shapes[1]}")
        if self.mask is None:
            return self.log_probs.clone()
        return self.log_probs.masked_fill(~self.mask, 0)

    def sample(self, sample_shape: Size | Sequence[int] | None = None) -> Tensor:
        """Raise NotImplementedError: the distribution over other tokens is unknown."""
        raise NotImplementedError("Sampling not supported for LogProbDistribution: no logits")

    def entropy(self) -> Tensor:
        """Raise NotImplementedError: the distribution over other tokens is unknown."""
        raise NotImplementedError("Entropy not supported for LogProbDistribution: no logits")
