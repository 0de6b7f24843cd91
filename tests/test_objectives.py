"""Objectives: the per-token terms by hand numbers, and what they ask of the scorer."""

import math

import pytest
import torch
from contracts import leash
from tensordict import TensorDict

from policies.scorer import Scores
from trainer.objectives import GRPOObjective

GEN = [-1.0, -1.0, -1.0, -2.0]
RATIO = [1.0, 1.5, 0.5, 1.0]
REF = [-1.5, -1.0, -2.0, -2.0]
ADVANTAGE = [2.0, 2.0, -1.0, 0.5]
CURR = [g + math.log(r) for g, r in zip(GEN, RATIO, strict=True)]


def batch(mask=(True, True, True, True)) -> TensorDict:
    td = TensorDict({"loss_mask": torch.tensor([mask])}, [1])
    td["log_probs", "full"] = torch.tensor([GEN])
    td["ref_log_probs", "full"] = torch.tensor([REF])
    td["advantage"] = torch.tensor([ADVANTAGE])
    return td


def scores(**more) -> Scores:
    return Scores(torch.tensor([CURR], requires_grad=True), **more)


def objective(coeff=0.5, where="loss", estimator=None) -> GRPOObjective:
    return GRPOObjective(clip_low=0.2, clip_high=0.4, leash=leash(coeff, where, estimator))


def test_the_full_kl_is_that_of_the_scorer_and_needs_the_reference():
    full = torch.tensor([[0.1, 0.2, 0.3, 0.4]], requires_grad=True)
    made = objective(coeff=0.5, estimator="full")
    assert made.leash.needs_reference
    terms = made(scores(full_kl=full), batch())
    assert terms.loss["kl"].tolist() == [pytest.approx([0.05, 0.1, 0.15, 0.2])]
    assert terms.loss["kl"].requires_grad
    assert not terms.means["kl/ref_full"].requires_grad


def test_what_is_logged():
    terms = objective()(scores(entropy=torch.ones(1, 4)), batch((True, False, True, True)))
    behaviour = [g - c for g, c in zip(GEN, CURR, strict=True)]
    assert terms.means["kl/behaviour"].tolist() == [pytest.approx(behaviour)]
    assert terms.means["policy/clip_fraction"].tolist() == [[0.0, 1.0, 1.0, 0.0]]
    assert terms.maxima["policy/ratio_max"].max() == pytest.approx(1.0), "1.5 is not in the mask"
    assert terms.means["policy/entropy"].tolist() == [[1.0] * 4]
    assert not any(v.requires_grad for v in [*terms.means.values(), *terms.maxima.values()])


@pytest.mark.parametrize(("x", "r"), [(-18.0, 1e-8), (-21.0, 1e-8), (-30.0, 1.0), (25.0, 1e-3)])
def test_far_from_the_reference_k3_ratio_pulls_back_all_the_same(x, r):
    """k3 ends at 20 nats and its large parts cancel; the gradient of both is r x at any x."""
    made, td = objective(coeff=1.0, estimator="k3_ratio"), batch()
    curr = torch.full((1, 4), -40.0, requires_grad=True)
    td["ref_log_probs", "full"] = curr.detach() - x
    td["log_probs", "full"] = curr.detach() - math.log(r)
    term = made(Scores(curr), td).loss["kl"]
    d = min(-x, 20.0)
    assert term.tolist() == [pytest.approx([r * (math.exp(d) - 1 - d)] * 4, rel=1e-5)]
    (slope,) = torch.autograd.grad(term.sum(), curr)
    assert slope.tolist() == [pytest.approx([r * x] * 4, rel=1e-5)]
