"""The split of the KL: by enumeration of all responses and counts, in float64."""

import copy
import math

import numpy as np
import pytest
import torch
from support.slow_maths import Enumerated, V, six_tokens

from trainer.kl.split import rate_term, split

M, N = 8, 64  # responses of the policy and of the reference to a prompt


def events(count: int, of: int) -> np.ndarray:
    return np.array([[1.0] * count + [0.0] * (of - count)])


def rest(first: int, rate: float) -> float:
    i = np.arange(first, 10_000)
    return float(((1 - rate) ** i / i).sum())


def chance(count: int, of: int, rate: float) -> float:
    return math.comb(of, count) * rate**count * (1 - rate) ** (of - count)


def bias(a: float, p: float) -> float:
    return a * (rest(M, a) - rest(N + 1, p))


def the_bias_is_the_rest_of_two_series(a: float, p: float) -> None:
    """Raise AssertionError unless the mean over all pairs of counts has the bias of the docs."""
    expected = sum(
        chance(k, M, a) * chance(s, N, p) * rate_term(events(k, M), events(s, N))[0]
        for k in range(M + 1)
        for s in range(N + 1)
    )
    assert expected == pytest.approx(a * math.log(a / p) + bias(a, p), abs=1e-9)


@pytest.mark.parametrize(("a", "p"), [(0.5, 0.2), (0.9, 0.02), (0.03, 0.4), (1.0, 0.3)])
def test_the_bias_of_the_term_of_the_rates_is_the_rest_of_two_series(a, p):
    the_bias_is_the_rest_of_two_series(a, p)


def exact(policy: np.ndarray, reference: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return a, p and the KLs inside right and wrong responses, each by its definition."""
    a, p = policy[right].sum(), reference[right].sum()
    inside = []
    for those, share in ((right, a), (~right, 1 - a)):
        ours, theirs = (
            policy[those] / policy[those].sum(),
            reference[those] / reference[those].sum(),
        )
        inside.append(share * (ours * np.log(ours / theirs)).sum())
    return np.array([a, p, *inside])


def test_the_parts_of_samples_are_those_of_all_responses_in_the_mean():
    """Of six prompts with 36 responses each, the wrong ones by reward; 4000 draws of samples."""
    reference, draw = six_tokens(8, 0), np.random.default_rng(0)
    with torch.no_grad():
        reference.lm_head.weight.mul_(0.3)
        policy = copy.deepcopy(reference)
        noise = torch.randn(policy.lm_head.weight.shape, generator=torch.Generator().manual_seed(2))
        policy.lm_head.weight.add_(noise * 0.3)
    case, repeats = Enumerated(reference, policy), 4000
    right = case.reward.numpy() > 0.3
    known, kls, samples = [], [], []
    for prompt in range(V):
        case.ids[:, 0] = prompt
        with torch.no_grad():
            pair = [case.log_probs(m).sum(-1).exp().numpy() for m in (policy, reference)]
        ours, theirs = (each / each.sum() for each in pair)
        known.append(exact(ours, theirs, right))
        kls.append((ours * np.log(ours / theirs)).sum())
        picked = draw.choice(V * V, p=ours, size=(repeats, M))
        seen = draw.choice(V * V, p=theirs, size=(repeats, N))
        samples.append((right[picked], np.log(ours / theirs)[picked], right[seen]))
    a, p, inside_right, inside_wrong = np.array(known).T
    of_right, of_wrong = a * np.log(a / p), (1 - a) * np.log((1 - a) / (1 - p))
    assert np.mean(kls) == pytest.approx((of_right + of_wrong + inside_right + inside_wrong).mean())
    assert np.ptp(a) > 0.1, "prompts differ"
    success = [np.concatenate(each).astype(float) for each in zip(*samples, strict=True)]
    got = split(*success, needed=0.125)
    assert sum(got.values()) == pytest.approx(success[1].mean(), abs=1e-12)
    off_right = np.mean([bias(*rates) for rates in zip(a, p, strict=True)])
    off_wrong = np.mean([bias(*rates) for rates in zip(1 - a, 1 - p, strict=True)])
    want = {
        "kl/needed": 0.125,
        "kl/misallocated": (of_right + of_wrong).mean() - 0.125 + off_right + off_wrong,
        "kl/in_right": inside_right.mean() - off_right,
        "kl/in_wrong": inside_wrong.mean() - off_wrong,
    }
    assert got == pytest.approx(want, abs=0.01)
