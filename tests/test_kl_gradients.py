"""Which KL may act where: the table of docs/kl.md against enumeration, in float64.

A policy of two steps over a vocabulary of four is small enough to sum over all its sequences, so
the expected gradient of each pair (place, estimator) is exact, for replies of the policy itself and
of another one. It is made by leash's own parts, from the KL of a token to the terms of the loss;
what it should be is autograd of a definition (tests/kl_tables.py).
"""

import itertools
import re
from pathlib import Path

import pytest
import torch
from kl_tables import (
    Table,
    estimate,
    expected,
    the_weighed_kl_is_the_reverse_one_whoever_sampled,
    truths,
)
from torch import Tensor

from policies.token_distribution import full_kl
from trainer.kl_control import BIASED
from trainer.losses import MAX_LOG_RATIO, kl_term

PAGE = Path(__file__).parents[1] / "docs" / "kl.md"
PLACES, ESTIMATORS = ("reward", "loss"), ("k1", "k2", "k3", "full", "k3_ratio")
PAIRS = list(itertools.product(PLACES, ESTIMATORS))


def rows() -> dict[tuple[str, str], list[str]]:
    """Return the table of the page: (place, estimator) to its other cells."""
    lines = re.findall(r"^\| (reward|loss) \| (\w+) \| (.+) \|$", PAGE.read_text(), re.M)
    return {(place, name): rest.split(" | ") for place, name, rest in lines}


def test_the_page_has_all_pairs_and_refuses_those_that_the_program_refuses():
    assert set(rows()) == set(PAIRS)
    assert {pair for pair, cells in rows().items() if cells[2].startswith("refused")} == set(BIASED)


@pytest.mark.parametrize(("place", "estimator"), PAIRS)
def test_expected_gradient_is_what_the_page_says(place, estimator):
    policy, ref = Table(0), Table(1)
    want = told(rows()[place, estimator][0], truths(policy, ref))
    got = expected(policy, ref, place, estimator)
    assert torch.allclose(got, want, rtol=1e-9, atol=1e-12)


def told(cell: str, parts: dict[str, Tensor]) -> Tensor:
    """Return the gradient that a cell of the table names."""
    terms = cell.split(" - ")
    return parts[terms[0]] - sum(parts[term] for term in terms[1:])


@pytest.mark.parametrize(("place", "estimator"), PAIRS)
def test_of_an_older_policys_replies_it_is_what_the_page_says(place, estimator):
    cell = rows()[place, estimator][1]
    policy, ref, older = Table(0), Table(1), Table(2)
    got = expected(policy, ref, place, estimator, sampler=older)
    assert torch.allclose(got, told(cell, truths(policy, ref, older)), rtol=1e-9, atol=1e-12)
    same = told(cell, truths(policy, ref))  # the cells agree where the sampler is the policy
    assert torch.allclose(same, told(rows()[place, estimator][0], truths(policy, ref)))


def test_only_the_exact_and_the_weighed_kl_keep_their_gradient_over_epochs():
    """How far each is from R, in parts of it, as the policy goes down its own gradient."""
    off: dict[str, list[float]] = {}
    for estimator in ("k2", "k3", "full", "k3_ratio"):
        policy, ref, sampler = Table(0), Table(1), Table(0)
        for _ in range(5):
            got = expected(policy, ref, "loss", estimator, sampler=sampler)
            want = truths(policy, ref, sampler)["R"]
            off.setdefault(estimator, []).append(float((got - want).norm() / want.norm()))
            policy.step(got, rate=0.5)
    assert max(*off["full"], *off["k3_ratio"]) < 1e-12
    assert off["k2"][0] < 1e-12, "its first step is right"
    assert off["k2"] == sorted(off["k2"])
    assert off["k2"][-1] > 0.2
    assert min(off["k3"]) > 0.2, "the forward KL's"


def test_the_weighed_kl_is_the_reverse_one_whoever_sampled():
    the_weighed_kl_is_the_reverse_one_whoever_sampled()


def test_of_one_step_the_weighed_kl_is_the_whole_reverse_kl():
    """No state is visited because of another one: R is the gradient of the KL of sequences."""
    policy, ref, sampler = Table(0), Table(1), Table(2)
    for table in (ref, sampler, policy):
        with torch.no_grad():
            table.logits[1].copy_(ref.logits[1])  # the second token: all alike
    got = expected(policy, ref, "loss", "k3_ratio", sampler=sampler)[:4]
    assert torch.allclose(got, truths(policy, ref)["S"][:4], rtol=1e-9, atol=1e-12)


def test_the_letters_of_the_table_are_different_gradients():
    parts = truths(Table(0), Table(1), Table(2))
    for a, b in itertools.combinations(parts.values(), 2):
        assert (a - b).norm() > 0.03


@pytest.mark.parametrize("estimator", ESTIMATORS[:4])
def test_reward_and_loss_together_are_the_gradient_of_the_expected_estimate(estimator):
    policy, ref = Table(0), Table(1)
    want = policy.gradient((policy.chance() * estimate(policy, ref, estimator)).sum())
    got = sum(expected(policy, ref, place, estimator) for place in PLACES)
    assert torch.allclose(got, want)
    assert torch.allclose(want, truths(policy, ref)["Q" if estimator == "k2" else "S"])


@pytest.mark.parametrize(("place", "estimator"), PAIRS)
def test_only_refused_pairs_do_not_pull_near_the_reference(place, estimator):
    """Near the reference S, R and F are one gradient, to first order in the distance."""
    ref = Table(1)
    for eps in (1e-2, 1e-3):
        policy = Table(0, near=ref, eps=eps)
        want = truths(policy, ref)["S"]
        pull = float(expected(policy, ref, place, estimator) @ want / (want @ want))
        assert abs(pull - ((place, estimator) not in BIASED)) < 2 * eps


def test_no_estimate_or_gradient_overflows():
    far = torch.tensor([-1e4, -95.0, -0.0, -0.0], requires_grad=True)
    ref = torch.tensor([-0.0, -0.0, -95.0, -1e4])
    for estimator in ("k1", "k2", "k3"):
        value = kl_term(far, ref, estimator)
        (slope,) = torch.autograd.grad(value.sum(), far)
        assert torch.isfinite(value).all()
        assert torch.isfinite(slope).all()
    assert kl_term(far, ref, "k3").max() < 1.01 * torch.tensor(MAX_LOG_RATIO).exp()
    shape = torch.tensor([[200.0, 0.0, -1e4]])
    value = full_kl(shape.log_softmax(-1), shape.flip(-1).log_softmax(-1))
    assert value.item() == pytest.approx(10200.0)  # 200 - (-1e4)
