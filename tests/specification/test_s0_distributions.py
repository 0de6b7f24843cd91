"""S0: LLMMaskedCategorical."""

import math

import torch
from support.specification import close, defaults, page, refused
from torch import Tensor
from torch.distributions import Categorical
from torch.nn.functional import cross_entropy, one_hot

from policies import LLMMaskedCategorical

S0 = page("S0")


B, T, C = 2, 6, 7


def both() -> tuple[LLMMaskedCategorical, LLMMaskedCategorical]:
    """Return one masked at the first three places of row 0, one without tokens 0..3 there."""
    places, tokens = torch.ones(B, T).bool(), torch.ones(B, T, C).bool()
    places[0, :3], tokens[0, :3, :4] = False, False
    x = torch.randn(B, T, C)
    return LLMMaskedCategorical(logits=x, mask=places), LLMMaskedCategorical(logits=x, mask=tokens)


@S0("LLMMaskedCategorical(logits, mask, ignore_index=-100)")
def test_LLMMaskedCategorical_logits_mask_ignore_index_100():
    defaults(LLMMaskedCategorical, "logits, mask, ignore_index=-100")


@S0("logits [B, T, C], unnormalized")
def test_logits_B_T_C_unnormalized():
    place, token = both()
    value = torch.randint(C, (B, T))
    for dist in (place, token):
        moved = LLMMaskedCategorical(dist.logits + 3.0, dist.mask)
        close(dist.log_prob(value), moved.log_prob(value))


@S0("the batch size is optional")
def test_the_batch_size_is_optional():
    for shape in ((T, C), (B, T, C), (3, B, T, C)):
        dist = LLMMaskedCategorical(torch.randn(shape), torch.ones(shape[:-1]).bool())
        assert dist.sample().shape == dist.log_prob(dist.sample()).shape == shape[:-1]


@S0("mask [*B, T]: position-level, True = all tokens allowed")
def test_mask_B_T():
    place, _ = both()
    assert place.sample((500,))[:, 1, 0].unique().tolist() == list(range(C))


@S0("mask [*B, T, C]: token-level, True = valid at that position")
def test_mask_B_T_C():
    _, token = both()
    drawn = token.sample((500,))
    assert drawn[:, 0, :3].min() == 4
    assert drawn[:, 1].unique().tolist() == list(range(C))


@S0("a mask of another shape or dtype is refused")
def test_a_mask_of_another_shape_or_dtype_is_refused():
    place, token = both()
    for mask in (place.mask.float(), token.mask[..., :2]):
        refused(ValueError, "mask", LLMMaskedCategorical, place.logits, mask)


@S0("ignore_index, default -100, to ignore in log_prob")
def test_ignore_index_default_100_to_ignore_in_log_prob():
    place, _ = both()
    value = torch.randint(C, (B, T))
    for index in (-100, -1):
        dist = LLMMaskedCategorical(place.logits, place.mask, ignore_index=index)
        assert not dist.log_prob(value.masked_fill(~place.mask, index))[~place.mask].any()
        assert (dist.sample()[~place.mask] == index).all()


@S0("use case 1: position-level masking, C = 50000")
def test_use_case_1():
    logits = torch.randn(2, 10, 50000)
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0, :5] = False
    dist = LLMMaskedCategorical(logits=logits, mask=mask)
    tokens = torch.randint(0, 50000, (2, 10))
    tokens[0, :5] = -100
    want = Categorical(logits=logits).log_prob(tokens.clamp(0)) * mask
    close(dist.log_prob(tokens), want, 1e-4)
    assert dist.sample().shape == (2, 10)


@S0("use case 2: token-level masking, C = 50000")
def test_use_case_2():
    logits = torch.randn(2, 10, 50000)
    mask = torch.ones(2, 10, 50000, dtype=torch.bool)
    mask[0, :5, :1000] = False
    dist = LLMMaskedCategorical(logits=logits, mask=mask)
    tokens = torch.randint(0, 50000, (2, 10))
    table = Categorical(logits=logits.masked_fill(~mask, -math.inf))
    close(dist.log_prob(tokens), table.log_prob(tokens), 1e-4)
    assert dist.sample()[0, :5].min() >= 1000


@S0("all documented use cases are covered by tests in test_distributions.py")
def test_all_documented_use_cases_are_covered_by_tests():
    assert sum(name.startswith("test_use_case") for name in globals()) == 2


@S0("log_prob(value [B, T]): ignore_index approach, 0.0 at masked positions")
def test_log_prob_value_B_T():
    place, _ = both()
    off = ~place.mask
    value = torch.randint(C, (B, T)).masked_fill(off, -100)
    value[1, 4] = -100
    close(place.log_prob(value), -cross_entropy(place.logits.mT, value, reduction="none"))


@S0("log_prob of a masked token is -inf")
def test_log_prob_of_a_masked_token_is_inf():
    place, token = both()
    off = ~place.mask
    got = token.log_prob(torch.full((B, T), 2))
    assert torch.equal(got == -math.inf, off)


@S0("log_prob needs no masking of the logits")
def test_log_prob_needs_no_masking_of_the_logits():
    place, token = both()
    assert not place._cache
    assert not token._cache


@S0("tokens are 0 <= token < C or ignore_index")
def test_tokens_are_0_token_C_or_ignore_index():
    place, _ = both()
    for wrong in (C, -3):
        refused(ValueError, "ignore_index is -100", place.log_prob, torch.full((B, T), wrong))


@S0("sample(sample_shape=None) respects the mask")
def test_sample_sample_shape_None_respects_the_mask():
    place, token = both()
    off = ~place.mask
    assert [d.sample((4, 5)).shape for d in (place, token)] == [(4, 5, B, T)] * 2
    assert (place.sample((50,))[:, off] == -100).all()
    assert (token.sample((50,))[:, off] >= 4).all()


@S0("rsample(sample_shape=None): reparameterized, masked logits")
def test_rsample_sample_shape_None():
    _, token = both()
    x = token.logits.clone().requires_grad_()
    drawn = LLMMaskedCategorical(x, token.mask).rsample((5,))
    assert drawn.shape == (5, B, T, C)
    assert not drawn[:, ~token.mask].any()
    (drawn * torch.randn(C)).sum().backward()
    assert x.grad.abs().sum() > 0


@S0("entropy() uses the masked logits")
def test_entropy_uses_the_masked_logits():
    place, token = both()
    whole = Categorical(logits=place.logits)
    close(place.entropy(), whole.entropy() * place.mask)
    close(token.entropy()[0, :3], Categorical(logits=token.logits[0, :3, 4:]).entropy())


@S0("mode uses the masked logits")
def test_mode_uses_the_masked_logits():
    place, token = both()
    off = ~place.mask
    assert torch.equal(token.mode, token.logits.masked_fill(~token.mask, -math.inf).argmax(-1))
    assert torch.equal(place.mode[~off], place.logits.argmax(-1)[~off])


@S0("logits and mask: the original ones")
def test_logits_and_mask():
    place, token = both()
    for mask in (place.mask, token.mask):
        dist = LLMMaskedCategorical(place.logits, mask)
        assert dist.logits is place.logits
        assert dist.mask is mask


@S0("masked_logits and masked_dist: for sampling")
def test_masked_logits_and_masked_dist():
    place, token = both()
    assert torch.equal(token.masked_logits == -math.inf, ~token.mask)
    assert (place.masked_logits[~place.mask] == -math.inf).all()
    assert all(type(dist.masked_dist) is Categorical for dist in (place, token))


@S0("clear_cache() frees the masked tensors")
def test_clear_cache_frees_the_masked_tensors():
    _, token = both()
    first = token.masked_logits
    assert token.masked_logits is first
    token.clear_cache()
    assert token.masked_logits is not first


@S0("position_level_masking: position-level True, token-level False")
def test_position_level_masking():
    place, token = both()
    assert (place.position_level_masking, token.position_level_masking) == (True, False)


@S0("probs: from the original logits")
def test_probs():
    place, token = both()
    for dist in (place, token):
        close(dist.probs, dist.logits.softmax(-1))


MASK = torch.tensor([True, False, True, True])


def hot(*classes: int, size: int = 4) -> Tensor:
    return one_hot(torch.tensor(classes), size)
