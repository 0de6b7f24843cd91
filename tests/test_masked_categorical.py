"""The masked and one-hot categoricals against plain exponentials over the valid classes."""

import math

import pytest
import torch
from torch.autograd import gradgradcheck
from torch.distributions import OneHotCategorical as TorchOneHot
from torch.nn.functional import one_hot

from benchmarks.measure import peak_bytes
from policies import (
    MaskedCategorical,
    MaskedOneHotCategorical,
    OneHotCategorical,
    ReparamGradientStrategy,
)

C, PAD, RELAXED = 6, 99, ReparamGradientStrategy.RelaxedOneHot
MASK = torch.tensor(
    [[1, 0, 1, 0, 0, 1], [0, 0, 0, 0, 1, 0], [0] + 5 * [1], [1, 0, 0, 1, 0, 0]]
).bool()
sparse_or_dense = pytest.mark.parametrize("sparse", [False, True])
all_kinds = pytest.mark.parametrize("sparse", [False, True, None])  # None has no mask at all


def scores(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, C, generator=generator, dtype=torch.float64) * 2


def masked_by(sparse: bool, mask: torch.Tensor = MASK) -> dict:
    """Return the arguments of a mask, or of indices: out of order, repeated and padded."""
    if not sparse:
        return {"mask": mask}
    order = torch.arange(C).flip(-1).expand(mask.shape)
    indices = order.masked_fill(~mask.gather(-1, order), PAD)
    return {"indices": torch.cat([indices, indices], -1), "padding_value": PAD}


def one_hots(sparse: bool | None, x, **kwargs):
    """Return a distribution over one-hots and its mask."""
    if sparse is None:
        return OneHotCategorical(**x, **kwargs), torch.ones_like(MASK)
    return MaskedOneHotCategorical(**x, **masked_by(sparse), **kwargs), MASK


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("given", ["logits", "probs"])
@sparse_or_dense
@pytest.mark.parametrize("lead", [(), (4,), (2, 4)])
def test_values_and_gradients_are_those_of_the_valid_classes_alone(lead, sparse, given, fused):
    mask = MASK.expand(*lead, C) if lead else MASK[0]
    x = (scores(*lead) if given == "logits" else scores(*lead).exp()).requires_grad_()
    dist = MaskedCategorical(**{given: x}, **masked_by(sparse, mask), use_cross_entropy=fused)
    weight = (x.exp() if given == "logits" else x) * mask
    probs = weight / weight.sum(-1, keepdim=True)
    entropy = -(probs * probs.clamp(min=1e-300).log()).sum(-1)
    torch.testing.assert_close(dist.logits, probs.log())
    torch.testing.assert_close(dist.probs, probs)
    torch.testing.assert_close(dist.entropy(), entropy)
    assert torch.equal(dist.mask, mask)
    assert torch.equal(dist.mode, probs.argmax(-1))
    every = torch.arange(C).reshape(C, *[1] * len(lead)).expand(C, *lead)
    hot = MaskedOneHotCategorical(**{given: x}, **masked_by(sparse, mask))
    for found in (dist.log_prob(every), hot.log_prob(one_hot(every, C))):
        torch.testing.assert_close(found.movedim(0, -1), probs.log())
    assert torch.equal(hot.mode, one_hot(dist.deterministic_sample, C))
    assert dist.batch_shape == hot.batch_shape == torch.Size(lead)
    assert (dist.event_shape, hot.event_shape) == ((), (C,))
    value = mask.int().argmax(-1)
    log_prob = probs.gather(-1, value.unsqueeze(-1)).squeeze(-1).log()
    for mine, theirs in (
        (dist.log_prob(torch.stack([value] * 2)).sum(0), 2 * log_prob),
        (dist.entropy(), entropy),
        ((dist.probs * scores(seed=1)).sum(-1), (probs * scores(seed=1)).sum(-1)),
    ):
        grads = [torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for out in (mine, theirs)]
        torch.testing.assert_close(*grads)


@sparse_or_dense
def test_samples_have_the_frequencies_of_the_probabilities(sparse):
    torch.manual_seed(0)
    dist, _ = one_hots(sparse, {"logits": scores(4)})
    assert torch.allclose(dist.sample((20_000,)).double().mean(0), dist.probs, atol=0.015)


@sparse_or_dense
def test_no_gradient_is_nan_at_masked_zeros_infinities_or_invalid_values(sparse):
    for given, masked, impossible in (("probs", 0, 0), ("logits", math.nan, -math.inf)):
        x = scores(4).exp().masked_fill(~MASK, masked)
        x[2, 2] = impossible  # at a valid class
        x.requires_grad_()
        dist, _ = one_hots(sparse, {given: x})
        values = dist.log_prob(one_hot(torch.full((4,), 2), C))
        assert values[1:].tolist() == [-math.inf] * 3
        (values.sum() + dist.entropy().sum() + dist.rsample().square().sum()).backward()
        assert torch.isfinite(x.grad).all()
        assert (x.grad[~MASK] == 0).all()


@pytest.mark.parametrize("fused", [True, False])
@sparse_or_dense
def test_a_finite_neg_inf_is_reported_exactly_and_takes_no_probability(sparse, fused):
    x, value = scores(4).float(), torch.tensor([0, 1, 2, 3])  # the second is invalid
    plain = MaskedCategorical(x, **masked_by(sparse))
    dist = MaskedCategorical(x, **masked_by(sparse), neg_inf=-1.0, use_cross_entropy=fused)
    assert torch.allclose(dist.log_prob(value), plain.log_prob(value).masked_fill(value == 1, -1))
    assert (dist.logits[~MASK] == -1).all()
    assert torch.equal(dist.probs, plain.probs)
    assert torch.equal(dist.entropy(), plain.entropy())
    hot, _ = one_hots(sparse, {"logits": x}, neg_inf=-1.0, grad_method=RELAXED)
    assert (hot.rsample((200,))[..., ~MASK] == 0).all()


def test_cross_entropy_stores_no_normalised_copy_and_indices_cost_their_number():
    x, value = torch.randn(16, 50_000), torch.zeros(16, dtype=torch.int64)
    mask = torch.ones(x.shape, dtype=torch.bool)
    peaks = []
    for fused in (True, False):
        dist = MaskedCategorical(x, mask=mask, use_cross_entropy=fused)
        peaks.append(peak_bytes(lambda d=dist: d.log_prob(value)) / x.nbytes)
    assert peaks[0] < 0.5 < 1 < peaks[1]
    assert peak_bytes(lambda: MaskedCategorical(x, indices=value[:, None]).log_prob(value)) < 9999


def test_without_cross_entropy_there_is_a_second_derivative():
    def log_prob(x):
        dist = MaskedCategorical(x, mask=MASK[0], use_cross_entropy=False)
        return dist.log_prob(torch.tensor(2))

    assert gradgradcheck(log_prob, scores().requires_grad_())


@all_kinds
@pytest.mark.parametrize("method", ReparamGradientStrategy)
def test_a_reparametrised_sample_is_hard_and_has_the_gradient_of_its_proxy(method, sparse):
    x, y, w = scores(4).requires_grad_(), scores(4).requires_grad_(), scores(3, 4, seed=1)
    dist, mask = one_hots(sparse, {"logits": x}, grad_method=method)
    torch.manual_seed(1)
    hot = dist.rsample((3,))
    torch.manual_seed(1)
    if method is ReparamGradientStrategy.PassThrough:
        soft, want = (y.exp() * mask).expand(3, 4, C), dist.sample((3,))
    else:  # Gumbel's noise on the logits
        noise = -(-torch.rand(3, 4, C, dtype=torch.float64).log()).log()
        soft = (y.log_softmax(-1) + noise).exp() * mask
        want = one_hot(soft.argmax(-1), C)
    assert torch.equal(hot, want.double())
    (hot * w).sum().backward()
    (soft / soft.sum(-1, keepdim=True) * w).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


@sparse_or_dense
def test_a_row_without_valid_classes_has_log_probs_but_no_samples(sparse):
    how = masked_by(sparse, MASK & (torch.arange(4) != 2)[:, None])
    x, others = scores(4).requires_grad_(), [0, 1, 3]
    dist, hot = MaskedCategorical(x, **how), MaskedOneHotCategorical(x, **how)
    values = dist.log_prob(torch.tensor([0, 4, 2, 3]))
    assert values[2] == -math.inf
    assert torch.isfinite(values[others]).all()
    assert dist.entropy()[2] == 0
    (values[others].sum() + dist.entropy().sum() + dist.probs.sum()).backward()
    assert torch.isfinite(x.grad).all()
    relaxed = MaskedOneHotCategorical(x, **how, grad_method=RELAXED)
    for call in (dist.sample, lambda: dist.mode, hot.sample, hot.rsample, relaxed.rsample):
        with pytest.raises(ValueError, match=r"row \[2\]"):
            call()


def with_one(value: float) -> torch.Tensor:
    """Return scores with another value at a valid class."""
    return torch.where(one_hot(torch.tensor(4), C).bool() & MASK, value, scores(4).exp())


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"mask": MASK[0]}, "mask"),
        ({"indices": torch.full((4, 2), PAD)}, "padding_value"),
        ({"indices": MASK.double()}, "integers"),
        ({"indices": MASK[0].long()}, "indices"),
        ({"mask": MASK, "logits": scores(4).long()}, "logits"),
        ({"mask": MASK, "logits": with_one(math.nan)}, "logits"),
        ({"mask": MASK, "logits": None, "probs": with_one(-0.1)}, "probs"),
    ],
)
def test_wrong_parameters_are_refused(given, key):
    with pytest.raises(ValueError, match=key):
        MaskedOneHotCategorical(**{"logits": scores(4), **given})


@sparse_or_dense
def test_a_value_that_is_no_class_is_refused(sparse):
    for value in (torch.full((4,), -1), torch.full((4,), C), torch.zeros(4)):
        with pytest.raises(ValueError, match="integers"):
            MaskedCategorical(scores(4), **masked_by(sparse)).log_prob(value)
    for value in (torch.zeros(C), torch.eye(C)[0] / 2 + 1 / 12, torch.eye(5)[0]):
        with pytest.raises(ValueError, match="one-hots"):
            one_hots(sparse, {"logits": scores(4)})[0].log_prob(value.expand(4, -1))


@sparse_or_dense
def test_an_expanded_distribution_gives_the_same_values(sparse):
    dist, _ = one_hots(sparse, {"logits": scores(4)})
    before, wide, value = dist.probs, dist.expand((3, 4)), dist.mode
    assert (wide.batch_shape, wide.event_shape) == ((3, 4), (C,))
    assert torch.equal(wide.probs, before.expand(3, 4, C))
    assert torch.equal(wide.log_prob(value.expand(3, 4, C))[1], dist.log_prob(value))
    assert torch.equal(wide.mask[2], dist.mask)
    assert wide.sample((2,)).shape == (2, 3, 4, C)
    assert torch.equal(wide.entropy()[0], dist.entropy())


def test_one_hot_equals_that_of_torch():
    x = scores(2, 4)
    ours, theirs = OneHotCategorical(x), TorchOneHot(logits=x)
    every = theirs.enumerate_support()
    assert torch.equal(ours.enumerate_support().double(), every)
    assert torch.allclose(ours.log_prob(every), theirs.log_prob(every))
    for name in ("mean", "variance", "probs", "logits"):
        assert torch.allclose(getattr(ours, name), getattr(theirs, name))
    assert torch.allclose(ours.entropy(), theirs.entropy())


@pytest.mark.parametrize("fused", [True, False])
def test_half_precision_is_scored_in_float32(fused):
    x, value = scores(4).bfloat16(), torch.tensor([0, 4, 2, 3])
    out = MaskedCategorical(x, mask=MASK, use_cross_entropy=fused).log_prob(value)
    want = MaskedCategorical(x.double(), mask=MASK).log_prob(value)
    assert out.dtype == torch.float32
    assert torch.allclose(out.double(), want, atol=1e-5)
