"""KL controllers: who owns the coefficient and how it follows the measured KL."""

import math

import pytest
import torch

from conf.compose import compose_checked, set_up
from trainer import (
    AdaptiveKLController,
    BudgetKLController,
    ConstantKLController,
    KLControllerBase,
    Leash,
    LinearKLController,
    TargetKLController,
    make_kl_controller,
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


def test_a_kl_reward_is_read_at_the_coefficient_it_was_made_with():
    scaled = AdaptiveKLController(init_kl_coef=0.3, target=2.0, horizon=20)
    plain = TargetKLController(0.3, target=2.0, horizon=20)
    for kl in (2.2, 1.9, 5.0, 2.1, 0.0):
        scaled.update([-scaled.coeff * kl] * 3)
        plain.update([kl] * 3)
    assert scaled.coeff == pytest.approx(plain.coeff, rel=1e-12)
    assert scaled.coeff != 0.3


@pytest.mark.parametrize(("kl", "expected"), BY_HAND)
def test_the_mean_and_the_number_of_sequences_say_as_much_as_their_values(kl, expected):
    for control in (
        TargetKLController(0.1, target=6.0, horizon=10_000),
        AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=10_000),
    ):
        assert control.follow(None, sequences=64) == 0.1
        assert control.follow(kl, sequences=0) == 0.1, "every reply was dropped"
        assert control.follow(kl, sequences=64) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "control",
    [
        ConstantKLController(kl_coef=0.1),
        TargetKLController(0.1, target=6.0, horizon=10),
        AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=10),
    ],
)
def test_no_values_change_nothing_and_numbers_stay_floats(control):
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
        with pytest.raises((TypeError, ValueError)):
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


def test_a_linear_schedule_goes_from_its_first_to_its_last_iteration():
    up = LinearKLController(0.1, end=0.5, total=5)
    seen = [up.coeff] + [up.update([9.0]) for _ in range(6)]
    assert seen == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5])
    again = LinearKLController(0.1, end=0.5, total=5)
    again.load_state_dict({"done": 2})
    assert again.coeff == pytest.approx(0.3)
    assert again.state_dict() == {"done": 2}
    once = LinearKLController(0.1, end=0.5, total=1)
    assert [once.coeff, once.update([])] == [0.1, 0.5]
    for wrong in ({"end": -1.0, "total": 3}, {"end": math.inf, "total": 3}, {"end": 0, "total": 0}):
        with pytest.raises(ValueError, match="finite end >= 0 and total >= 1"):
            LinearKLController(0.1, **wrong)


def test_a_budget_is_a_level_that_adds_up_errors_the_last_error_and_its_slope():
    control = make_kl_controller(controller="budget", coeff=0.1, target=4.0)
    level, slope, last = 1 / math.sqrt(8.0), 0.0, None
    assert control.coeff == pytest.approx(level), "more than 0.1"
    steps = [([5.0, 7.0], math.log(1.5)), ([4.0], 0.0), ([-0.1, 0.1], -1.0), ([400.0], 1.0)]
    for kls, error in steps:
        level *= math.exp(0.07 * error)
        slope = slope / 2 + (0.0 if last is None else (error - last) / 2)
        last = error
        want = level * math.exp(0.6 * error + 2 * slope)
        assert control.update(kls) == pytest.approx(want)
    kept = control.coeff
    assert control.update([]) == kept
    again = BudgetKLController(0.7, target=4.0)
    assert again.coeff == 0.7
    again.load_state_dict(control.state_dict())
    assert again.coeff == kept
    assert again.update([5.0]) == control.update([5.0])
    for state in ({"coeff": 0.3}, {"coeff": 0.3, "level": 0.3}):  # of another one, of before
        again = BudgetKLController(0.7, target=4.0)
        again.load_state_dict(state)
        assert again.update([4.0]) == pytest.approx(0.3)
    assert BudgetKLController(0.0, target=0.5).coeff == 1.0
    for target in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="finite target > 0"):
            BudgetKLController(0.1, target=target)


@pytest.mark.parametrize("target", [0.01, 0.1, 0.5])
def test_a_budget_follows_the_mean_of_k1_and_k3_with_the_least_noise(target):
    """By samples: replies of which one token has a log-ratio, a normal one."""
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(400_000, generator=draw, dtype=torch.float64)
    x = target + math.sqrt(2 * target) * noise  # log policy - log reference, E exp(-x) = 1
    k3 = (-x).expm1() + x
    share = BudgetKLController(0.1, target=target).k3_share
    spread = {s: (x + s * (k3 - x)).std().item() for s in (0.8 * share, share, 1.2 * share, 0.0)}
    assert min(spread, key=lambda s: spread[s]) == share
    leash = Leash(BudgetKLController(0.1, target=target))
    per_token = {"kl/ref": x.mean().item() / 5, "kl/ref_k3": k3.mean().item() / 5}  # of 5 tokens
    leash.follow({**per_token, "kl/ref_sequence": x.mean().item()}, replies=len(x))
    by_hand = BudgetKLController(0.1, target=target)
    by_hand.update([(x + share * (k3 - x)).mean().item()])
    assert leash.coeff == pytest.approx(by_hand.coeff)
    assert BudgetKLController(0.1, target=1e6).k3_share == pytest.approx(0.0), "no overflow"


def test_a_budget_that_waited_long_is_not_far_from_its_price():
    slow, never = (BudgetKLController(0.0, target=0.5) for _ in range(2))
    for _ in range(12_000):
        slow.update([0.05])
        never.update([5e6])
    assert slow.level == pytest.approx(0.01)
    assert never.level == pytest.approx(100.0)
    for _ in range(70):
        slow.update([5.0])
    assert slow.level > 1, "back where it began within 70 iterations"


def test_a_budget_settles_at_its_target_from_any_price():
    """A policy with the delays of Adam: steps of a running mean of gradients, by its own norm."""
    for target, coeff in ((0.1, 0.01), (0.1, 20.0), (1.0, 0.01), (2.0, 3.0)):
        control, far, mean, square, path = (
            BudgetKLController(coeff, target=target),
            0.0,
            0.0,
            0.0,
            [],
        )
        for step in range(1, 121):
            path.append(far**2 / 2)
            slope = 0.74 * math.exp(-0.45 * far) - 0.73 * control.coeff * far
            control.update([path[-1]])
            mean, square = 0.9 * mean + 0.1 * slope, 0.999 * square + 0.001 * (slope**2 + 5.8)
            size = (square / (1 - 0.999**step)) ** 0.5
            far = max(far + 0.7 * mean / (1 - 0.9**step) / size, 0.0)
        assert path[-1] == pytest.approx(target, rel=0.1), (target, coeff)
        assert sum(path[-40:]) / 40 == pytest.approx(target, rel=0.1), (target, coeff)


def test_a_controller_is_made_by_its_name():
    adaptive = make_kl_controller(controller="adaptive", coeff=0.1, target=6.0, horizon=50)
    assert adaptive.update([12.0] * 5) == pytest.approx(0.1 * (1 + 0.2 * 5 / 50))
    linear = make_kl_controller(controller="linear", coeff=0.0, end=1.0, total=3)
    assert linear.update([]) == 0.5
    assert make_kl_controller(coeff=0.3, total=3).update([7.0]) == 0.3
    for wrong in ({"controller": "adaptive"}, {"controller": "linear"}, {"controller": "PID"}):
        with pytest.raises(ValueError, match=r"adaptive with kl.target, linear with kl.end"):
            make_kl_controller(coeff=0.1, **wrong)


ADAPTIVE = "kl.controller=adaptive kl.target=3"


@pytest.mark.parametrize(
    ("words", "finding"),
    [
        ("kl.controller=adaptive", "adaptive needs kl.target"),
        ("kl.controller=linear", "linear needs kl.end"),
        (
            "kl.target=3",
            r"kl.target is for kl.controller=budget or adaptive, got constant; give",
        ),
        ("kl.controller=budget", "budget needs kl.target"),
        (
            "kl.end=1",
            r"kl.end is for kl.controller=linear, got constant; give kl.controller=linear",
        ),
        (f"{ADAPTIVE} kl.coeff=0", "which stays 0; start from kl.coeff=0.01"),
        (f"{ADAPTIVE} kl.measure=false kl.coeff=1", "kl.measure=true"),
        (f"{ADAPTIVE} kl.horizon=25", r"kl.horizon > 25.6, a fifth of an iteration's 128"),
        ("experiment=sft_tiny kl.controller=linear kl.end=1", "give kl.controller=constant"),
        ("experiment=sft_tiny algorithm.target_kl=0.1", "which algorithm.target_kl is for"),
        ("algorithm.target_kl=-1", r"algorithm.target_kl >= 0"),
        (
            "algorithm.after_rollout={_target_:trainer.DropTruncated}",
            "rollout._target_ to be",
        ),
    ],
)
def test_what_cannot_be_steered_is_refused_with_a_remedy(words, finding):
    set_up()
    words = words if words.startswith("experiment") else f"experiment=grpo_tiny {words}"
    with pytest.raises(ValueError, match=finding):
        compose_checked(words.split())


def test_what_can_be_steered_composes():
    set_up()
    for words in (
        f"{ADAPTIVE} kl.horizon=52",
        "kl.controller=budget kl.target=1",
        "kl.controller=budget kl.target=1 kl.coeff=0",
        "kl.controller=linear kl.coeff=0 kl.end=1",
    ):
        assert compose_checked(["experiment=grpo_tiny", *words.split()])["kl"]["measure"]
