"""The masked and one-hot categoricals against torch.distributions on the valid classes alone."""

import math

import pytest
import torch
from torch.autograd import gradcheck
from torch.distributions import Categorical
from torch.distributions import OneHotCategorical as TorchOneHot
from torch.nn.functional import one_hot

from benchmarks.measure import peak_bytes
from policies import (
    MaskedCategorical,
    MaskedOneHotCategorical,
    OneHotCategorical,
    ReparamGradientStrategy,
)

C, PAD = 6, -1
# Valid classes of four rows; as indices they are out of order, repeated and padded to five.
VALID = [[0, 2, 5], [4], [1, 2, 3, 4, 5], [3, 0]]
INDICES = torch.tensor([[5, 0, 2, 0, PAD], [PAD, 4, 4, PAD, 4], [5, 4, 3, 2, 1], [3, 3, PAD, 0, 3]])
MASK = torch.zeros(4, C, dtype=torch.bool)
for _row, _classes in enumerate(VALID):
    MASK[_row, _classes] = True
PASS, RELAXED = ReparamGradientStrategy.PassThrough, ReparamGradientStrategy.RelaxedOneHot


def scores(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, C, generator=generator, dtype=torch.float64) * 2


def build(cls, sparse: bool, x, lead: tuple[int, ...] = (4,), **kwargs):
    """Make a distribution with one of the four rows of masks, all, or all repeated."""

    def put(rows):
        return rows[0] if not lead else rows.expand(*lead, rows.shape[-1])

    if sparse:
        return cls(**x, indices=put(INDICES), padding_value=PAD, **kwargs)
    return cls(**x, mask=put(MASK), **kwargs)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("given", ["logits", "probs"])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("lead", [(), (4,), (2, 4), (2, 3, 4)])
def test_everything_equals_a_categorical_over_the_valid_classes(lead, sparse, given, fused):
    logits = scores(*lead)
    x = {"logits": logits} if given == "logits" else {"probs": logits.exp() / 7}
    dist = build(MaskedCategorical, sparse, x, lead, use_cross_entropy=fused)
    hot = build(MaskedOneHotCategorical, sparse, x, lead)
    everything = torch.arange(C).reshape(C, *[1] * len(lead)).expand(C, *lead)
    log_prob = dist.log_prob(everything)
    assert torch.equal(
        hot.log_prob(one_hot(everything, C)),
        build(MaskedCategorical, sparse, x, lead).log_prob(everything),
    )
    for row in torch.cartesian_prod(*[torch.arange(n) for n in lead]).tolist() if lead else [()]:
        at = tuple(row) if isinstance(row, list | tuple) else (row,)
        valid = sorted(VALID[at[-1] if at else 0])
        want = Categorical(logits=logits[at][valid])
        for c in range(C):
            entries = [log_prob[(c, *at)], dist.logits[(*at, c)], dist.probs[(*at, c)].log()]
            for found in entries:
                expected = want.logits[valid.index(c)].item() if c in valid else -math.inf
                assert found.item() == pytest.approx(expected, abs=1e-12)
            assert bool(dist.mask[(*at, c)]) is (c in valid)
        assert dist.entropy()[at].item() == pytest.approx(want.entropy().item(), abs=1e-12)
        best = valid[int(want.probs.argmax())]
        assert dist.mode[at] == best
        assert hot.mode[at].tolist() == [int(c == best) for c in range(C)]
        assert dist.deterministic_sample[at] == best
        assert torch.equal(hot.deterministic_sample, hot.mode)
    assert dist.batch_shape == hot.batch_shape == torch.Size(lead)
    assert (dist.event_shape, hot.event_shape) == ((), (C,))


@pytest.mark.parametrize("shape", [None, (), (3,), (2, 3)])
@pytest.mark.parametrize("sparse", [False, True])
def test_samples_have_the_shape_and_the_frequencies_of_the_valid_classes(sparse, shape):
    torch.manual_seed(0)
    dist = build(MaskedCategorical, sparse, {"logits": scores(2, 4)}, (2, 4))
    hot = build(MaskedOneHotCategorical, sparse, {"logits": scores(2, 4)}, (2, 4))
    lead = shape or ()
    assert dist.sample(shape).shape == (*lead, 2, 4)
    assert hot.sample(shape).shape == (*lead, 2, 4, C)
    assert torch.isfinite(dist.log_prob(dist.sample(shape))).all()
    assert torch.isfinite(hot.log_prob(hot.sample(shape))).all()
    if shape == (3,):
        weight = scores(2, 4).exp() * MASK
        found = hot.sample((20_000,)).double().mean(0)
        assert torch.allclose(found, weight / weight.sum(-1, keepdim=True), atol=0.015)


@pytest.mark.parametrize("given", ["logits", "probs"])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("fused", [True, False])
def test_gradients(sparse, given, fused):
    x = scores(4) if given == "logits" else scores(4).exp()
    x.requires_grad_()
    value = torch.tensor([[2, 4, 5, 0], [0, 4, 1, 3]])

    def make(y):
        return build(MaskedCategorical, sparse, {given: y}, use_cross_entropy=fused)

    assert gradcheck(lambda y: make(y).log_prob(value), x)
    assert gradcheck(lambda y: make(y).entropy(), x)
    assert gradcheck(lambda y: make(y).probs, x)


@pytest.mark.parametrize("sparse", [False, True])
def test_no_gradient_is_nan_at_masked_zeros_infinities_or_invalid_values(sparse):
    probs = scores(4).exp()
    probs[~MASK] = 0
    probs[2, 2] = 0  # valid, but impossible
    logits = scores(4)
    logits[~MASK] = math.nan
    logits[2, 2] = -math.inf
    for given, x in (("probs", probs), ("logits", logits)):
        x = x.clone().requires_grad_()
        dist = build(MaskedOneHotCategorical, sparse, {given: x})
        assert dist.log_prob(one_hot(torch.full((4,), 2), C))[1:].tolist() == [-math.inf] * 3
        values = dist.log_prob(one_hot(torch.full((4,), 2), C))
        (values.sum() + dist.entropy().sum() + dist.rsample().square().sum()).backward()
        assert torch.isfinite(x.grad).all()
        assert (x.grad[~MASK] == 0).all()


def page_example(cls):
    torch.manual_seed(0)
    return cls(logits=torch.randn(4) / 100, mask=torch.tensor([True, False, True, True]))


def test_documented_example_with_logits():
    drawn = [2, 3, 0, 2, 2, 0, 2, 0, 2, 2]
    by_class = {0: -1.0831, 2: -1.1203, 3: -1.0928}
    sample = page_example(MaskedCategorical).sample((10,))
    dist = page_example(MaskedOneHotCategorical)
    hot = dist.sample((10,))
    assert sample.tolist() == drawn
    assert hot.tolist() == [[int(c == d) for c in range(4)] for d in drawn]
    assert [round(v, 4) for v in dist.log_prob(hot).tolist()] == [by_class[d] for d in drawn]
    invalid = torch.zeros_like(hot)
    invalid[..., 1] = 1
    assert dist.log_prob(invalid).tolist() == [-math.inf] * 10


def test_documented_example_with_probs():
    prob = torch.ones(10)
    prob = prob / prob.sum()
    mask = torch.tensor([False] + 9 * [True])
    s = one_hot(torch.arange(10), 10)
    want = [-math.inf] + 9 * [-2.1972]  # log(1/9): zeroed and renormalised
    for cls, value in ((MaskedOneHotCategorical, s), (MaskedCategorical, torch.arange(10))):
        found = cls(probs=prob, mask=mask).log_prob(value).tolist()
        assert [round(v, 4) for v in found] == want
    assert prob.tolist() == [pytest.approx(0.1)] * 10  # the caller's tensor is as it was


@pytest.mark.parametrize("padding", [0, -1, 99])
def test_padded_indices_are_ignored(padding):
    x = scores()
    dist = MaskedCategorical(x, indices=torch.tensor([3, padding, 5]), padding_value=padding)
    assert dist.mask.tolist() == [False, False, False, True, False, True]
    want = Categorical(logits=x[[3, 5]]).logits
    assert torch.allclose(dist.log_prob(torch.tensor([3, 5])), want)
    assert dist.log_prob(torch.tensor(0)) == -math.inf
    assert dist.padding_value == padding


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_finite_neg_inf_is_reported_exactly_and_takes_no_probability(sparse, fused):
    x = {"logits": scores(4).float()}
    value = torch.tensor([0, 1, 2, 3])  # valid, not, valid, valid
    plain = build(MaskedCategorical, sparse, x)
    dist = build(MaskedCategorical, sparse, x, neg_inf=-1.0, use_cross_entropy=fused)
    assert dist.log_prob(value)[1] == -1
    assert torch.allclose(dist.log_prob(value)[[0, 2, 3]], plain.log_prob(value)[[0, 2, 3]])
    assert (dist.logits[~MASK] == -1).all()
    assert torch.equal(dist.probs, plain.probs)
    assert torch.equal(dist.entropy(), plain.entropy())
    hot = build(MaskedOneHotCategorical, sparse, x, neg_inf=-1.0, grad_method=RELAXED)
    assert hot.log_prob(one_hot(value, C))[1] == -1
    assert (hot.rsample((200,))[..., ~MASK] == 0).all()


def test_cross_entropy_stores_no_normalised_copy_and_the_other_way_has_second_derivatives():
    size = 50_000
    x = torch.randn(16, size, requires_grad=True)
    mask, value = torch.rand(16, size) < 0.9, torch.zeros(16, dtype=torch.int64)
    mask[:, 0] = True
    peaks = []
    for fused in (True, False):
        dist = MaskedCategorical(x, mask=mask, use_cross_entropy=fused)
        peaks.append(peak_bytes(lambda d=dist: d.log_prob(value)) / x.nbytes)
    assert peaks[0] < 0.5 < 1 < peaks[1]
    assert peak_bytes(lambda: MaskedCategorical(x, indices=value[:, None]).log_prob(value)) < 9999
    y = scores().requires_grad_()
    dist = MaskedCategorical(y, mask=MASK[0], use_cross_entropy=False)
    (grad,) = torch.autograd.grad(dist.log_prob(torch.tensor(2)), y, create_graph=True)
    (second,) = torch.autograd.grad(grad[0], y)
    p = (y.exp() * MASK[0] / (y.exp() * MASK[0]).sum()).detach()
    assert torch.allclose(second, -p[0] * (one_hot(torch.tensor(0), C) - p))


@pytest.mark.parametrize("sparse", [False, True, None])
@pytest.mark.parametrize("given", ["logits", "probs"])
def test_pass_through_is_a_sample_with_the_gradient_of_the_probabilities(given, sparse):
    logits, w = scores(4), scores(3, 4, seed=1)
    x = (logits if given == "logits" else logits.exp()).requires_grad_()
    if sparse is None:
        mask, dist = torch.ones_like(MASK), OneHotCategorical(**{given: x}, grad_method=PASS)
    else:
        mask, dist = MASK, build(MaskedOneHotCategorical, sparse, {given: x}, grad_method=PASS)
    torch.manual_seed(1)
    hot = dist.rsample((3,))
    torch.manual_seed(1)
    assert torch.equal(hot, dist.sample((3,)).double())
    assert dist.has_rsample
    (hot * w).sum().backward()
    weight = logits.detach().exp() * mask
    p, g = weight / weight.sum(-1, keepdim=True), w.sum(0)
    want = p * (g - (p * g).sum(-1, keepdim=True))  # d sum(p g) / d logits
    if given == "probs":
        want = (want / logits.detach().exp()) * mask
    assert torch.allclose(x.grad, want)


@pytest.mark.parametrize("sparse", [False, True, None])
def test_relaxed_one_hot_is_the_hard_gumbel_softmax(sparse):
    x, w = scores(4).requires_grad_(), scores(3, 4, seed=1)
    if sparse is None:
        mask, dist = torch.ones_like(MASK), OneHotCategorical(x, grad_method=RELAXED)
    else:
        mask, dist = (
            MASK,
            build(MaskedOneHotCategorical, sparse, {"logits": x}, grad_method=RELAXED),
        )
    torch.manual_seed(1)
    hot = dist.rsample((3,))
    torch.manual_seed(1)
    noise = -(-torch.rand(3, 4, C, dtype=torch.float64).log()).log()
    y = scores(4).requires_grad_()
    weight = (y.log_softmax(-1) + noise).exp() * mask
    soft = weight / weight.sum(-1, keepdim=True)
    assert torch.equal(hot, one_hot(soft.argmax(-1), C).double())
    (hot * w).sum().backward()
    (soft * w).sum().backward()
    assert torch.allclose(x.grad, y.grad)
    assert torch.isfinite(dist.log_prob(hot)).all()


@pytest.mark.parametrize("sparse", [False, True])
def test_a_row_without_valid_classes_has_log_probs_but_no_samples(sparse):
    mask = MASK.clone()
    mask[2] = False
    indices = INDICES.clone()
    indices[2] = PAD
    how = {"indices": indices, "padding_value": PAD} if sparse else {"mask": mask}
    x = scores(4).requires_grad_()
    dist = MaskedCategorical(x, **how)
    value = torch.tensor([0, 4, 2, 3])
    assert dist.log_prob(value)[2] == -math.inf
    assert torch.isfinite(dist.log_prob(value)[[0, 1, 3]]).all()
    assert dist.entropy()[2] == 0
    (dist.log_prob(value)[[0, 1, 3]].sum() + dist.entropy().sum() + dist.probs.sum()).backward()
    assert torch.isfinite(x.grad).all()
    hot = MaskedOneHotCategorical(x, **how)
    relaxed = MaskedOneHotCategorical(x, **how, grad_method=RELAXED)
    calls = [dist.sample, lambda: dist.mode, hot.sample, hot.rsample, relaxed.rsample]
    for call in calls:
        with pytest.raises(ValueError, match=r"got none in row \[2\]"):
            call()
    empty = torch.full((2, C), -math.inf).requires_grad_()  # masked by its logits
    dist = OneHotCategorical(empty)
    assert dist.probs.tolist() == [[0.0] * C] * 2
    (dist.probs.sum() + dist.entropy().sum()).backward()
    assert (empty.grad == 0).all()
    with pytest.raises(ValueError, match="a valid class in every row"):
        MaskedCategorical(scores(), mask=torch.zeros(C).bool()).sample()


@pytest.mark.parametrize("sparse", [False, True, None])
def test_ties_give_exactly_one_hot(sparse):
    x = torch.zeros(4, C)
    dist = (
        OneHotCategorical(x)
        if sparse is None
        else build(MaskedOneHotCategorical, sparse, {"logits": x})
    )
    lowest = [0] * 4 if sparse is None else [min(v) for v in VALID]
    assert torch.equal(dist.mode, one_hot(torch.tensor(lowest), C))


@pytest.mark.parametrize(
    "value", [torch.zeros(C), torch.ones(C), torch.eye(C)[0] * 2, torch.eye(C)[0] / 2 + 1 / 12]
)
def test_a_value_that_is_not_one_hot_is_an_error(value):
    for dist in (
        OneHotCategorical(scores()),
        MaskedOneHotCategorical(scores(), mask=MASK[0]),
        MaskedOneHotCategorical(scores(), indices=INDICES[2]),
    ):
        with pytest.raises(ValueError, match="expected one-hots with 6 entries, a single 1"):
            dist.log_prob(value)
        with pytest.raises(ValueError, match="expected one-hots with 6 entries"):
            dist.log_prob(torch.eye(5)[0])
    unchecked = OneHotCategorical(torch.zeros(C), validate_args=False)
    assert unchecked.log_prob(torch.ones(C)).item() == pytest.approx(-math.log(6))


WRONG = [
    ({}, "mask or indices, got neither"),
    ({"mask": MASK, "indices": INDICES}, "mask or indices, got both"),
    ({"mask": MASK.long()}, r"bool mask \(True = valid\) of shape \(4, 6\), got torch.int64"),
    ({"mask": MASK[0]}, r"of shape \(4, 6\), got torch.bool \(6,\)"),
    ({"indices": INDICES}, r"in 0..5, got -1; padding_value is None"),
    ({"indices": INDICES.double()}, "expected integers in 0..5, got torch.float64"),
    ({"indices": INDICES[0]}, r"indices of shape \[4, I\] with I > 0, got \(5,\)"),
    ({"mask": MASK, "neg_inf": math.nan}, "as neg_inf, got nan"),
]


@pytest.mark.parametrize(("how", "message"), WRONG)
@pytest.mark.parametrize("cls", [MaskedCategorical, MaskedOneHotCategorical])
def test_wrong_masks_are_value_errors(cls, how, message):
    with pytest.raises(ValueError, match=message):
        cls(scores(4), **how)


def test_wrong_parameters_and_values_are_value_errors():
    with pytest.raises(ValueError, match=r"float logits \[\*B, C\] with C > 0, got torch.int64"):
        MaskedCategorical(scores(4).long(), mask=MASK)
    for given, found in (({}, "neither"), ({"logits": scores(), "probs": scores()}, "both")):
        for cls, how in ((MaskedCategorical, {"mask": MASK[0]}), (OneHotCategorical, {})):
            with pytest.raises(ValueError, match=f"expected logits or probs, got {found}"):
                cls(**given, **how)
    for cls, how in ((MaskedOneHotCategorical, {"mask": MASK}), (OneHotCategorical, {})):
        with pytest.raises(ValueError, match="ReparamGradientStrategy"):
            cls(scores(4), grad_method="PassThrough", **how)
    for empty in (torch.zeros(()), torch.zeros(2, 0)):
        with pytest.raises(ValueError, match="with C > 0"):
            OneHotCategorical(empty)
    for given, bad in (("logits", math.nan), ("logits", math.inf), ("probs", -0.1)):
        x = scores(4).exp()
        x[1, 4] = bad
        with pytest.raises(ValueError, match=f"expected {given}.*without NaN or inf at valid"):
            MaskedCategorical(**{given: x}, mask=MASK)
    for how in ({"mask": MASK}, {"indices": INDICES, "padding_value": PAD}):
        dist = MaskedCategorical(scores(4), **how)
        for bad in (-1, 6):
            with pytest.raises(ValueError, match=f"in 0..5, got {bad}; a class is an index"):
                dist.log_prob(torch.tensor([0, 0, 0, bad]))
        with pytest.raises(ValueError, match=r"got torch\.float32"):
            dist.log_prob(torch.zeros(4))


@pytest.mark.parametrize("sparse", [False, True])
def test_expand(sparse):
    dist = build(MaskedOneHotCategorical, sparse, {"logits": scores(4)})
    before = dist.probs
    wide = dist.expand((3, 4))
    assert (wide.batch_shape, wide.event_shape) == ((3, 4), (C,))
    assert torch.equal(wide.probs, before.expand(3, 4, C))
    value = one_hot(torch.tensor([0, 4, 2, 3]), C)
    assert torch.equal(wide.log_prob(torch.stack([value] * 3))[1], dist.log_prob(value))
    assert torch.equal(wide.mask[2], dist.mask)
    assert wide.sample((2,)).shape == (2, 3, 4, C)
    assert torch.equal(wide.entropy()[0], dist.entropy())


def test_one_hot_equals_that_of_torch():
    x = scores(2, 4)
    ours, theirs = OneHotCategorical(x), TorchOneHot(logits=x)
    every = theirs.enumerate_support()
    assert torch.equal(ours.enumerate_support().double(), every)
    assert torch.allclose(ours.log_prob(every), theirs.log_prob(every))
    for name in ("mean", "variance", "probs", "logits", "batch_shape", "event_shape"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert torch.allclose(a, b) if torch.is_tensor(a) else a == b
    assert torch.allclose(ours.entropy(), theirs.entropy())
    assert isinstance(ours, Categorical)


def test_half_precision_is_scored_in_float32():
    x = scores(4).bfloat16()
    value = torch.tensor([0, 4, 2, 3])
    for fused in (True, False):
        out = MaskedCategorical(x, mask=MASK, use_cross_entropy=fused).log_prob(value)
        want = MaskedCategorical(x.double(), mask=MASK).log_prob(value)
        assert out.dtype == torch.float32
        assert torch.allclose(out.double(), want, atol=1e-5)
