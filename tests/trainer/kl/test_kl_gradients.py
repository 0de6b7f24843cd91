"""Which KL may act where: the table of docs/kl.md against enumeration, in float64.

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
    expected,
    the_weighed_kl_is_the_reverse_one_whoever_sampled,
    truths,
)
from torch import Tensor

from trainer.kl.estimators import ESTIMATORS, PLACES

PAGE = Path(__file__).parents[3] / "docs" / "kl.md"
PAIRS = list(itertools.product(PLACES, ESTIMATORS))
REFUSED = {(place, name) for name, own in ESTIMATORS.items() for place in own.refused}


PULL = {"jsd": 0.25}  # b (1 - b) for the weight b = 1/2 of its mixture; of the others 1


def rows() -> dict[tuple[str, str], list[str]]:
    """Return the table of the page: (place, estimator) to its other cells."""
    lines = re.findall(r"^\| (reward|loss) \| (\w+) \| (.+) \|$", PAGE.read_text(), re.M)
    return {(place, name): rest.split(" | ") for place, name, rest in lines}


def gradient_of(cell: str, parts: dict[str, Tensor]) -> Tensor:
    """Return the gradient that a cell of the table names."""
    terms = cell.split(" - ")
    return parts[terms[0]] - sum(parts[term] for term in terms[1:])


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
        allowed = (place, estimator) not in REFUSED
        assert abs(pull - allowed * PULL.get(estimator, 1.0)) < 2 * eps
