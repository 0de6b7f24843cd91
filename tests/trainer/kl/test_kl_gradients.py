"""Which KL may act where: the table of docs/kl_estimators.md against enumeration, in float64.

A policy of two steps over a vocabulary of four is small enough to sum over all its sequences, so
the expected gradient of each pair (place, estimator) is exact, for responses of the policy itself
and of another one. It is made by leash's own parts, from the KL of a token to the terms of the
loss; what it should be is autograd of a definition (tests/support/kl_tables.py).
"""

import itertools
import re
from pathlib import Path

import pytest
import torch
from support.kl_tables import (
    Table,
    estimate,
    expected,
    the_weighed_kl_is_the_reverse_one_whoever_sampled,
    truths,
)
from torch import Tensor

from trainer.baselines import group_advantage
from trainer.kl.estimators import ESTIMATORS, PLACES
from trainer.kl.leash import later_kl

PAGE = Path(__file__).parents[3] / "docs" / "kl_estimators.md"
PAIRS = [
    (place, name)
    for place, name in itertools.product(PLACES, ESTIMATORS)
    if place != "sequence" or ESTIMATORS[name].needs == "vocabulary"  # others have no part there
]
REFUSED = {(place, name) for name, own in ESTIMATORS.items() for place in own.refused}


PULL = {"jsd": 0.25}  # b (1 - b) for the weight b = 1/2 of its mixture; of the others 1


def rows() -> dict[tuple[str, str], list[str]]:
    """Return the table of the page: (place, estimator) to its other cells."""
    lines = re.findall(r"^\| (reward|loss|sequence) \| (\w+) \| (.+) \|$", PAGE.read_text(), re.M)
    return {(place, name): rest.split(" | ") for place, name, rest in lines}


def gradient_of(cell: str, parts: dict[str, Tensor]) -> Tensor:
    """Return the gradient that a cell of the table names."""
    terms = cell.replace(" + ", " - -").split(" - ")
    signed = (parts[term.strip("-")] * (1 if term[0] == "-" else -1) for term in terms[1:])
    return parts[terms[0]] + sum(signed)


def test_the_page_has_all_pairs_and_refuses_those_that_the_program_refuses():
    assert set(rows()) == set(PAIRS)
    assert {pair for pair, cells in rows().items() if cells[2].startswith("refused")} == REFUSED


@pytest.mark.parametrize(("place", "estimator"), PAIRS)
def test_expected_gradient_is_what_the_page_says(place, estimator):
    """Of responses of the policy itself, and of an older policy's."""
    own, other = rows()[place, estimator][:2]
    policy, ref, older = Table(0), Table(1), Table(2)
    want = gradient_of(own, truths(policy, ref))
    got = expected(policy, ref, place, estimator)
    assert torch.allclose(got, want, rtol=1e-9, atol=1e-12)
    got = expected(policy, ref, place, estimator, sampler=older)
    elsewhere = gradient_of(other, truths(policy, ref, older))
    assert torch.allclose(got, elsewhere, rtol=1e-9, atol=1e-12)
    same = gradient_of(other, truths(policy, ref))
    assert torch.allclose(same, want), "the cells agree where the sampler is the policy"


def test_the_weighed_kl_is_the_reverse_one_whoever_sampled():
    the_weighed_kl_is_the_reverse_one_whoever_sampled()


@pytest.mark.parametrize(("place", "estimator"), PAIRS)
def test_only_refused_pairs_do_not_pull_near_the_reference(place, estimator):
    """Near the reference S, R and F are one gradient, to first order in the distance."""
    ref = Table(1)
    for eps in (1e-2, 1e-3):
        policy = Table(0, near=ref, eps=eps)
        want = truths(policy, ref)["S"]
        pull = float(expected(policy, ref, place, estimator) @ want / (want @ want))
        # The sequence refuses another divergence, which pulls.
        allowed = (place, estimator) not in REFUSED or place == "sequence"
        assert abs(pull - allowed * PULL.get(estimator, 1.0)) < 2 * eps


def of_pairs(seed: int, way: str) -> tuple[Tensor, float]:
    """Return mean and variance of the gradient of the KL over all groups of two responses."""
    policy, ref = Table(seed), Table(seed + 10)
    tokens, states = policy.log_probs(), estimate(policy, ref, "full")  # [N, 2] each
    pairs = torch.cartesian_prod(*2 * [torch.arange(len(tokens))]).flatten()  # [2 N^2] rows
    mask, zeros = torch.ones(len(pairs), 2).bool(), torch.zeros(len(pairs), 2).double()
    if way == "sequence":
        of_token = later_kl(states.detach()[pairs], mask, torch.arange(len(pairs)) // 2)
    else:
        k1 = (tokens - ref.log_probs()).detach()[pairs]
        options = {"baseline": "leave_one_out", "scale": None, "credit": way}
        of_token = -group_advantage(zeros, -k1, mask, 2, **options)  # [2 N^2, 2]
    score = slopes(policy, tokens)[pairs]  # [2 N^2, 2, D]
    gradient = (of_token.unsqueeze(-1) * score).sum(1)
    if way == "sequence":
        gradient = gradient + slopes(policy, states)[pairs].sum(1)
    both = gradient.view(-1, 2, gradient.shape[-1]).mean(1)  # [N^2, D]
    chance = policy.chance().detach()[pairs].view(-1, 2).prod(-1, keepdim=True)  # [N^2, 1]
    mean = (chance * both).sum(0)
    return mean, float((chance * (both - mean).square()).sum())


def slopes(policy: Table, values: Tensor) -> Tensor:
    """Return the gradient of each value [N, 2], [N, 2, D]."""
    rows = [torch.stack([policy.gradient(value) for value in row]) for row in values]
    return torch.stack(rows)


@pytest.mark.parametrize("seed", range(3))
def test_a_baseline_by_place_adds_no_bias_and_the_exact_kl_of_later_states_has_less_noise(seed):
    want = truths(Table(seed), Table(seed + 10))["S"]
    ways = "trajectory", "return_to_go", "sequence"
    means, variances = zip(*(of_pairs(seed, way) for way in ways), strict=True)
    for mean in means:
        assert torch.allclose(mean, want, rtol=1e-9, atol=1e-12)
    assert variances[0] > variances[1] > 2 * variances[2]


def test_later_kls_of_groups_of_two_sizes_are_refused_because_rows_would_compare_across_prompts():
    kl = torch.ones(5, 2)
    with pytest.raises(ValueError, match=r"one size, got groups of \[2, 3\] rows"):
        later_kl(kl, kl > 0, torch.tensor([1, 1, 1, 2, 2]))
