"""The masked categoricals against plain exponentials over the valid classes, in float64: values,
gradients, samples, memory. And the road's TokenDistribution: its memory, and which tokens it is of;
its numbers are in test_scorer.py, and that they are the public ones is a row of the specification.
"""

import math
from functools import partial

import pytest
import torch
from support.policies import G, make_wrapper, one_process
from support.tasks import Words
from torch.nn.functional import one_hot

from benchmarks.measure import peak_bytes
from envs.chat_env import ChatEnv
from policies import (
    LLMMaskedCategorical,
    MaskedCategorical,
    MaskedOneHotCategorical,
    OneHotCategorical,
    ReparamGradientStrategy,
    token_distribution,
)
from policies.token_distribution import Head, TokenDistribution
from trainer import Rollouts

B, T, C, PAD = 2, 4, 5, 99
RELAXED = ReparamGradientStrategy.RelaxedOneHot
POSITIONS = torch.tensor([[False, True, True, True], [True, False, True, False]])
TOKENS = torch.tensor(
    [[[1, 1, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]]] * B
).bool()
TOKENS[1, 2, 3] = True
FULL = TOKENS.clone()  # with a valid class everywhere
FULL[0, 2, 1] = True
EVERY = torch.arange(C).reshape(C, 1, 1).expand(C, B, T)


def scores(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (B, T)), C, generator=generator, dtype=torch.float64) * 2


def masked_by(sparse: bool, mask: torch.Tensor = FULL) -> dict:
    """Return the arguments of a mask, or of indices: out of order, repeated and padded."""
    if not sparse:
        return {"mask": mask}
    order = torch.arange(C).flip(-1).expand(mask.shape)
    indices = order.masked_fill(~mask.gather(-1, order), PAD)
    return {"indices": torch.cat([indices, indices], -1), "padding_value": PAD}


def one_hots(sparse: bool | None, x, **kwargs):
    """Return a distribution over one-hots and its mask."""
    if sparse is None:
        return OneHotCategorical(**x, **kwargs), torch.ones_like(FULL)
    return MaskedOneHotCategorical(**x, **masked_by(sparse), **kwargs), FULL


KINDS = {  # the valid classes and a distribution over them
    "positions": (
        POSITIONS.unsqueeze(-1).expand_as(TOKENS),
        partial(LLMMaskedCategorical, mask=POSITIONS),
    ),
    "tokens": (TOKENS, partial(LLMMaskedCategorical, mask=TOKENS)),
} | {
    f"sparse={sparse}, fused={fused}": (
        TOKENS,
        partial(MaskedCategorical, **masked_by(sparse, TOKENS), use_cross_entropy=fused),
    )
    for sparse in (False, True)
    for fused in (True, False)
}
all_kinds = pytest.mark.parametrize("kind", KINDS)
sparse_or_dense = pytest.mark.parametrize("sparse", [False, True])
of_sequences = pytest.mark.parametrize("kind", ["positions", "tokens"])


@all_kinds
def test_values_and_gradients_are_those_of_the_valid_classes_alone(kind):
    (valid, make), x, weight = KINDS[kind], scores().requires_grad_(), scores(seed=1)
    total = (x.exp() * valid).sum(-1, keepdim=True).clamp(min=1e-300)
    log_p = x - total.log()
    entropy = -(x.exp() / total * log_p * valid).sum(-1)
    outside = 0.0 if kind == "positions" else -math.inf
    found, dist = make(x).log_prob(EVERY).movedim(0, -1), make(x)
    torch.testing.assert_close(found, log_p.masked_fill(~valid, outside))
    torch.testing.assert_close(dist.entropy(), entropy)
    for mine, theirs in (
        ((found * weight)[valid], (log_p * weight)[valid]),
        (dist.entropy() * weight[..., 0], entropy * weight[..., 0]),
    ):
        grads = [torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for out in (mine, theirs)]
        torch.testing.assert_close(*grads)


@sparse_or_dense
@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_probabilities_and_one_hots_may_be_given_with_any_batch(lead, sparse):
    mask, x = FULL[0, 0].expand(*lead, C), scores(*(lead or (1,))).exp()
    x = x.reshape(*lead, C).requires_grad_()
    how, probs = masked_by(sparse, mask), x * mask / (x * mask).sum(-1, keepdim=True)
    dist, hot = MaskedCategorical(probs=x, **how), MaskedOneHotCategorical(probs=x, **how)
    torch.testing.assert_close(dist.probs, probs)
    torch.testing.assert_close(dist.logits, probs.log())
    assert torch.equal(dist.mask, mask)
    assert torch.equal(dist.mode, probs.argmax(-1))
    assert torch.equal(hot.mode, one_hot(dist.deterministic_sample, C))
    assert (dist.batch_shape, hot.batch_shape) == (lead, lead)
    assert (dist.event_shape, hot.event_shape) == ((), (C,))
    every = torch.arange(C).reshape(C, *[1] * len(lead)).expand(C, *lead)
    for found in (dist.log_prob(every), hot.log_prob(one_hot(every, C))):
        torch.testing.assert_close(found.movedim(0, -1), probs.log())
    weight = scores(seed=1)[0, 0]
    grads = [torch.autograd.grad((p * weight).sum(), x)[0] for p in (dist.probs, probs)]
    torch.testing.assert_close(*grads)


@of_sequences
def test_samples_of_sequences_respect_the_mask_and_have_the_frequencies_and_the_gradient(kind):
    (valid, make), x, y, w = KINDS[kind], scores(), scores(), scores(seed=1)
    dist, probs = make(x.requires_grad_(), ignore_index=-7), y.requires_grad_().exp() * valid
    probs = probs / probs.sum(-1, keepdim=True).clamp(min=1e-300)
    torch.manual_seed(0)
    drawn, known = dist.sample((4000,)), valid.any(-1)
    assert (drawn[:, ~known] == -7).all()
    log_prob = dist.log_prob(drawn)
    assert torch.isfinite(log_prob).all()
    assert not log_prob[:, ~known].any()
    assert torch.equal(dist.mode, probs.argmax(-1).masked_fill(~known, -7))
    hot = dist.rsample((4000,))
    assert torch.equal(hot.sum(-1), known.expand(4000, B, T).double())
    assert torch.allclose(hot.mean(0), probs, atol=0.03)
    (dist.rsample() * w).sum().backward()
    (probs * w).sum().backward()
    assert torch.allclose(x.grad, y.grad)


@sparse_or_dense
def test_samples_have_the_frequencies_of_the_probabilities(sparse):
    torch.manual_seed(0)
    dist, _ = one_hots(sparse, {"logits": scores()})
    wide = dist.expand((3, B, T))
    assert (wide.batch_shape, wide.event_shape) == ((3, B, T), (C,))
    found = wide.sample((20_000,)).double().mean(0)
    assert torch.allclose(found, dist.probs.expand_as(found), atol=0.015)


@of_sequences
def test_no_gradient_is_nan_whatever_is_masked_and_masked_logits_get_none(kind):
    valid, make = KINDS[kind]
    x = scores().masked_fill(~valid, torch.nan).requires_grad_()
    dist = make(x)
    values = dist.log_prob(torch.full((B, T), 2))  # of masked tokens too
    (values.sum() + dist.entropy().sum() + dist.rsample().square().sum()).backward()
    assert torch.isfinite(x.grad).all()
    assert (x.grad[~valid] == 0).all()


@sparse_or_dense
def test_no_gradient_is_nan_at_masked_zeros_infinities_or_invalid_values(sparse):
    for given, masked, impossible in (("probs", 0, 0), ("logits", math.nan, -math.inf)):
        x = scores().exp().masked_fill(~FULL, masked)
        x[0, 1, 2] = impossible  # at a valid class
        x.requires_grad_()
        dist, _ = one_hots(sparse, {given: x})
        values = dist.log_prob(one_hot(torch.full((B, T), 2), C))
        assert values[0].tolist() == [-math.inf] * 3 + [0.0]
        (values.sum() + dist.entropy().sum() + dist.rsample().square().sum()).backward()
        assert torch.isfinite(x.grad).all()
        assert (x.grad[~FULL] == 0).all()


@pytest.mark.parametrize("sparse", [False, True, None])  # None has no mask at all
@pytest.mark.parametrize("method", ReparamGradientStrategy)
def test_a_reparametrised_sample_is_hard_and_has_the_gradient_of_its_proxy(method, sparse):
    x, y, w = scores().requires_grad_(), scores().requires_grad_(), scores(3, B, T, seed=1)
    dist, mask = one_hots(sparse, {"logits": x}, grad_method=method)
    torch.manual_seed(1)
    hot = dist.rsample((3,))
    torch.manual_seed(1)
    if method is not RELAXED:
        soft, want = (y.exp() * mask).expand_as(w), dist.sample((3,))
    else:  # Gumbel's noise on the logits
        noise = -(-torch.rand(w.shape, dtype=torch.float64).log()).log()
        soft = (y.log_softmax(-1) + noise).exp() * mask
        want = one_hot(soft.argmax(-1), C)
    assert torch.equal(hot, want.double())
    (hot * w).sum().backward()
    (soft / soft.sum(-1, keepdim=True) * w).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


@sparse_or_dense
def test_without_a_valid_class_there_are_no_samples_and_no_nan(sparse):
    x, how = scores().requires_grad_(), masked_by(sparse, TOKENS)
    dist, hot = MaskedCategorical(x, **how), MaskedOneHotCategorical(x, **how)
    assert not dist.probs[0, 2].any()
    (dist.entropy().sum() + dist.probs.square().sum()).backward()
    assert torch.isfinite(x.grad).all()
    relaxed = MaskedOneHotCategorical(x, **how, grad_method=RELAXED)
    for call in (dist.sample, lambda: dist.mode, hot.sample, hot.rsample, relaxed.rsample):
        with pytest.raises(ValueError, match=r"row \[0, 2\]"):
            call()


def test_parameters_of_no_distribution_are_refused():
    wrong = {"logits": torch.where(FULL, math.nan, 0.0), "probs": torch.where(FULL, -0.1, 1.0)}
    for name, given in wrong.items():
        with pytest.raises(ValueError, match=name):
            MaskedCategorical(**{name: given}, mask=FULL)


def test_tokens_that_are_no_class_are_refused_unless_they_are_masked():
    dist = LLMMaskedCategorical(scores(), POSITIONS, ignore_index=-7)
    for bad in (-100, C):
        value = torch.full((B, T), bad)
        with pytest.raises(ValueError, match="ignore_index"):
            dist.log_prob(value)
        assert torch.isfinite(dist.log_prob(torch.where(POSITIONS, 1, value))).all()
    with pytest.raises(ValueError, match="expected tokens"):
        dist.log_prob(EVERY[0, :, :3])


@all_kinds
def test_half_precision_is_scored_in_float32(kind):
    make, x = KINDS[kind][1], scores().bfloat16().requires_grad_()
    out, want = (make(logits).log_prob(EVERY) for logits in (x, x.detach().double()))
    assert out.dtype == torch.float32
    assert torch.allclose(out.double(), want, atol=1e-5)
    out.sum().backward()
    assert x.grad.dtype == torch.bfloat16


# Memory.


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


def test_cross_entropy_stores_no_normalised_copy_and_indices_cost_their_number():
    x, value = torch.randn(16, 50_000), torch.zeros(16, dtype=torch.int64)
    mask = torch.ones(x.shape, dtype=torch.bool)
    peaks = []
    for fused in (True, False):
        dist = MaskedCategorical(x, mask=mask, use_cross_entropy=fused)
        peaks.append(peak_bytes(lambda d=dist: d.log_prob(value)) / x.nbytes)
    assert peaks[0] < 0.5 < 1 < peaks[1]
    assert peak_bytes(lambda: MaskedCategorical(x, indices=value[:, None]).log_prob(value)) < 9999


# The road's.


@pytest.mark.parametrize("wanted", ["log_probs", "entropy"])
def test_logits_of_whole_sequences_never_exist(monkeypatch, wanted):
    width, ids = 20_000, torch.randint(9, (4, 32))
    head = Head(torch.randn(width, 8, requires_grad=True), None, None)
    dist = TokenDistribution(head, torch.randn(ids.numel(), 8), ids >= 0)
    whole = 4 * ids.numel() * width  # bytes of [B, T, V]

    def run() -> None:
        out = getattr(dist.scores(ids, learn=wanted == "entropy"), wanted)
        torch.autograd.grad(out.sum(), head.weight)

    assert peak_bytes(run) > whole, "the meter sees logits"
    monkeypatch.setattr(token_distribution, "SLICE", 2 * width)
    monkeypatch.setattr(token_distribution, "SAVED", 0)
    assert peak_bytes(run) < 0.25 * whole


# Outputs: computed again; in memory of their own; in the gradient's, the policy's or both.
@pytest.mark.parametrize(("kept", "width"), [(0, 2), (2**28, 2), (0, 4), (0, 8)])
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("rows", [6, 9, 12])  # of the reference's vocabulary; the policy's has 9
@pytest.mark.parametrize("mixture", [1.0, 0.0, 0.3])  # reverse KL, forward KL, GKD's JSD
def test_the_gradient_of_the_slices_is_that_of_whole_logits(
    monkeypatch, cap, rows, kept, width, mixture
):
    monkeypatch.setattr(token_distribution, "SAVED", kept)
    monkeypatch.setattr(token_distribution, "SLICE", 10)
    monkeypatch.setattr(token_distribution, "NARROWEST", 1)
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    ids, keep = torch.tensor([[1, 8, 2], [5, 0, 3]]), torch.tensor([[0, 1, 1], [1, 0, 1]]).bool()
    warmth = torch.tensor([[0.7], [1.3]]).expand(2, 3)[keep][:, None].double()
    states, weight, bias = (draw(*size).requires_grad_() for size in ((4, width), (9, width), (9,)))
    theirs, up = (draw(4, width), draw(rows, width)), draw(3, 4)

    def logits(states, weight, bias=0):
        out = states @ weight.T + bias
        return (out if cap is None else cap * (out / cap).tanh()) / warmth

    mine, other = logits(states, weight, bias).log_softmax(-1), logits(*theirs) / 2
    p, q = mine[:, : min(9, rows)].exp(), other.softmax(-1)[:, : min(9, rows)]
    middle = mixture * q + (1 - mixture) * p
    weighted = (
        (1 - mixture or 1) * p * (p / middle).log(),
        (mixture or 1) * q * (q / middle).log(),
    )
    plain = (
        mine.gather(-1, ids[keep][:, None]).squeeze(-1),
        -(mine.exp() * mine).sum(-1),
        sum(weighted).sum(-1),
    )
    at = torch.tensor([0.7, 1.3], dtype=torch.float64)
    reference = TokenDistribution(Head(theirs[1], None, cap), theirs[0], keep, temperature=2 * at)
    dist = TokenDistribution(Head(weight, bias, cap), states, keep, temperature=at)
    found = dist.scores(ids, learn=True, reference=reference, mixture=mixture)
    for i, values in enumerate((found.log_probs, found.entropy, found.divergence)):
        torch.testing.assert_close(values[keep], plain[i], atol=1e-6, rtol=1e-6)
        grads = [
            torch.autograd.grad((up[i] * x).sum(), (states, weight, bias), retain_graph=True)
            for x in (plain[i], values[keep])
        ]
        for wanted, got in zip(*grads, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)


def test_a_distribution_over_no_token_says_nothing():
    ids = torch.tensor([[5, 6, 7]])
    dist = TokenDistribution(Head(torch.randn(9, 8), None, None), torch.zeros(0, 8), ids > 9)
    scores = dist.scores(ids, learn=True)
    assert not scores.log_probs.any()
    assert not scores.entropy.any()


def test_a_run_learns_the_tokens_that_its_mask_names():
    policy, task = make_wrapper(), Words(turns=3)
    env = ChatEnv(task, group_size=G, max_turns=3)
    parts = {
        "task": task,
        "env": env,
        "generator": policy,
        "runtime": one_process(),
        "prompts_per_iteration": 4,
    }
    for name in ("response", "assistant", "prompt"):
        batch = Rollouts(**parts, mask=name)(0)
        kept = batch["loss_mask"].any(-1, keepdim=True)
        assert kept.any()
        want = batch["masks", "all_response_mask"]
        if name == "prompt":  # the last turn alone
            turns = [[t for t in range(len(r)) if r[t] and not r[t - 1]] for r in want.tolist()]
            starts = torch.tensor([row[-1] for row in turns])
            want = want & (torch.arange(want.shape[1]) >= starts[:, None])
            assert want.sum() < batch["masks", "all_response_mask"].sum()
        assert torch.equal(batch["loss_mask"], want & kept)


MASKED = [
    ({}, "mask or indices, got neither"),
    ({"mask": FULL, "probs": scores()}, "logits or probs, got both"),
    ({"mask": FULL[0]}, "mask"),
    ({"mask": FULL.long()}, "bool mask"),
    ({"mask": FULL, "logits": scores().long()}, "float logits"),
    ({"indices": torch.full((B, T, 2), PAD)}, "padding_value"),
    ({"indices": FULL.double()}, "integers.*float64"),
    ({"indices": FULL[0].long()}, r"indices \[\*\(2, 4\), I\]"),
]


@pytest.mark.parametrize(("given", "key"), MASKED, ids=[key for _, key in MASKED])
def test_wrong_parameters_are_refused(given, key):
    with pytest.raises(ValueError, match=key):
        MaskedOneHotCategorical(**{"logits": scores(), **given})


@of_sequences
def test_an_expanded_distribution_of_sequences_gives_the_same_values(kind):
    dist = KINDS[kind][1](scores(), ignore_index=-7)
    wide = dist.expand((3, B, T))
    assert (wide.batch_shape, wide.sample().shape) == ((3, B, T), (3, B, T))
    for name in ("mode", "mask", "probs"):
        assert torch.equal(getattr(wide, name)[2], getattr(dist, name)), name
    assert torch.equal(wide.entropy()[1], dist.entropy())
    assert torch.equal(wide.log_prob(EVERY[:3]), dist.log_prob(EVERY[:3]))


def test_one_hots_are_those_of_torch():
    ours, x = OneHotCategorical(scores()), scores()
    theirs, every = torch.distributions.OneHotCategorical(logits=x), ours.enumerate_support()
    assert torch.equal(every.double(), theirs.enumerate_support())
    torch.testing.assert_close(ours.log_prob(every), theirs.log_prob(every.double()))
    assert ours.support.check(every).all()
