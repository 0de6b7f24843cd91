"""The per-token maths against slow float64 loops and hand numbers; its finite ends."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from policies import token_distribution
from trainer import losses
from trainer.surrogates import Bounds, clipped_term, token_ratio

V = 5


def full_kl(curr, ref):
    return token_distribution.full_kl(curr.log_softmax(-1), ref.log_softmax(-1))


def randn(*shape, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def clip(curr: Tensor, gen: Tensor, advantage: Tensor) -> Tensor:
    return clipped_term(curr, gen, token_ratio(curr, gen), advantage, Bounds(0.2, 0.3))


def test_gradients_are_those_of_the_values():
    curr, gen, ref, advantage = (randn(4, 6, seed=i) for i in range(4))
    x = (0.3 * curr).requires_grad_()
    assert gradcheck(lambda c: token_ratio(c, gen), x)
    assert gradcheck(lambda c: clip(c, 0.3 * gen, advantage), x)
    for estimator in ("k1", "k2", "k3"):
        assert gradcheck(lambda c, e=estimator: losses.kl_term(c, ref, e), x)
    assert gradcheck(lambda c: full_kl(c, randn(3, V, seed=1)), randn(3, V).requires_grad_())


@given(size=st.sampled_from([30.0, -30.0, 1e2, -1e2, 1e4, -1e4]), sign=st.sampled_from([1.0, -1.0]))
def test_extreme_log_ratios_stay_finite(size, sign):
    curr = torch.tensor([size], requires_grad=True)
    zero = torch.zeros(1)
    terms = [clip(curr, zero, torch.tensor([sign]))]
    terms += [losses.kl_term(curr, zero, e) for e in ("k1", "k2", "k3")]
    terms.append(full_kl(torch.cat([curr, torch.zeros(2)]), torch.zeros(3)).unsqueeze(0))
    total = torch.cat(terms)
    assert torch.isfinite(total).all()
    total.sum().backward()
    assert torch.isfinite(curr.grad).all()


def test_clamps_are_where_documented():
    curr = torch.tensor([30.0, 19.0, -30.0], requires_grad=True)
    token_ratio(curr, torch.zeros(3)).log().sum().backward()
    assert curr.grad.tolist() == [0.0, pytest.approx(1.0), 0.0]
    curr = torch.tensor([30.0, -30.0], requires_grad=True)  # d = -30 and +30
    value = losses.kl_term(curr, torch.zeros(2), "k3")
    assert value.tolist() == pytest.approx([29.0, math.exp(20) - 21], rel=1e-6)
    value.sum().backward()
    assert curr.grad.tolist() == [pytest.approx(1.0), 0.0]  # still pulled back; nothing


def test_full_kl_is_the_sum_over_the_vocabulary_and_ignores_ruled_out_tokens():
    a, b = randn(3, V), randn(3, V, seed=1)
    for row in range(3):
        p, q = a[row].exp() / a[row].exp().sum(), b[row].exp() / b[row].exp().sum()
        want = sum(p[i] * math.log(p[i] / q[i]) for i in range(V))
        assert full_kl(a, b)[row].item() == pytest.approx(want.item())
    cut_a, cut_b = a.clone(), b.clone()
    cut_a[:, 3:], cut_b[:, 3:] = -math.inf, -math.inf
    cut_a.requires_grad_()
    value = full_kl(cut_a, cut_b)
    assert torch.allclose(value, full_kl(a[:, :3], b[:, :3]))
    value.sum().backward()
    assert torch.isfinite(cut_a.grad).all()


@pytest.mark.parametrize(
    ("aggregation", "first", "second"),
    [("token_mean", 0.25, 0.25), ("sequence_mean", 1 / 6, 0.5), ("constant", 0.1, 0.1)],
)
def test_weights_by_hand(aggregation, first, second):
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()
    got = losses.token_weights(mask, aggregation, total_tokens=4, total_rows=2, max_tokens=5)
    want = torch.tensor([[first] * 3 + [0], [0, second, 0, 0], [0] * 4])
    torch.testing.assert_close(got, want)
    nothing = {"total_tokens": 0, "total_rows": 0, "max_tokens": 5}
    assert not losses.token_weights(mask & False, aggregation, **nothing).any()


def slow_advantage(reward, reward_kl, mask, size, *, scale_by_std, to_go) -> list[list[float]]:
    rows, kls = reward.tolist(), reward_kl.tolist()
    out = [[0.0] * len(rows[0]) for _ in rows]
    for i, t in mask.nonzero().tolist():
        group = range(i // size * size, i // size * size + size)
        totals, at = [sum(rows[j]) for j in group], t if to_go else 0
        scale = statistics.stdev(totals) + 1e-4 if scale_by_std else 1.0
        task = (sum(rows[i][at:]) - statistics.mean(totals)) / scale
        out[i][t] = task + sum(kls[i][at:]) - statistics.mean(sum(kls[j]) for j in group)
    return out


@pytest.mark.parametrize("scale_by_std", [True, False])
@pytest.mark.parametrize("credit", ["trajectory", "return_to_go"])
def test_group_advantage_equals_a_slow_loop(scale_by_std, credit):
    mask = torch.rand(6, 5, generator=torch.Generator().manual_seed(0)) > 0.3
    reward, reward_kl = randn(6, 5) * mask, 0.1 * randn(6, 5, seed=1) * mask
    scale, to_go = losses.spread if scale_by_std else None, credit == "return_to_go"
    out = losses.group_advantage(reward, reward_kl, mask, 3, scale=scale, credit=credit)
    want = slow_advantage(reward, reward_kl, mask, 3, scale_by_std=scale_by_std, to_go=to_go)
    assert torch.allclose(out, torch.tensor(want, dtype=torch.float64))
