"""The leash is charged once: from the advantage through the objective to a step of the update.

For every algorithm file that samples and in both places, against plain forwards in float64.
"""

from functools import partial

import pytest
import torch
from charges import COEFF, SAMPLING, charged_once, run
from contracts import leash
from tensordict import TensorDict

from trainer.kl import Leash, check_charged
from trainer.kl_control import (
    BIASED,
    ESTIMATORS,
    PLACES,
    ConstantKLController,
    TargetKLController,
)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", SAMPLING)
def test_the_kl_is_charged_once(name, where):
    charged_once(name, where)


@pytest.mark.parametrize(("charges", "learns", "how"), [(1, 0, "twice"), (0, 1, "never")])
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_two_leashes_that_disagree_are_refused(name, charges, learns, how):
    places = ("loss", "reward")
    with pytest.raises(ValueError, match=f"charged {how}.*hand one Leash to both"):
        run(name, leash(COEFF, places[learns]), judged_by=leash(COEFF, places[charges]))


def test_an_objective_without_a_leash_charges_nothing_that_is_left_to_it():
    batch = TensorDict({"kl_left": torch.full((2,), 0.3)}, [2])
    with pytest.raises(ValueError, match="charged never"):
        check_charged(batch, None)
    with pytest.raises(ValueError, match="charged never"):
        check_charged(batch.exclude("kl_left"), leash(0.3, "reward"))
    batch["kl_left"].zero_()  # paid in the reward, or at coefficient 0
    for own in (None, leash(0.3, "reward"), leash(0.0, "loss")):
        check_charged(batch, own)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("where", PLACES)
def test_a_refused_pair_cannot_be_made(where, estimator):
    make = partial(Leash, ConstantKLController(kl_coef=0.1), estimator, where)
    if (where, estimator) not in BIASED:
        assert make().coeff == 0.1
        return
    pair = f"kl.estimator={estimator} with kl.where={where}"
    with pytest.raises(ValueError, match=pair):
        make()
    if estimator in ("full", "k3_ratio"):  # nothing computes them there
        with pytest.raises(ValueError, match=pair):
            make(allow_biased=True)
    else:
        assert make(allow_biased=True).where == where


def test_a_leash_cannot_be_moved_once_it_is_made():
    with pytest.raises(AttributeError, match="cannot assign"):
        leash(0.1).where = "reward"
    for wrong in ({"where": "both"}, {"estimator": "k4"}):
        with pytest.raises(ValueError, match=r"expected kl\.estimator in"):
            Leash(ConstantKLController(kl_coef=0.1), **wrong)


def test_a_kl_that_nobody_measured_does_not_move_the_coefficient():
    for unmeasured in ({}, {"reward/dropped_fraction": 1.0}):
        own = Leash(TargetKLController(0.1, target=1.0, horizon=100))
        own.follow(unmeasured, replies=16)
        assert own.coeff == 0.1
    own.follow({"kl/ref_sequence": 9.0, "reward/dropped_fraction": 0.5}, replies=16)
    assert own.coeff == pytest.approx(0.1 * (1 + 0.2 * 8 / 100)), "8 replies were judged"
