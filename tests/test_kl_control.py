"""KL controllers: who owns the coefficient and how it follows the measured KL."""

import math

import pytest
import torch

from trainer import (
    AdaptiveKLController,
    ConstantKLController,
    KLControllerBase,
    TargetKLController,
)

# 64 values of mean KL at target 6 and horizon 10,000: 0.1 * (1 + clip(KL / 6 - 1, +-0.2) * 0.0064)
BY_HAND = [(12.0, 0.100128), (6.6, 0.100064), (6.0, 0.1), (5.4, 0.099936), (-3.0, 0.099872)]


class Rollout:
    """Something with a coefficient."""

    kl_coef = 0.7


@pytest.mark.parametrize(("kl", "expected"), BY_HAND)
def test_the_coefficient_follows_ziegler(kl, expected):
    values = [kl - 1, kl + 1] * 32
    control = TargetKLController(0.1, target=6.0, horizon=10_000)
    assert control.update(values) == pytest.approx(expected, rel=1e-9)
    assert control.coeff == control.coef == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("kl", "expected"), BY_HAND)
def test_the_documented_class_takes_kl_rewards(kl, expected):
    rewards = [-0.1 * (kl - 1), -0.1 * (kl + 1)] * 32
    control = AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=10_000)
    assert control.update(rewards) == pytest.approx(expected, rel=1e-9)
    assert control.takes_rewards
    assert not TargetKLController.takes_rewards


def test_a_kl_reward_is_read_at_the_coefficient_it_was_made_with():
    scaled = AdaptiveKLController(init_kl_coef=0.3, target=2.0, horizon=20)
    plain = TargetKLController(0.3, target=2.0, horizon=20)
    for kl in (2.2, 1.9, 5.0, 2.1, 0.0):
        scaled.update([-scaled.coeff * kl] * 3)
        plain.update([kl] * 3)
    assert scaled.coeff == pytest.approx(plain.coeff, rel=1e-12)
    assert scaled.coeff != 0.3


@pytest.mark.parametrize(
    "control",
    [
        ConstantKLController(kl_coef=0.1),
        TargetKLController(0.1, target=6.0, horizon=10),
        AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=10),
    ],
)
def test_fault_31_no_values_change_nothing_and_numbers_stay_floats(control):
    assert control.update([]) == 0.1
    moved = control.update([torch.tensor(7.0), torch.tensor(6.5)])
    assert type(moved) is type(control.coeff) is float
    assert math.isfinite(moved)


@pytest.mark.parametrize(
    "values", [None, 3.0, torch.tensor(3.0), [float("nan")], [1.0, float("inf")]]
)
def test_missing_and_broken_values_are_errors_that_leave_the_coefficient(values):
    for control in (
        TargetKLController(0.1, target=6.0, horizon=10),
        AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=10),
    ):
        with pytest.raises(ValueError, match="expected"):
            control.update(values)
        assert control.coeff == 0.1


def test_impossible_settings_are_refused():
    good = {"init_kl_coef": 0.1, "target": 6.0, "horizon": 10}
    for name in good:
        for wrong in (0, -1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="> 0"):
                AdaptiveKLController(**{**good, name: wrong})
    with pytest.raises(ValueError, match="neither"):
        ConstantKLController()
    with pytest.raises(ValueError, match="fewer than 50 values"):
        TargetKLController(0.1, target=6.0, horizon=10).update([0.0] * 50)
    with pytest.raises(NotImplementedError, match="override"):
        KLControllerBase(0.1).update([1.0])


def test_a_checkpoint_takes_up_where_it_stopped():
    first = TargetKLController(0.1, target=6.0, horizon=50)
    first.update([9.0] * 7)
    model = Rollout()
    second = TargetKLController(0.5, target=6.0, horizon=50, model=model)
    second.load_state_dict(first.state_dict())
    assert model.kl_coef == second.coeff == first.coeff
    assert second.update([2.0]) == first.update([2.0])


def test_the_model_follows_its_controller():
    model = Rollout()
    assert ConstantKLController(model=model).coeff == 0.7
    constant = ConstantKLController(kl_coef=0.2, model=model)
    assert model.kl_coef == 0.2
    model.kl_coef = 5.0
    assert constant.update() == model.kl_coef == 0.2
    adaptive = AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=10, model=model)
    assert model.kl_coef == 0.1
    assert adaptive.update([-0.1 * 12.0] * 5) == model.kl_coef == pytest.approx(0.11)
    for make in (
        lambda m: ConstantKLController(kl_coef=0.1, model=m),
        lambda m: AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=10, model=m),
    ):
        with pytest.raises(AttributeError, match="kl_coef"):
            make(torch.nn.Linear(1, 1))
