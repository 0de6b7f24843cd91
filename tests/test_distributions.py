"""LLMMaskedCategorical and LogProbDistribution against slow loops in float64."""

import gc
import math
import weakref

import pytest
import torch
from torch.autograd import gradcheck

from benchmarks.measure import peak_bytes
from policies.distributions.sequences import LLMMaskedCategorical, LogProbDistribution

B, T, C = 2, 4, 5


def logits(seed: int = 0, shape=(B, T, C)) -> torch.Tensor:
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    )


POSITIONS = torch.tensor([[False, True, True, True], [True, False, True, False]])
TOKENS = torch.tensor(
    [[[1, 1, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]]] * B
).bool()
TOKENS[1, 2, 3] = True
VALUES = torch.tensor([[-100, 1, 2, 4], [0, 3, -100, 1]])


def slow_log_prob(x, mask, value: int, ignore: int = -100) -> float:
    """One position: x [C] list, mask [C] list of bools."""
    if value == ignore:
        return 0.0
    if not mask[value]:
        return -math.inf
    top = max(v for v, m in zip(x, mask, strict=True) if m)
    total = sum(math.exp(v - top) for v, m in zip(x, mask, strict=True) if m)
    return x[value] - top - math.log(total)


def slow_entropy(x, mask) -> float:
    if not any(mask):
        return 0.0
    lps = [slow_log_prob(x, mask, c) for c in range(len(x)) if mask[c]]
    return -sum(math.exp(lp) * lp for lp in lps)


@pytest.mark.parametrize("kind", ["positions", "tokens"])
def test_log_prob_and_entropy_equal_a_slow_loop(kind):
    x = logits()
    mask = POSITIONS if kind == "positions" else TOKENS
    dist = LLMMaskedCategorical(x, mask)
    assert dist.position_level_masking is (kind == "positions")
    log_prob, entropy, mode = dist.log_prob(VALUES), dist.entropy(), dist.mode
    for b in range(B):
        for t in range(T):
            row, value = x[b, t].tolist(), int(VALUES[b, t])
            if kind == "positions":
                ok, valid = [True] * C, bool(POSITIONS[b, t])
                want = slow_log_prob(row, ok, value) if valid else 0.0
                spread = slow_entropy(row, ok) if valid else 0.0
            else:
                ok = TOKENS[b, t].tolist()
                valid, want, spread = any(ok), slow_log_prob(row, ok, value), slow_entropy(row, ok)
            assert log_prob[b, t].item() == pytest.approx(want, abs=1e-12)
            assert entropy[b, t].item() == pytest.approx(spread, abs=1e-12)
            best = max((c for c in range(C) if ok[c]), key=lambda c: row[c], default=None)
            assert mode[b, t].item() == (best if valid else -100)


@pytest.mark.parametrize("kind", ["positions", "tokens"])
def test_gradients(kind):
    x = logits().requires_grad_()
    if kind == "positions":
        mask, value = POSITIONS, VALUES
    else:  # finite results only
        mask, value = TOKENS, torch.tensor([[0, 1, -100, 2], [1, 1, 3, 2]])
    assert gradcheck(lambda y: LLMMaskedCategorical(y, mask).log_prob(value), x)
    assert gradcheck(lambda y: LLMMaskedCategorical(y, mask).entropy(), x)
    assert gradcheck(lambda y: LLMMaskedCategorical(y, mask).log_prob(torch.stack([value] * 3)), x)


def test_no_gradient_is_nan_whatever_masked_rows_and_tokens_hold():
    x = logits()
    x[0, 0], x[1, 1] = torch.nan, -torch.inf  # both masked in POSITIONS
    x.requires_grad_()
    dist = LLMMaskedCategorical(x, POSITIONS)
    (dist.log_prob(VALUES).sum() + dist.entropy().sum() + dist.rsample().square().sum()).backward()
    assert torch.isfinite(x.grad).all()
    assert (x.grad[~POSITIONS] == 0).all()
    y = logits().requires_grad_()
    dist = LLMMaskedCategorical(y, TOKENS)
    dist.log_prob(torch.full((B, T), 2)).sum().backward()  # -inf at some
    assert torch.isfinite(y.grad).all()
    assert (y.grad[~TOKENS] == 0).all()


@pytest.mark.parametrize("shape", [None, (), (3,), (2, 3)])
@pytest.mark.parametrize("kind", ["positions", "tokens"])
def test_samples_respect_the_mask_and_have_a_log_prob(kind, shape):
    mask = POSITIONS if kind == "positions" else TOKENS
    dist = LLMMaskedCategorical(logits(), mask, ignore_index=-7)
    valid = mask if kind == "positions" else mask.any(-1)
    drawn = dist.sample(shape)
    assert drawn.shape == (*(shape or ()), B, T)
    assert (drawn[..., ~valid] == -7).all()
    assert (drawn[..., valid] >= 0).all()
    log_prob = dist.log_prob(drawn)
    assert torch.isfinite(log_prob).all()
    assert (log_prob[..., ~valid] == 0).all()
    hot = dist.rsample(shape)
    assert hot.shape == (*(shape or ()), B, T, C)
    assert torch.equal(hot.sum(-1), valid.expand(hot.shape[:-1]).double())


def test_sample_frequencies_are_the_masked_probabilities():
    torch.manual_seed(0)
    dist = LLMMaskedCategorical(logits(), TOKENS)
    drawn = dist.sample((4000,))[:, 0, 0]
    found = torch.bincount(drawn, minlength=C) / 4000
    weight = logits()[0, 0].exp() * TOKENS[0, 0]
    assert torch.allclose(found.double(), weight / weight.sum(), atol=0.03)
    assert torch.allclose(dist.masked_dist.probs[0, 0], weight / weight.sum())


def test_rsample_has_the_gradient_of_the_probabilities():
    x, w = logits().requires_grad_(), logits(1)
    assert LLMMaskedCategorical.has_rsample
    (LLMMaskedCategorical(x, TOKENS).rsample() * w).sum().backward()
    y = logits().requires_grad_()
    probs = (y.exp() * TOKENS) / (y.exp() * TOKENS).sum(-1, keepdim=True).clamp(min=1e-300)
    (probs * w).sum().backward()
    assert torch.allclose(x.grad, y.grad)


@pytest.mark.parametrize("kind", ["positions", "tokens"])
def test_masked_copies_are_lazy_and_clear_cache_frees_them(kind):
    dist = LLMMaskedCategorical(logits(), POSITIONS if kind == "positions" else TOKENS)
    dist.log_prob(torch.zeros(B, T, dtype=torch.int64))
    dist.entropy()
    _ = dist.probs
    assert not dist._cache  # none of them needs a masked copy
    first = dist.masked_dist
    assert dist.masked_dist is first
    assert dist.masked_logits is dist.masked_logits
    copies = [weakref.ref(x) for x in (dist.masked_logits, first.logits, first.probs)]
    drawn = dist.sample()
    del first
    dist.clear_cache()
    gc.collect()
    assert [ref() for ref in copies] == [None] * 3
    assert dist.sample().shape == drawn.shape  # built anew


def test_entropy_after_sample_has_a_gradient():
    x = logits().requires_grad_()
    dist = LLMMaskedCategorical(x, POSITIONS)
    dist.sample()
    with torch.no_grad():
        dist.entropy()
    assert dist.entropy().requires_grad


@pytest.mark.parametrize("kind", ["positions", "tokens"])
@pytest.mark.parametrize("sliced", [False, True])
def test_log_prob_and_entropy_make_no_copy_of_the_logits(kind, sliced):
    x = torch.randn(2, 33 if sliced else 32, 50_000, requires_grad=True)
    logits = x[:, 1:] if sliced else x  # rows that do not lie in one piece
    mask = torch.ones(logits.shape[: 2 if kind == "positions" else 3], dtype=torch.bool)
    tokens, size = torch.full((2, 32), 7), logits.nbytes

    def backward(name):
        dist = LLMMaskedCategorical(logits.detach().requires_grad_(), mask)
        out = dist.log_prob(tokens) if name == "log_prob" else dist.entropy()
        out.sum().backward()
        assert not dist._cache
        return dist.logits.grad

    assert peak_bytes(lambda: LLMMaskedCategorical(logits, mask).log_prob(tokens)) < 0.25 * size
    assert peak_bytes(lambda: LLMMaskedCategorical(logits, mask).entropy()) < 0.25 * size
    for name in ("log_prob", "entropy"):  # the gradient itself is one
        assert peak_bytes(lambda name=name: backward(name)) < 1.35 * size


def test_the_meter_of_memory_sees_copies_and_temporaries():
    x = torch.randn(4, 50_000)
    assert peak_bytes(lambda: x.clone()) == x.nbytes
    assert peak_bytes(lambda: x.logsumexp(-1)) >= x.nbytes  # inside one operator
    assert peak_bytes(lambda: x.log_softmax(-1).exp()) == 2 * x.nbytes


@pytest.mark.parametrize("kind", ["positions", "tokens"])
def test_expand_works(kind):
    mask = POSITIONS if kind == "positions" else TOKENS
    dist = LLMMaskedCategorical(logits(), mask)
    wide = dist.expand((3, B, T))
    assert wide.batch_shape == (3, B, T)
    assert torch.equal(wide.log_prob(torch.stack([VALUES] * 3))[1], dist.log_prob(VALUES))
    assert wide.sample((2,)).shape == (2, 3, B, T)
    assert torch.equal(wide.entropy()[2], dist.entropy())
    assert torch.equal(wide.mode[0], dist.mode)
    assert torch.equal(dist.deterministic_sample, dist.mode)
    assert wide.expand((4, 3, B, T)).position_level_masking is (kind == "positions")


def test_half_precision_logits_give_float32_log_probs():
    x = logits().bfloat16().requires_grad_()
    out = LLMMaskedCategorical(x, POSITIONS).log_prob(VALUES)
    want = LLMMaskedCategorical(x.detach().double(), POSITIONS).log_prob(VALUES)
    assert out.dtype == torch.float32
    assert torch.allclose(out.double(), want, atol=1e-5)
    out.sum().backward()
    assert x.grad.dtype == torch.bfloat16


def test_wrong_inputs_are_value_errors():
    with pytest.raises(ValueError, match=r"float logits \[\*B, T, C\], got torch\.int64"):
        LLMMaskedCategorical(logits().long(), POSITIONS)
    with pytest.raises(ValueError, match=r"float logits \[\*B, T, C\], got torch\.float64 \(5,\)"):
        LLMMaskedCategorical(logits()[0, 0], torch.tensor(True))
    for mask in (POSITIONS.long(), TOKENS.float()):
        with pytest.raises(ValueError, match="expected a bool mask"):
            LLMMaskedCategorical(logits(), mask)
    dist = LLMMaskedCategorical(logits(), POSITIONS, ignore_index=-7)
    for bad in (-100, C):
        value = torch.full((B, T), bad)
        with pytest.raises(ValueError, match=f"in 0..4, got {bad}; ignore_index is -7"):
            dist.log_prob(value)
        kept = torch.where(POSITIONS, 1, value)  # at masked positions anything will do
        assert torch.isfinite(dist.log_prob(kept)).all()
    with pytest.raises(ValueError, match=r"integers.*got torch\.float32"):
        dist.log_prob(torch.zeros(B, T))
    with pytest.raises(ValueError, match="expected a bool mask"):
        LLMMaskedCategorical(logits(), POSITIONS[:, :3])
    with pytest.raises(ValueError, match="expected tokens of shape"):
        LLMMaskedCategorical(logits(), POSITIONS).log_prob(VALUES[:, :3])


def test_documented_position_level_example():
    torch.manual_seed(0)
    x = torch.randn(2, 10, 50000)
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0, :5] = False
    dist = LLMMaskedCategorical(logits=x, mask=mask)
    tokens = torch.randint(0, 50000, (2, 10))
    tokens[0, :5] = -100
    log_probs, samples = dist.log_prob(tokens), dist.sample()
    assert (log_probs[0, :5] == 0).all()
    want = torch.log_softmax(x[1].double(), -1).gather(-1, tokens[1].unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(log_probs[1].double(), want, atol=1e-4)
    assert samples.shape == (2, 10)
    assert (samples[0, :5] == -100).all()


def test_documented_token_level_example():
    torch.manual_seed(0)
    x = torch.randn(2, 10, 50000)
    mask = torch.ones(2, 10, 50000, dtype=torch.bool)
    mask[0, :5, :1000] = False
    dist = LLMMaskedCategorical(logits=x, mask=mask)
    tokens = torch.randint(1000, 50000, (2, 10))
    tokens[0, 0] = 999
    log_probs, samples = dist.log_prob(tokens), dist.sample()
    assert log_probs[0, 0] == -math.inf
    want = torch.log_softmax(x[0, 1, 1000:].double(), -1)[tokens[0, 1] - 1000]
    assert log_probs[0, 1].item() == pytest.approx(want.item(), abs=1e-4)
    assert (samples[0, :5] >= 1000).all()


def test_known_log_probs_as_a_distribution():
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    mask = torch.tensor([[True, False], [True, True]])
    dist = LogProbDistribution(log_probs, mask)
    assert dist.log_prob(torch.zeros(2, 2)).tolist() == [[-1.0, 0.0], [-3.0, -4.0]]
    assert (dist.batch_shape, dist.event_shape) == ((2,), (2,))
    plain = LogProbDistribution(log_probs)
    plain.log_prob(torch.zeros(2, 2)).zero_()
    assert log_probs[0, 0] == -1  # a copy came out
    for bad in (mask[:, :1], mask.long()):
        with pytest.raises(ValueError, match=r"expected a bool mask .* of shape \(2, 2\)"):
            LogProbDistribution(log_probs, bad)
    with pytest.raises(ValueError, match="must match log_probs shape"):
        dist.log_prob(torch.zeros(2, 3))
    with pytest.raises(NotImplementedError, match="Sampling not supported"):
        dist.sample()
    with pytest.raises(NotImplementedError, match="Entropy not supported"):
        dist.entropy()
