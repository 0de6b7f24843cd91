"""Divergence-bounded masks (DPPO): hand numbers at the borders, digits near 0 and 1, keys.

Loss, bounds and gradient against the paper: tests/test_algorithms.py.
"""

import math
from decimal import Decimal, getcontext

import pytest
import torch
from contracts import leash
from tensordict import TensorDict
from torch import Tensor

from conf.check import READ
from policies.scorer import Scores
from trainer.objectives import GRPOObjective
from trainer.surrogates import Bounds, binary_kl, kl_mask_term, token_ratio, tv_mask_term

MASKS = {"tv_mask": tv_mask_term, "kl_mask": kl_mask_term}


def logs(*chances: float) -> Tensor:
    return torch.tensor(chances, dtype=torch.float64).log()


def term_of(name: str, now: Tensor, then: Tensor, advantage: Tensor, **bounds: float) -> Tensor:
    return MASKS[name](now, then, token_ratio(now, then), advantage, Bounds(**bounds))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    ("then", "now", "advantage", "passes"),
    [  # chances of the token: of who sampled, and now; total variation 0.2 where it is far
        (0.5, 0.7, 1.0, False),  # up, and would go on up
        (0.5, 0.7, -1.0, True),  # up, and comes back
        (0.5, 0.3, -1.0, False),  # down, and would go on down
        (0.5, 0.3, 1.0, True),  # down, and comes back
        (0.5, 0.55, 1.0, True),  # near
        (0.5, 0.45, -1.0, True),
        (1e-5, 1e-2, 1.0, True),  # a rare token a thousand times likelier: clipping stops it at 1.2
        (0.99, 0.80, -1.0, False),  # a likely one at a ratio of 0.81, which clipping lets pass
        (0.5, 0.9, 0.0, True),  # nothing to learn, nothing to stop
    ],
)
def test_a_token_is_stopped_where_it_is_far_and_would_leave(name, then, now, advantage, passes):
    curr = logs(now).requires_grad_()
    a = torch.tensor([advantage], dtype=torch.float64)
    term = term_of(name, curr, logs(then), a)
    (slope,) = torch.autograd.grad(term.sum(), curr)
    want = -now / then * advantage if passes else 0.0
    assert term.item() == pytest.approx(want)
    assert slope.item() == pytest.approx(want), "d r / d log pi = r"


@pytest.mark.parametrize("name", MASKS)
def test_the_bound_is_the_last_distance_that_passes(name):
    """From 0.5 to 0.75: total variation 1/4; KL 0.5 log(2/3) + 0.5 log 2 = 0.143841."""
    key, at = {"tv_mask": ("tv", 0.25), "kl_mask": ("kl", 0.5 * math.log(4 / 3))}[name]
    then, now, one = logs(0.5), logs(0.75), torch.ones(1, dtype=torch.float64)
    assert term_of(name, now, then, one, **{key: at + 1e-9}).item() == pytest.approx(-1.5)
    assert term_of(name, now, then, one, **{key: at - 1e-9}).item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_digits_are_lost_near_0_and_1(dtype):
    """From log-probs as they are, in 60 digits."""
    getcontext().prec = 60
    near, far = [-1e-6, -3e-5, -1e-3, -0.1], [-0.6931, -0.7, -0.75, -3.0, -12.0, -90.0]
    pairs = [(a, b) for a in near + far for b in near + far if a != b]
    gen, curr = torch.tensor(pairs, dtype=dtype).unbind(-1)
    for x, y, got in zip(gen.tolist(), curr.tolist(), binary_kl(gen, curr).tolist(), strict=True):
        chance, now = Decimal(x).exp(), Decimal(y).exp()
        own, (rest, left) = Decimal(x) - Decimal(y), ((1 - chance).ln(), (1 - now).ln())
        want = chance * own + (1 - chance) * (rest - left)
        size = chance * abs(own) + (1 - chance) * (abs(rest) + abs(left))  # of what is added up
        assert abs(Decimal(got) - want) < 8 * Decimal(torch.finfo(dtype).eps) * size, (x, y)


def test_a_log_prob_that_is_rounded_to_0_gives_a_number():
    zero, near = torch.zeros(1), torch.tensor([-1e-3])
    assert binary_kl(zero, zero).item() == 0.0
    for got in (binary_kl(near, zero), binary_kl(zero, near), binary_kl(zero, near - 1e4)):
        assert torch.isfinite(got).all()
    assert binary_kl(near, zero).item() == pytest.approx(1e-3 * math.log(1e-3 * 2**23), rel=0.2)


def batch_of(then: Tensor, advantage: Tensor) -> TensorDict:
    td = TensorDict({"loss_mask": torch.tensor([[True, True, True, False]])}, [1])
    td["log_probs", "full"], td["advantage"] = then[None], advantage[None]
    return td


@pytest.mark.parametrize(("name", "key"), [("tv_mask", "tv_max"), ("kl_mask", "binary_kl_max")])
def test_what_is_logged_is_the_masked_share_and_the_largest_distance_of_a_kept_token(name, key):
    then, now = logs(0.5, 0.5, 0.4, 0.9), logs(0.75, 0.5, 0.1, 0.01)  # the last is not in the mask
    advantage = torch.ones(4, dtype=torch.float64)
    terms = GRPOObjective(surrogate=name, leash=leash(0.0))(
        Scores(now[None].requires_grad_()), batch_of(then, advantage)
    )
    assert terms.means["policy/clip_fraction"].tolist()[0][:3] == [1.0, 0.0, 0.0]
    kl = 0.4 * math.log(4) + 0.6 * math.log(0.6 / 0.9)
    most = {"tv_mask": 0.3, "kl_mask": kl}[name]
    assert terms.maxima[f"policy/{key}"].max().item() == pytest.approx(most)


@pytest.mark.parametrize("name", MASKS)
def test_the_mask_is_of_who_sampled_and_the_ratio_of_the_trainers_own_log_probs(name):
    """With ImportanceSampling the engine said 0.5 and the trainer 0.7, of which nothing moved."""
    engine, trainer = logs(0.5, 0.5, 0.5, 0.5), logs(0.7, 0.5, 0.5, 0.5)
    td = batch_of(engine, torch.ones(4, dtype=torch.float64))
    td["old_log_probs", "full"] = trainer[None]
    terms = GRPOObjective(surrogate=name, leash=leash(0.0))(Scores(trainer[None]), td)
    assert terms.loss["policy"].tolist()[0][:2] == [0.0, -1.0]


CHANGED = {"clip_low": 0.9, "clip_high": 3.0, "dual_clip": 1.3, "tv_bound": 0.9, "kl_bound": 5.0}


@pytest.mark.parametrize("name", READ)
def test_a_surrogate_reads_the_keys_of_its_row_and_no_others(name):
    """By what changes: the term, its gradient, what is logged."""
    draw = torch.Generator().manual_seed(5)
    then = -torch.rand(40, generator=draw, dtype=torch.float64) * 2 - 0.05
    now = (then + torch.randn(40, generator=draw, dtype=torch.float64)).clamp(max=-0.01)
    td = TensorDict({"loss_mask": torch.ones(4, 10, dtype=torch.bool)}, [4])
    td["log_probs", "full"] = then.view(4, 10)
    td["advantage"] = torch.randn(4, 10, generator=draw, dtype=torch.float64)

    def seen(**keys: float | str) -> list[Tensor]:
        curr = now.view(4, 10).clone().requires_grad_()
        made = GRPOObjective(surrogate=name, leash=leash(0.0), **keys)
        terms = made(Scores(curr), td)
        (slope,) = torch.autograd.grad(terms.loss["policy"].sum(), curr)
        return [terms.loss["policy"], slope, terms.means["policy/clip_fraction"]]

    plain = seen()
    for key, value in [*CHANGED.items(), ("ratio", "sequence")]:
        same = all(map(torch.equal, plain, seen(**{key: value})))
        assert same == (key not in READ[name]), key
