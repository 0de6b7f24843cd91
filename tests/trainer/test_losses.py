"""The per-token maths against slow float64 loops and hand numbers; its finite ends.

Loss, bounds and gradient against the papers: tests/trainer/test_algorithms.py.
"""

import math
import statistics
from decimal import Decimal, getcontext

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.policies import leash
from tensordict import TensorDict
from torch import Tensor

from policies.scorer import Scores
from policies.token_distribution import Head, TokenDistribution
from trainer import baselines
from trainer.kl.estimators import ESTIMATORS, TokenKL, k3
from trainer.objectives import GRPOObjective
from trainer.surrogates import (
    SURROGATES,
    ClipRange,
    binary_kl,
    clipped_term,
    token_ratio,
)


def divergence(curr: Tensor, ref: Tensor) -> Tensor:
    ids, head = torch.zeros(1, 1, dtype=torch.int64), Head(torch.eye(3), None, None)
    dists = [TokenDistribution(head, logits[None], ids == 0) for logits in (curr, ref)]
    return dists[0].scores(ids, reference=dists[1]).divergence[0]


def randn(*shape, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def clip(curr: Tensor, gen: Tensor, advantage: Tensor) -> Tensor:
    return clipped_term(curr, gen, token_ratio(curr, gen), advantage, ClipRange(0.2, 0.3))


@given(size=st.sampled_from([30.0, -30.0, 1e2, -1e2, 1e4, -1e4]), sign=st.sampled_from([1.0, -1.0]))
def test_extreme_log_ratios_stay_finite(size, sign):
    curr = torch.tensor([size], requires_grad=True)
    zero = torch.zeros(1)
    terms = [clip(curr, zero, torch.tensor([sign]))]
    token = TokenKL(curr - zero, curr, zero)
    terms += [own.term(token) for own in ESTIMATORS.values() if own.needs != "vocabulary"]
    terms.append(divergence(torch.cat([curr, torch.zeros(2)]), torch.zeros(3)))
    total = torch.cat(terms)
    assert torch.isfinite(total).all()
    total.sum().backward()
    assert torch.isfinite(curr.grad).all()


def test_clamps_are_where_documented():
    curr = torch.tensor([30.0, 19.0, -30.0], requires_grad=True)
    token_ratio(curr, torch.zeros(3)).log().sum().backward()
    assert curr.grad.tolist() == [0.0, pytest.approx(1.0), 0.0]
    curr = torch.tensor([30.0, -30.0], requires_grad=True)  # d = -30 and +30
    value = k3(curr)
    assert value.tolist() == pytest.approx([29.0, math.exp(20) - 21], rel=1e-6)
    value.sum().backward()
    assert curr.grad.tolist() == [pytest.approx(1.0), 0.0]  # still pulled back; nothing


def slow_advantage(reward, reward_kl, mask, size, *, scale_by_std, to_go) -> list[list[float]]:
    rows, kls = reward.tolist(), reward_kl.tolist()
    out = [[0.0] * len(rows[0]) for _ in rows]
    tokens = [row.nonzero().flatten().tolist() for row in mask]
    for i, t in mask.nonzero().tolist():
        group = range(i // size * size, i // size * size + size)
        totals, at = [sum(rows[j]) for j in group], dict.fromkeys(group, 0)
        if to_go:  # from the token at the same place, or the last, of each row
            place = tokens[i].index(t)
            at = {j: tokens[j][min(place, len(tokens[j]) - 1)] for j in group}
        scale = statistics.stdev(totals) + 1e-4 if scale_by_std else 1.0
        task = sum(rows[i][at[i] :]) - statistics.mean(sum(rows[j][at[j] :]) for j in group)
        kl = sum(kls[i][at[i] :]) - statistics.mean(sum(kls[j][at[j] :]) for j in group)
        out[i][t] = task / scale + kl
    return out


@pytest.mark.parametrize("scale_by_std", [True, False])
@pytest.mark.parametrize("credit", ["trajectory", "return_to_go"])
def test_group_advantage_equals_a_slow_loop(scale_by_std, credit):
    mask = torch.rand(6, 5, generator=torch.Generator().manual_seed(0)) > 0.3
    reward, reward_kl = randn(6, 5) * mask, 0.1 * randn(6, 5, seed=1) * mask
    scale, to_go = baselines.spread if scale_by_std else None, credit == "return_to_go"
    out = baselines.group_advantage(reward, reward_kl, mask, 3, scale=scale, credit=credit)
    want = slow_advantage(reward, reward_kl, mask, 3, scale_by_std=scale_by_std, to_go=to_go)
    assert torch.allclose(out, torch.tensor(want, dtype=torch.float64))


# Divergence-bounded masks (DPPO).


MASKS = ("tv_mask", "kl_mask")


def logs(*chances: float) -> Tensor:
    return torch.tensor(chances, dtype=torch.float64).log()


def term_of(name: str, now: Tensor, then: Tensor, advantage: Tensor, **bounds: float) -> Tensor:
    r = token_ratio(now, then)
    return SURROGATES[name].term(now, then, r, advantage, ClipRange(**bounds))


@pytest.mark.parametrize("name", MASKS)
@given(
    then=st.floats(0.001, 0.999),
    now=st.floats(0.001, 0.999),
    advantage=st.sampled_from([-1.0, 0.0, 2.0]),
    most=st.floats(0.0, 0.5),
)
def test_a_token_is_stopped_where_it_is_far_and_would_leave(name, then, now, advantage, most):
    rest = (1 - then) * math.log((1 - then) / (1 - now))
    distance = {"tv_mask": abs(now - then), "kl_mask": then * math.log(then / now) + rest}[name]
    assume(abs(distance - most) > 1e-9)
    curr, key = logs(now).requires_grad_(), {"tv_mask": "tv", "kl_mask": "kl"}[name]
    term = term_of(name, curr, logs(then), torch.tensor([advantage]).double(), **{key: most})
    (slope,) = torch.autograd.grad(term.sum(), curr)
    stopped = distance > most and advantage * (now - then) > 0
    want = 0.0 if stopped else -now / then * advantage
    assert term.item() == pytest.approx(want)
    assert slope.item() == pytest.approx(want), "d r / d log pi = r"


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


@pytest.mark.parametrize("name", SURROGATES)
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
        assert same == (key not in SURROGATES[name].keys), key
