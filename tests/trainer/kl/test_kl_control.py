"""KL controllers: who owns the coefficient and how it follows the measured KL."""

import math

import pytest
import torch

from conf.build import make_controller
from conf.compose import compose_checked, set_up
from trainer import AdaptiveKLController, BudgetKLController, Leash, TargetKLController

# 64 values of mean KL at target 6 and horizon 10,000: 0.1 * (1 + clip(KL / 6 - 1, +-0.2) * 0.0064)
BY_HAND = [(12.0, 0.100128), (6.6, 0.100064), (6.0, 0.1), (5.4, 0.099936), (-3.0, 0.099872)]


def steered(horizon: float = 10) -> tuple[TargetKLController, AdaptiveKLController]:
    """Return both controllers of Ziegler et al.: of KL values, and TorchRL's of KL rewards."""
    options = {"target": 6.0, "horizon": horizon}
    return TargetKLController(0.1, **options), AdaptiveKLController(init_kl_coef=0.1, **options)


@pytest.mark.parametrize(("kl", "expected"), BY_HAND)
def test_the_coefficient_follows_ziegler(kl, expected):
    target, adaptive = steered(horizon=10_000)
    values = [kl - 1, kl + 1] * 32
    assert target.update(values) == target.coef == pytest.approx(expected, rel=1e-9)
    assert adaptive.update([-0.1 * v for v in values]) == pytest.approx(expected, rel=1e-9)
    for control in steered(horizon=10_000):  # the mean and the number say as much
        assert control.follow(None, sequences=64) == 0.1
        assert control.follow(kl, sequences=0) == 0.1, "every response was dropped"
        assert control.follow(kl, sequences=64) == pytest.approx(expected, rel=1e-9)


def test_values_that_are_no_numbers_are_an_error_and_leave_the_coefficient():
    for control in steered():
        with pytest.raises(ValueError, match="finite"):
            control.update([1.0, math.nan])
        with pytest.raises(ValueError, match="kl_values"):
            control.update(None)
        assert control.coeff == 0.1
        assert type(control.update([torch.tensor(7.0)])) is float


def test_a_controller_that_multiplies_does_not_begin_at_0():
    with pytest.raises(ValueError, match=r"kl\.coeff"):
        TargetKLController(0.0, target=6.0, horizon=10_000)


@pytest.mark.parametrize("controller", ["constant", "adaptive", "budget", "linear"])
def test_a_checkpoint_takes_up_where_it_stopped(controller):
    def make(coeff: float):
        settings = {"target": 6.0, "horizon": 50, "end": 0.1, "coeff": coeff}
        return make_controller({"controller": controller, **settings}, total=9, responses=7)

    first, second = make(0.1), make(0.1 if controller == "linear" else 0.5)
    for kl in (9.0, 3.0):
        first.update([kl] * 7)
    second.load_state_dict(first.state_dict())
    assert second.coeff == first.coeff
    assert second.update([2.0]) == first.update([2.0])


def test_a_budget_is_a_level_that_adds_up_errors_the_last_error_and_its_slope():
    control = BudgetKLController(0.1, target=4.0)
    level, slope, last = 1 / math.sqrt(8.0), 0.0, None
    assert control.coeff == pytest.approx(level), "more than 0.1"
    steps = [([5.0, 7.0], math.log(1.5)), ([4.0], 0.0), ([-0.1, 0.1], -1.0), ([400.0], 1.0)]
    for kls, error in steps:
        level *= math.exp(0.07 * error)
        slope = slope / 2 + (0.0 if last is None else (error - last) / 2)
        last = error
        want = level * math.exp(0.6 * error + 2 * slope)
        assert control.update(kls) == pytest.approx(want)
    assert control.update([]) == pytest.approx(want)
    assert BudgetKLController(0.7, target=4.0).coeff == 0.7
    slow = BudgetKLController(0.0, target=0.5)
    for _ in range(12_000):
        slow.update([0.05])
    assert slow.level == pytest.approx(0.01), "a hundredth of its start, however long it waited"


@pytest.mark.parametrize("target", [0.01, 0.1, 0.5])
def test_a_budget_follows_the_mean_of_k1_and_k3_with_the_least_noise(target):
    """By samples: responses of which one token has a log-ratio, a normal one."""
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(400_000, generator=draw, dtype=torch.float64)
    x = target + math.sqrt(2 * target) * noise  # log policy - log reference, E exp(-x) = 1
    k3 = (-x).expm1() + x
    share = BudgetKLController(0.1, target=target).k3_weight
    spread = {s: (x + s * (k3 - x)).std().item() for s in (0.8 * share, share, 1.2 * share, 0.0)}
    assert min(spread, key=lambda s: spread[s]) == share
    leash = Leash(BudgetKLController(0.1, target=target))
    per_token = {"kl/ref": x.mean().item() / 5, "kl/ref_k3": k3.mean().item() / 5}  # of 5 tokens
    leash.follow({**per_token, "kl/ref_sequence": x.mean().item()}, responses=len(x))
    by_hand = BudgetKLController(0.1, target=target)
    by_hand.update([(x + share * (k3 - x)).mean().item()])
    assert leash.coeff == pytest.approx(by_hand.coeff)


@pytest.mark.parametrize(("target", "coeff"), [(0.1, 0.01), (0.1, 20.0), (1.0, 0.01), (2.0, 3.0)])
def test_a_budget_settles_at_its_target_from_any_price(target, coeff):
    """A policy with the delays of Adam: steps of a running mean of gradients, by its own norm."""
    control, path = BudgetKLController(coeff, target=target), []
    far = mean = square = 0.0
    for step in range(1, 121):
        path.append(far**2 / 2)
        slope = 0.74 * math.exp(-0.45 * far) - 0.73 * control.coeff * far
        control.update([path[-1]])
        mean, square = 0.9 * mean + 0.1 * slope, 0.999 * square + 0.001 * (slope**2 + 5.8)
        size = (square / (1 - 0.999**step)) ** 0.5
        far = max(far + 0.7 * mean / (1 - 0.9**step) / size, 0.0)
    assert path[-1] == pytest.approx(target, rel=0.1)
    assert sum(path[-40:]) / 40 == pytest.approx(target, rel=0.1)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("kl.controller=budget", "kl.target"),
        ("kl.controller=linear", "kl.end"),
        ("kl.refresh_decay=0.5", "kl.refresh_every"),
        ("kl.refresh_every=1 kl.measure=false kl.coeff=0", "kl.measure"),
        ("kl.controller=adaptive kl.target=3 kl.measure=false kl.coeff=1", "kl.measure"),
        ("kl.controller=adaptive kl.target=3 kl.horizon=25", "kl.horizon > 25.6"),  # 128 responses
        ("experiment=sft_tiny kl.controller=linear kl.end=1", "kl.controller"),
        ("experiment=sft_tiny algorithm.target_kl=0.1", "algorithm.target_kl"),
    ],
)
def test_what_cannot_be_steered_is_refused_by_its_key(words, key):
    set_up()
    words = words if words.startswith("experiment") else f"experiment=grpo_tiny {words}"
    with pytest.raises(ValueError, match=key.replace(".", r"\.")):
        compose_checked(words.split())
