"""LLMMaskedCategorical against slow loops in float64: values, gradients, memory."""

import gc
import math
import weakref

import pytest
import torch
from torch.autograd import gradcheck

from benchmarks.measure import peak_bytes
from policies.distributions.sequences import LLMMaskedCategorical

B, T, C = 2, 4, 5
POSITIONS = torch.tensor([[False, True, True, True], [True, False, True, False]])
TOKENS = torch.tensor(
    [[[1, 1, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]]] * B
).bool()
TOKENS[1, 2, 3] = True
MASKS = {"positions": POSITIONS, "tokens": TOKENS}
VALUES = torch.tensor([[-100, 1, 2, 4], [0, 3, -100, 1]])
both_masks = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


def logits(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, T, C, generator=generator, dtype=torch.float64) * 2


def wide(mask: torch.Tensor) -> torch.Tensor:
    """Return which tokens are valid at each position, [B, T, C]."""
    return mask if mask.ndim == 3 else mask.unsqueeze(-1).expand(B, T, C)


@both_masks
def test_log_prob_entropy_and_mode_equal_a_slow_loop(mask):
    x, dist = logits(), LLMMaskedCategorical(logits(), mask)
    log_prob, entropy, mode = dist.log_prob(VALUES), dist.entropy(), dist.mode
    for at in torch.cartesian_prod(torch.arange(B), torch.arange(T)).tolist():
        at, value = tuple(at), int(VALUES[tuple(at)])
        weights = {c: math.exp(x[at][c]) for c in range(C) if wide(mask)[at][c]}
        total = sum(weights.values())
        p = {c: weight / total for c, weight in weights.items()}
        want = math.log(p[value]) if value in p else -math.inf
        if value == -100 or (mask is POSITIONS and not p):
            want = 0.0
        assert log_prob[at].item() == pytest.approx(want, abs=1e-12)
        spread = -sum(q * math.log(q) for q in p.values())
        assert entropy[at].item() == pytest.approx(spread, abs=1e-12)
        assert mode[at].item() == max(p, key=p.__getitem__, default=-100)


@both_masks
def test_gradients(mask):
    x = logits().requires_grad_()
    finite = torch.tensor([[0, 1, -100, 2], [1, 1, 3, 2]])
    value = VALUES if mask is POSITIONS else finite
    for values in (value, torch.stack([value] * 3)):
        assert gradcheck(lambda y, v=values: LLMMaskedCategorical(y, mask).log_prob(v), x)
    assert gradcheck(lambda y: LLMMaskedCategorical(y, mask).entropy(), x)


@both_masks
def test_no_gradient_is_nan_whatever_is_masked_and_masked_logits_get_none(mask):
    x = logits().masked_fill(~wide(mask), torch.nan).requires_grad_()
    dist = LLMMaskedCategorical(x, mask)
    values = dist.log_prob(torch.full((B, T), 2))  # of masked tokens too
    (values.sum() + dist.entropy().sum() + dist.rsample().square().sum()).backward()
    assert torch.isfinite(x.grad).all()
    assert (x.grad[~wide(mask)] == 0).all()


@pytest.mark.parametrize("shape", [None, (), (2, 3)])
@both_masks
def test_samples_respect_the_mask_and_have_a_log_prob(mask, shape):
    dist = LLMMaskedCategorical(logits(), mask, ignore_index=-7)
    valid = wide(mask).any(-1)
    drawn = dist.sample(shape)
    assert drawn.shape == (*(shape or ()), B, T)
    assert (drawn[..., ~valid] == -7).all()
    log_prob = dist.log_prob(drawn)
    assert torch.isfinite(log_prob).all()
    assert (log_prob[..., ~valid] == 0).all()
    hot = dist.rsample(shape)
    assert torch.equal(hot.sum(-1), valid.expand(hot.shape[:-1]).double())


def test_samples_have_the_frequencies_and_the_gradient_of_the_masked_probabilities():
    torch.manual_seed(0)
    x, y, w = logits().requires_grad_(), logits().requires_grad_(), logits(1)
    probs = (y.exp() * TOKENS) / (y.exp() * TOKENS).sum(-1, keepdim=True).clamp(min=1e-300)
    dist = LLMMaskedCategorical(x, TOKENS)
    drawn = torch.bincount(dist.sample((4000,))[:, 0, 0], minlength=C).double() / 4000
    assert torch.allclose(drawn, probs[0, 0], atol=0.03)
    (dist.rsample() * w).sum().backward()
    (probs * w).sum().backward()
    assert torch.allclose(x.grad, y.grad)


@both_masks
def test_masked_copies_are_lazy_have_gradients_where_wanted_and_clear_cache_frees_them(mask):
    dist = LLMMaskedCategorical(logits().requires_grad_(), mask)
    dist.log_prob(torch.zeros(B, T, dtype=torch.int64))
    dist.entropy()
    assert not dist._cache  # neither needs a masked copy
    dist.sample()
    assert dist.masked_dist.logits.requires_grad  # not the copy that the sample was drawn from
    copies = [weakref.ref(x) for x in (dist.masked_logits, dist.masked_dist.logits)]
    dist.clear_cache()
    gc.collect()
    assert [ref() for ref in copies] == [None] * 2


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("name", ["log_prob", "entropy"])
def test_log_prob_and_entropy_make_no_copy_of_the_logits(name, dims, sliced):
    x = torch.randn(2, 33 if sliced else 32, 50_000, requires_grad=True)
    x = x[:, 1:] if sliced else x  # rows that do not lie in one piece
    mask, given = torch.ones(x.shape[:dims], dtype=torch.bool), [torch.full((2, 32), 7)]
    given = given if name == "log_prob" else []

    def backward() -> None:
        dist = LLMMaskedCategorical(x.detach().requires_grad_(), mask)
        getattr(dist, name)(*given).sum().backward()

    forward = getattr(LLMMaskedCategorical(x, mask), name)
    assert peak_bytes(lambda: forward(*given)) < 0.25 * x.nbytes
    assert peak_bytes(backward) < 1.35 * x.nbytes  # the gradient itself is one


@both_masks
def test_an_expanded_distribution_gives_the_same_values(mask):
    dist = LLMMaskedCategorical(logits(), mask)
    expanded = dist.expand((3, B, T))
    assert torch.equal(expanded.log_prob(torch.stack([VALUES] * 3))[1], dist.log_prob(VALUES))
    assert torch.equal(expanded.entropy()[2], dist.entropy())
    assert torch.equal(expanded.deterministic_sample[0], dist.mode)


def test_half_precision_logits_give_float32_log_probs():
    x = logits().bfloat16().requires_grad_()
    out = LLMMaskedCategorical(x, POSITIONS).log_prob(VALUES)
    want = LLMMaskedCategorical(x.detach().double(), POSITIONS).log_prob(VALUES)
    assert out.dtype == torch.float32
    assert torch.allclose(out.double(), want, atol=1e-5)
    out.sum().backward()
    assert x.grad.dtype == torch.bfloat16


def test_tokens_that_are_no_class_are_refused_unless_they_are_masked():
    dist = LLMMaskedCategorical(logits(), POSITIONS, ignore_index=-7)
    for bad in (-100, C):
        value = torch.full((B, T), bad)
        with pytest.raises(ValueError, match="ignore_index"):
            dist.log_prob(value)
        assert torch.isfinite(dist.log_prob(torch.where(POSITIONS, 1, value))).all()
    for value in (torch.zeros(B, T), VALUES[:, :3]):
        with pytest.raises(ValueError, match=r"expected (integers|tokens)"):
            dist.log_prob(value)
