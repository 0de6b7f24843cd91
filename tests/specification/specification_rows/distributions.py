"""S0 LLMMaskedCategorical and S2 MaskedOneHotCategorical."""

import math

import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.nn.functional import cross_entropy, one_hot

from policies import LLMMaskedCategorical, MaskedOneHotCategorical, ReparamGradientStrategy
from specification_rows.row import Page, close, defaults, raises, refused, statements

S0, S2 = Page("S0"), Page("S2")
B, T, C = 2, 6, 7


def both() -> tuple[LLMMaskedCategorical, LLMMaskedCategorical]:
    """Return one masked at the first three places of row 0, one without tokens 0..3 there."""
    places, tokens = torch.ones(B, T).bool(), torch.ones(B, T, C).bool()
    places[0, :3], tokens[0, :3, :4] = False, False
    x = torch.randn(B, T, C)
    return LLMMaskedCategorical(logits=x, mask=places), LLMMaskedCategorical(logits=x, mask=tokens)


@S0.rows()
def arguments():
    yield "LLMMaskedCategorical(logits, mask, ignore_index=-100)"
    defaults(LLMMaskedCategorical, "logits, mask, ignore_index=-100")
    yield "logits [B, T, C], unnormalized"
    place, token = both()
    value = torch.randint(C, (B, T))
    for dist in (place, token):
        moved = LLMMaskedCategorical(dist.logits + 3.0, dist.mask)
        close(dist.log_prob(value), moved.log_prob(value))
    yield "the batch size is optional"
    for shape in ((T, C), (B, T, C), (3, B, T, C)):
        dist = LLMMaskedCategorical(torch.randn(shape), torch.ones(shape[:-1]).bool())
        assert dist.sample().shape == dist.log_prob(dist.sample()).shape == shape[:-1]
    yield "mask [*B, T]: position-level, True = all tokens allowed"
    assert place.sample((500,))[:, 1, 0].unique().tolist() == list(range(C))
    yield "mask [*B, T, C]: token-level, True = valid at that position"
    drawn = token.sample((500,))
    assert drawn[:, 0, :3].min() == 4
    assert drawn[:, 1].unique().tolist() == list(range(C))
    yield "a mask of another shape or dtype is refused"
    for mask in (place.mask.float(), token.mask[..., :2]):
        refused(ValueError, "mask", LLMMaskedCategorical, place.logits, mask)
    yield "ignore_index, default -100, to ignore in log_prob"
    for index in (-100, -1):
        dist = LLMMaskedCategorical(place.logits, place.mask, ignore_index=index)
        assert not dist.log_prob(value.masked_fill(~place.mask, index))[~place.mask].any()
        assert (dist.sample()[~place.mask] == index).all()


@S0.rows()
def use_cases():
    logits = torch.randn(2, 10, 50000)
    yield "use case 1: position-level masking, C = 50000"
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0, :5] = False
    dist = LLMMaskedCategorical(logits=logits, mask=mask)
    tokens = torch.randint(0, 50000, (2, 10))
    tokens[0, :5] = -100
    want = Categorical(logits=logits).log_prob(tokens.clamp(0)) * mask
    close(dist.log_prob(tokens), want, 1e-4)
    assert dist.sample().shape == (2, 10)
    yield "use case 2: token-level masking, C = 50000"
    mask = torch.ones(2, 10, 50000, dtype=torch.bool)
    mask[0, :5, :1000] = False
    dist = LLMMaskedCategorical(logits=logits, mask=mask)
    tokens = torch.randint(0, 50000, (2, 10))
    table = Categorical(logits=logits.masked_fill(~mask, -math.inf))
    close(dist.log_prob(tokens), table.log_prob(tokens), 1e-4)
    assert dist.sample()[0, :5].min() >= 1000
    yield "all documented use cases are covered by tests in test_distributions.py"
    assert sum(name.startswith("use case") for name in statements(use_cases)) == 2


@S0.rows()
def methods():
    place, token = both()
    off, whole = ~place.mask, Categorical(logits=place.logits)
    yield "log_prob(value [B, T]): ignore_index approach, 0.0 at masked positions"
    value = torch.randint(C, (B, T)).masked_fill(off, -100)
    value[1, 4] = -100
    close(place.log_prob(value), -cross_entropy(place.logits.mT, value, reduction="none"))
    yield "log_prob of a masked token is -inf"
    got = token.log_prob(torch.full((B, T), 2))
    assert torch.equal(got == -math.inf, off)
    yield "log_prob needs no masking of the logits"
    assert not place._cache
    assert not token._cache
    yield "tokens are 0 <= token < C or ignore_index"
    for wrong in (C, -3):
        refused(ValueError, "ignore_index is -100", place.log_prob, torch.full((B, T), wrong))
    yield "sample(sample_shape=None) respects the mask"
    assert [d.sample((4, 5)).shape for d in (place, token)] == [(4, 5, B, T)] * 2
    assert (place.sample((50,))[:, off] == -100).all()
    assert (token.sample((50,))[:, off] >= 4).all()
    yield "rsample(sample_shape=None): reparameterized, masked logits"
    x = token.logits.clone().requires_grad_()
    drawn = LLMMaskedCategorical(x, token.mask).rsample((5,))
    assert drawn.shape == (5, B, T, C)
    assert not drawn[:, ~token.mask].any()
    (drawn * torch.randn(C)).sum().backward()
    assert x.grad.abs().sum() > 0
    yield "entropy() uses the masked logits"
    close(place.entropy(), whole.entropy() * place.mask)
    close(token.entropy()[0, :3], Categorical(logits=token.logits[0, :3, 4:]).entropy())
    yield "mode uses the masked logits"
    assert torch.equal(token.mode, token.logits.masked_fill(~token.mask, -math.inf).argmax(-1))
    assert torch.equal(place.mode[~off], place.logits.argmax(-1)[~off])


@S0.rows()
def properties():
    place, token = both()
    yield "logits and mask: the original ones"
    for mask in (place.mask, token.mask):
        dist = LLMMaskedCategorical(place.logits, mask)
        assert dist.logits is place.logits
        assert dist.mask is mask
    yield "masked_logits and masked_dist: for sampling"
    assert torch.equal(token.masked_logits == -math.inf, ~token.mask)
    assert (place.masked_logits[~place.mask] == -math.inf).all()
    assert all(type(dist.masked_dist) is Categorical for dist in (place, token))
    yield "clear_cache() frees the masked tensors"
    first = token.masked_logits
    assert token.masked_logits is first
    token.clear_cache()
    assert token.masked_logits is not first
    yield "position_level_masking: position-level True, token-level False"
    assert (place.position_level_masking, token.position_level_masking) == (True, False)
    yield "probs: from the original logits"
    for dist in (place, token):
        close(dist.probs, dist.logits.softmax(-1))


MASK = torch.tensor([True, False, True, True])


def hot(*classes: int, size: int = 4) -> Tensor:
    return one_hot(torch.tensor(classes), size)


@S2.rows()
def one_hot_arguments():
    yield "MaskedOneHotCategorical(logits, probs, mask, indices, neg_inf, ...): defaults"
    text = "logits=None, probs=None, mask=None, indices=None, neg_inf=-1e999, padding_value=None"
    through = ReparamGradientStrategy.PassThrough
    defaults(MaskedOneHotCategorical, text, grad_method=through)
    yield "logits: unnormalized; mask: same shape, False = masked"
    x, mask = torch.randn(3, 4), MASK.expand(3, 4)
    want = Categorical(logits=x.masked_fill(~mask, -math.inf))
    dist = MaskedOneHotCategorical(logits=x + 2, mask=mask)
    close(dist.log_prob(hot(0, 2, 3)), want.log_prob(torch.tensor([0, 2, 3])))
    assert not dist.sample((300,))[..., 1].any()
    refused(ValueError, "mask", MaskedOneHotCategorical, logits=x, mask=mask.long())
    yield "probs: masked items are zeroed and the rest re-normalized"
    probs = torch.tensor([0.1, 0.2, 0.3, 0.4])
    close(MaskedOneHotCategorical(probs=probs, mask=MASK).probs, [0.125, 0.0, 0.375, 0.5])
    yield "exactly one of logits and probs"
    for given in ({}, {"logits": x, "probs": x.softmax(-1)}):
        refused(ValueError, "expected logits or probs", MaskedOneHotCategorical, **given, mask=mask)
    yield "mask as list of valid indices with sparse_mask=True"
    with raises(TypeError, "sparse_mask"):
        MaskedOneHotCategorical(x, mask=torch.tensor([0, 2]), sparse_mask=True)
    yield "indices: which classes count"
    dist = MaskedOneHotCategorical(logits=x[0], indices=torch.tensor([0, 3]))
    close(dist.log_prob(hot(0, 3)), Categorical(logits=x[0, [0, 3]]).logits)
    assert dist.log_prob(hot(1)).item() == -math.inf
    yield "mask and indices are exclusive"
    for given in ({}, {"mask": MASK, "indices": torch.tensor([0])}):
        refused(ValueError, ("mask", "indices"), MaskedOneHotCategorical, logits=x[0], **given)
    yield "neg_inf, default -inf: log-prob of invalid classes; it takes no probability"
    low = MaskedOneHotCategorical(torch.zeros(4), mask=MASK, neg_inf=-1.0)
    close(low.log_prob(hot(0, 1)), [math.log(1 / 3), -1.0])
    assert not low.sample((100,))[:, 1].any()
    yield "padding_value: ignored among the indices"
    some = torch.tensor([[0, 3, -1], [1, 2, 3]])
    dist = MaskedOneHotCategorical(logits=x[:2], indices=some, padding_value=-1)
    close(dist.log_prob(hot(0, 2))[0], Categorical(logits=x[0, [0, 3]]).logits[0])


@S2.rows()
def gradients():
    x, weight = torch.randn(4), torch.randn(4)
    yield "grad_method PassThrough: the softmax as a proxy to the gradients"
    a, b = (x.clone().requires_grad_() for _ in range(2))
    (MaskedOneHotCategorical(logits=a, mask=MASK).rsample() * weight).sum().backward()
    (b.masked_fill(~MASK, -math.inf).softmax(-1) * weight).sum().backward()
    close(a.grad, b.grad)
    yield "grad_method RelaxedOneHot: torch's relaxed sample"
    a.grad, relaxed = None, ReparamGradientStrategy.RelaxedOneHot
    drawn = MaskedOneHotCategorical(logits=a, mask=MASK, grad_method=relaxed).rsample((200,))
    assert not drawn[:, 1].any()
    assert drawn.detach().round().unique().tolist() == [0.0, 1.0]
    (drawn * weight).sum().backward()
    assert (a.grad != 0).tolist() == MASK.tolist()
    yield "ReparamGradientStrategy: PassThrough and RelaxedOneHot"
    assert [m.name for m in ReparamGradientStrategy] == ["PassThrough", "RelaxedOneHot"]


@S2.rows()
def one_hot_examples():
    yield "example: dist.sample((10,)) and its log-probs as printed"
    torch.manual_seed(0)
    dist = MaskedOneHotCategorical(logits=torch.randn(4) / 100, mask=MASK)
    sample = dist.sample((10,))
    assert sample.argmax(-1).tolist() == [2, 3, 0, 2, 2, 0, 2, 0, 2, 2]
    printed = {0: -1.0831, 2: -1.1203, 3: -1.0928}
    close(dist.log_prob(sample), [printed[c] for c in sample.argmax(-1).tolist()], 1e-4)
    yield "example: a non-valid sample has log-prob -inf"
    sample_non_valid = torch.zeros_like(sample)
    sample_non_valid[..., 1] = 1
    assert dist.log_prob(sample_non_valid).tolist() == [-math.inf] * 10
    yield "example: with probabilities, -inf and -2.1972"
    prob, mask = torch.ones(10) / 10, torch.tensor([False] + 9 * [True])
    got = MaskedOneHotCategorical(probs=prob, mask=mask).log_prob(torch.eye(10).long())
    assert [round(value, 4) for value in got.tolist()] == [-math.inf] + 9 * [-2.1972]
    yield "log_prob(value) of one-hots [*S, C]"
    assert dist.log_prob(dist.sample((3, 2))).shape == (3, 2)
    refused(ValueError, "one-hot", dist.log_prob, torch.ones(4))
