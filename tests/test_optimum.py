"""Training ends at the optimum of reward - c KL, by enumeration of all replies."""

from math import isclose

import pytest
from contracts import one_process

from benchmarks.coefficients import COEFFS, IDS, End, train


@pytest.mark.parametrize("coeff", COEFFS)
def test_k1_in_the_reward_ends_at_the_reference_reweighted(coeff):
    end = train(coeff, one_process(), steps=150)
    reward, kl = end.optimum(coeff)
    assert isclose(end.reward, reward, rel_tol=0.01)
    assert isclose(end.kl, kl, rel_tol=0.02)
    assert isclose(end.nominal(), coeff, rel_tol=0.02)


@pytest.mark.parametrize("nats", [0.3, 1.0])
def test_a_budget_is_spent(nats):
    """From one coefficient, whose own optimum has neither."""
    end = train(0.5, one_process(), target=nats, steps=120)
    assert isclose(end.kl, nats, rel_tol=0.1)


def test_k3_in_the_loss_ends_elsewhere_and_pays_more():
    end = train(1.0, one_process(), estimator="k3", steps=150)
    assert not isclose(end.nominal(), 1.0, rel_tol=0.2)
    assert end.optimum(end.nominal())[1] / end.kl < 0.9


def test_the_optimum_is_better_than_its_neighbours():
    start = train(1.0, one_process(), steps=0).start
    assert start.exp().sum().item() == pytest.approx(1, abs=1e-6)
    assert len({tuple(ids) for ids in IDS.tolist()}) == 31
    best = End(0.0, 0.0, start)
    values = [reward - kl for reward, kl in map(best.optimum, (0.9, 1.0, 1.1))]
    assert values[1] == max(values)
