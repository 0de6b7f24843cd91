"""S2: MaskedOneHotCategorical."""

import math

import torch
from support.specification import TORCHRL, close, defaults, page, raises, refused
from torch import Tensor
from torch.distributions import Categorical
from torch.nn.functional import one_hot

from policies import LLMMaskedCategorical, MaskedOneHotCategorical, ReparamGradientStrategy

S2 = page("S2")


B, T, C = 2, 6, 7


def both() -> tuple[LLMMaskedCategorical, LLMMaskedCategorical]:
    """Return one masked at the first three places of row 0, one without tokens 0..3 there."""
    places, tokens = torch.ones(B, T).bool(), torch.ones(B, T, C).bool()
    places[0, :3], tokens[0, :3, :4] = False, False
    x = torch.randn(B, T, C)
    return LLMMaskedCategorical(logits=x, mask=places), LLMMaskedCategorical(logits=x, mask=tokens)


MASK = torch.tensor([True, False, True, True])


def hot(*classes: int, size: int = 4) -> Tensor:
    return one_hot(torch.tensor(classes), size)


@S2("MaskedOneHotCategorical(logits, probs, mask, indices, neg_inf, ...): defaults")
def test_MaskedOneHotCategorical_logits_probs_mask_indices():
    text = "logits=None, probs=None, mask=None, indices=None, neg_inf=-1e999, padding_value=None"
    through = ReparamGradientStrategy.PassThrough
    defaults(MaskedOneHotCategorical, text, grad_method=through)


@S2("logits: unnormalized; mask: same shape, False = masked")
def test_logits():
    x, mask = torch.randn(3, 4), MASK.expand(3, 4)
    want = Categorical(logits=x.masked_fill(~mask, -math.inf))
    dist = MaskedOneHotCategorical(logits=x + 2, mask=mask)
    close(dist.log_prob(hot(0, 2, 3)), want.log_prob(torch.tensor([0, 2, 3])))
    assert not dist.sample((300,))[..., 1].any()
    refused(ValueError, "mask", MaskedOneHotCategorical, logits=x, mask=mask.long())


@S2("probs: masked items are zeroed and the rest re-normalized")
def test_probs_masked_items_are_zeroed_and_the_rest_re_normalized():
    probs = torch.tensor([0.1, 0.2, 0.3, 0.4])
    close(MaskedOneHotCategorical(probs=probs, mask=MASK).probs, [0.125, 0.0, 0.375, 0.5])


@S2("exactly one of logits and probs")
def test_exactly_one_of_logits_and_probs():
    x, mask = torch.randn(3, 4), MASK.expand(3, 4)
    for given in ({}, {"logits": x, "probs": x.softmax(-1)}):
        refused(ValueError, "expected logits or probs", MaskedOneHotCategorical, **given, mask=mask)


@S2("mask as list of valid indices with sparse_mask=True", no=TORCHRL)
def test_mask_as_list_of_valid_indices_with_sparse_mask_True():
    x = torch.randn(3, 4)
    with raises(TypeError, "sparse_mask"):
        MaskedOneHotCategorical(x, mask=torch.tensor([0, 2]), sparse_mask=True)


@S2("indices: which classes count")
def test_indices():
    x = torch.randn(3, 4)
    dist = MaskedOneHotCategorical(logits=x[0], indices=torch.tensor([0, 3]))
    close(dist.log_prob(hot(0, 3)), Categorical(logits=x[0, [0, 3]]).logits)
    assert dist.log_prob(hot(1)).item() == -math.inf


@S2("mask and indices are exclusive")
def test_mask_and_indices_are_exclusive():
    x = torch.randn(3, 4)
    for given in ({}, {"mask": MASK, "indices": torch.tensor([0])}):
        refused(ValueError, ("mask", "indices"), MaskedOneHotCategorical, logits=x[0], **given)


@S2("neg_inf, default -inf: log-prob of invalid classes; it takes no probability")
def test_neg_inf_default_inf():
    low = MaskedOneHotCategorical(torch.zeros(4), mask=MASK, neg_inf=-1.0)
    close(low.log_prob(hot(0, 1)), [math.log(1 / 3), -1.0])
    assert not low.sample((100,))[:, 1].any()


@S2("padding_value: ignored among the indices")
def test_padding_value():
    x = torch.randn(3, 4)
    some = torch.tensor([[0, 3, -1], [1, 2, 3]])
    dist = MaskedOneHotCategorical(logits=x[:2], indices=some, padding_value=-1)
    close(dist.log_prob(hot(0, 2))[0], Categorical(logits=x[0, [0, 3]]).logits[0])


@S2("grad_method PassThrough: the softmax as a proxy to the gradients")
def test_grad_method_PassThrough():
    x, weight = torch.randn(4), torch.randn(4)
    a, b = (x.clone().requires_grad_() for _ in range(2))
    (MaskedOneHotCategorical(logits=a, mask=MASK).rsample() * weight).sum().backward()
    (b.masked_fill(~MASK, -math.inf).softmax(-1) * weight).sum().backward()
    close(a.grad, b.grad)


@S2("grad_method RelaxedOneHot: torch's relaxed sample")
def test_grad_method_RelaxedOneHot():
    x, weight = torch.randn(4), torch.randn(4)
    a, _ = (x.clone().requires_grad_() for _ in range(2))
    a.grad, relaxed = None, ReparamGradientStrategy.RelaxedOneHot
    drawn = MaskedOneHotCategorical(logits=a, mask=MASK, grad_method=relaxed).rsample((200,))
    assert not drawn[:, 1].any()
    assert drawn.detach().round().unique().tolist() == [0.0, 1.0]
    (drawn * weight).sum().backward()
    assert (a.grad != 0).tolist() == MASK.tolist()


@S2("ReparamGradientStrategy: PassThrough and RelaxedOneHot")
def test_ReparamGradientStrategy_PassThrough_RelaxedOneHot():
    assert [m.name for m in ReparamGradientStrategy] == ["PassThrough", "RelaxedOneHot"]


@S2("example: dist.sample((10,)) and its log-probs as printed")
def test_example():
    torch.manual_seed(0)
    dist = MaskedOneHotCategorical(logits=torch.randn(4) / 100, mask=MASK)
    sample = dist.sample((10,))
    assert sample.argmax(-1).tolist() == [2, 3, 0, 2, 2, 0, 2, 0, 2, 2]
    printed = {0: -1.0831, 2: -1.1203, 3: -1.0928}
    close(dist.log_prob(sample), [printed[c] for c in sample.argmax(-1).tolist()], 1e-4)


@S2("example: a non-valid sample has log-prob -inf")
def test_example_a_non_valid_sample_has_log_prob_inf():
    dist = MaskedOneHotCategorical(logits=torch.randn(4) / 100, mask=MASK)
    sample = dist.sample((10,))
    sample_non_valid = torch.zeros_like(sample)
    sample_non_valid[..., 1] = 1
    assert dist.log_prob(sample_non_valid).tolist() == [-math.inf] * 10


@S2("example: with probabilities, -inf and -2.1972")
def test_example_with_probabilities_inf_and_2_1972():
    prob, mask = torch.ones(10) / 10, torch.tensor([False] + 9 * [True])
    got = MaskedOneHotCategorical(probs=prob, mask=mask).log_prob(torch.eye(10).long())
    assert [round(value, 4) for value in got.tolist()] == [-math.inf] + 9 * [-2.1972]


@S2("log_prob(value) of one-hots [*S, C]")
def test_log_prob_value_of_one_hots_S_C():
    dist = MaskedOneHotCategorical(logits=torch.randn(4) / 100, mask=MASK)
    assert dist.log_prob(dist.sample((3, 2))).shape == (3, 2)
    refused(ValueError, "one-hot", dist.log_prob, torch.ones(4))
