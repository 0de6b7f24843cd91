"""The per-token maths against the papers' formulas in slow float64 loops, and by enumeration."""

import itertools
import math

import pytest
import torch
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


def clip(curr: Tensor, gen: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return clipped_term(curr, gen, token_ratio(curr, gen), advantage, Bounds(low, high))


def batch(seed: int = 0, rows: int = 4, size: int = 6):
    """Return (curr, gen, ref, advantage, mask), all [B, T], rows of different lengths."""
    curr, gen, ref, advantage = (randn(rows, size, seed=seed + i) - 1 for i in range(4))
    mask = torch.arange(size) < torch.tensor([[6], [3], [1], [4]])
    mask[0, 0] = False
    return curr * 0.3, gen * 0.3, ref, advantage + 1, mask


# GRPO eq. 3 of arXiv 2402.03300, with the tokens' own advantages.


def slow_grpo(curr, gen, ref, advantage, mask, *, low, high, beta, per_row: bool) -> Tensor:
    rows, total, count = [], torch.zeros((), dtype=torch.float64), 0
    for i in range(len(curr)):
        terms = []
        for t in range(curr.shape[1]):
            if mask[i, t]:
                r = torch.exp(curr[i, t] - gen[i, t])
                clipped = min(max(r, torch.tensor(1 - low)), torch.tensor(1 + high))
                surrogate = min(r * advantage[i, t], clipped * advantage[i, t])
                d = ref[i, t] - curr[i, t]
                terms.append(surrogate - beta * (torch.exp(d) - d - 1))
        if terms:
            rows.append(sum(terms) / len(terms))
            total, count = total + sum(terms), count + len(terms)
    return -(sum(rows) / len(rows)) if per_row else -total / count


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
def test_grpo_loss_and_gradient_equal_the_paper(aggregation):
    curr, gen, ref, advantage, mask = batch()
    low, high, beta = 0.2, 0.28, 0.04
    tokens, rows = mask.sum(), mask.any(-1).sum()
    weight = losses.token_weights(mask, aggregation, total_tokens=tokens, total_rows=rows)
    x = curr.clone().requires_grad_()
    term = clip(x, gen, advantage, low, high)
    loss = (weight * (term + beta * losses.kl_term(x, ref, "k3"))).sum()
    loss.backward()
    y = curr.clone().requires_grad_()
    per_row = aggregation == "sequence_mean"
    want = slow_grpo(y, gen, ref, advantage, mask, low=low, high=high, beta=beta, per_row=per_row)
    want.backward()
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)  # weights are float32
    assert torch.allclose(x.grad, y.grad, rtol=1e-6, atol=1e-9)


def test_gradients_are_those_of_the_values():
    curr, gen, ref, advantage, _ = batch()
    x = curr.requires_grad_()
    assert gradcheck(lambda c: token_ratio(c, gen), x)
    assert gradcheck(lambda c: clip(c, gen, advantage, 0.2, 0.3), x)
    for estimator in ("k1", "k2", "k3"):
        assert gradcheck(lambda c, e=estimator: losses.kl_term(c, ref, e), x)
    logits = randn(3, V).requires_grad_()
    assert gradcheck(lambda c: full_kl(c, randn(3, V, seed=1)), logits)


@pytest.mark.parametrize("size", [100.0, 1000.0, -100.0, -1000.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_log_ratios_stay_finite(size, advantage):
    curr = torch.tensor([size], requires_grad=True)
    zero, a = torch.zeros(1), torch.tensor([advantage])
    terms = [clip(curr, zero, a, 0.2, 0.2)]
    terms += [losses.kl_term(curr, zero, e) for e in ("k1", "k2", "k3")]
    logits = torch.cat([curr, torch.zeros(2)])
    terms.append(full_kl(logits, torch.zeros(3)).unsqueeze(0))
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
    assert value[0].item() == pytest.approx(29.0)  # exp(-30) + 30 - 1
    assert value[1].item() == pytest.approx(math.exp(20) - 21, rel=1e-6)
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


def test_unknown_names_are_value_errors():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        losses.kl_term(x, x, "full")
    with pytest.raises(ValueError, match="aggregation"):
        losses.token_weights(x.bool(), "mean", total_tokens=1, total_rows=1)
    with pytest.raises(ValueError, match="max_tokens"):
        losses.token_weights(x.bool(), "constant", total_tokens=1, total_rows=1)
    with pytest.raises(ValueError, match="credit"):
        losses.group_advantage(x, x, x.bool(), 2, credit="turn")


# Which KL may act where: expected gradients by enumeration of all sequences (design.md section 4).


class Tabular:
    """A policy over one or two tokens of a vocabulary of 5: logits [V], then [V, V]."""

    def __init__(self, seed: int, steps: int, *, near: "Tabular | None" = None, eps: float = 0.0):
        sizes = [(1, V)] if steps == 1 else [(1, V), (V, V)]
        self.params = [randn(*s, seed=seed + i) for i, s in enumerate(sizes)]
        if near is not None:
            self.params = [n + eps * p for n, p in zip(near.params, self.params, strict=True)]
        self.params = [p.clone().requires_grad_() for p in self.params]
        self.sequences = torch.tensor(list(itertools.product(range(V), repeat=steps)))  # [N, S]

    def logits(self) -> Tensor:
        """[N, S, V] of all sequences."""
        first = self.params[0].expand(len(self.sequences), V)
        rest = [self.params[1][self.sequences[:, 0]]] if len(self.params) == 2 else []
        return torch.stack([first, *rest], 1)

    def log_probs(self) -> Tensor:
        """[N, S]."""
        table = self.logits().log_softmax(-1)
        return table.gather(-1, self.sequences.unsqueeze(-1)).squeeze(-1)

    def grad(self, loss: Tensor) -> Tensor:
        grads = torch.autograd.grad(loss, self.params)
        return torch.cat([g.flatten() for g in grads])


def chance(policy: Tabular) -> Tensor:
    """Probability of each sequence, [N, 1], no gradient."""
    return policy.log_probs().detach().sum(-1, keepdim=True).exp()


def reverse_kl(policy: Tabular, ref: Tabular) -> Tensor:
    """KL(policy || ref) of whole sequences, by its definition."""
    p, q = policy.log_probs().sum(-1), ref.log_probs().detach().sum(-1)
    return (p.exp() * (p - q)).sum()


def per_state(policy: Tabular, ref: Tabular, direction: str) -> Tensor:
    """Sum over steps of the KL in each state, the visits of the states held fixed."""
    p, q = policy.logits().log_softmax(-1), ref.logits().detach().log_softmax(-1)
    value = p.exp() * (p - q) if direction == "reverse" else q.exp() * (q - p)
    return (chance(policy) * value.sum(-1)).sum()


def in_loss(policy: Tabular, ref: Tabular, estimator: str) -> Tensor:
    if estimator == "full":
        terms = full_kl(policy.logits(), ref.logits().detach())
    else:
        terms = losses.kl_term(policy.log_probs(), ref.log_probs().detach(), estimator)
    return policy.grad((chance(policy) * terms).sum())


def in_reward(policy: Tabular, ref: Tabular, estimator: str) -> Tensor:
    """Expected gradient of -E[reward_kl] by the policy term, all tokens credited with the total."""
    with torch.no_grad():
        if estimator == "full":
            terms = full_kl(policy.logits(), ref.logits())
        else:
            terms = losses.kl_term(policy.log_probs(), ref.log_probs(), estimator)
    advantage = -terms.sum(-1, keepdim=True).expand_as(terms)
    curr = policy.log_probs()
    term = clip(curr, curr.detach(), advantage, 0.2, 0.2)
    return policy.grad((chance(policy) * term).sum())


@pytest.mark.parametrize("steps", [1, 2])
def test_k1_in_the_reward_is_the_reverse_kl(steps):
    policy, ref = Tabular(0, steps), Tabular(10, steps)
    want = policy.grad(reverse_kl(policy, ref))
    assert torch.allclose(in_reward(policy, ref, "k1"), want)
    assert want.norm() > 0.1


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(
    ("estimator", "direction"), [("k2", "reverse"), ("full", "reverse"), ("k3", "forward")]
)
def test_in_the_loss_each_estimator_has_its_gradient(steps, estimator, direction):
    policy, ref = Tabular(0, steps), Tabular(10, steps)
    want = policy.grad(per_state(policy, ref, direction))
    assert torch.allclose(in_loss(policy, ref, estimator), want)
    other = "forward" if direction == "reverse" else "reverse"
    assert not torch.allclose(want, policy.grad(per_state(policy, ref, other)), atol=1e-2)
    if steps == 1 and direction == "reverse":
        assert torch.allclose(want, policy.grad(reverse_kl(policy, ref)))


@pytest.mark.parametrize("steps", [1, 2])
def test_k1_in_the_loss_has_no_gradient(steps):
    grad = in_loss(Tabular(0, steps), Tabular(10, steps), "k1")
    assert grad.abs().max() < 1e-12


@pytest.mark.parametrize("estimator", ["k2", "k3", "full"])
def test_in_the_reward_the_others_vanish_to_first_order_near_the_reference(estimator):
    ref = Tabular(10, 2)
    norms, leash = [], []
    for eps in (1e-2, 1e-3):
        policy = Tabular(0, 2, near=ref, eps=eps)
        norms.append(in_reward(policy, ref, estimator).norm().item())
        leash.append(in_reward(policy, ref, "k1").norm().item())
    assert leash[0] / leash[1] == pytest.approx(10, rel=0.1)  # first order
    assert norms[1] < 0.02 * leash[1]
    assert norms[0] / norms[1] == pytest.approx(100, rel=0.2)  # second order


def test_full_in_the_reward_says_nothing_about_its_own_token():
    assert in_reward(Tabular(0, 1), Tabular(10, 1), "full").abs().max() < 1e-12


@pytest.mark.parametrize("estimator", ["k1", "k3", "full"])
def test_expected_value_is_the_kl(estimator):
    policy, ref = Tabular(0, 2), Tabular(10, 2)
    with torch.no_grad():
        if estimator == "full":
            terms = full_kl(policy.logits(), ref.logits())
        else:
            terms = losses.kl_term(policy.log_probs(), ref.log_probs(), estimator)
        value = (chance(policy) * terms).sum()
        assert value.item() == pytest.approx(reverse_kl(policy, ref).item())


@pytest.mark.parametrize("credit", ["trajectory", "return_to_go"])
def test_group_advantage_of_the_kl_reward_is_the_reverse_kl(credit):
    """All pairs of sequences: a mean over G that holds the own sample keeps (G - 1)/G of it."""
    policy, ref = Tabular(0, 2), Tabular(10, 2)
    curr = policy.log_probs()
    reward_kl = -losses.kl_term(curr, ref.log_probs(), "k1").detach()
    i, j = (x.flatten() for x in torch.meshgrid(*[torch.arange(V * V)] * 2, indexing="ij"))
    rows = torch.stack([i, j], 1).flatten()  # groups of 2, adjacent
    mask = torch.ones(len(rows), 2).bool()
    zero = torch.zeros(len(rows), 2).double()
    advantage = losses.group_advantage(zero, reward_kl[rows], mask, 2, credit=credit)
    p = chance(policy)
    weight = (p[i] * p[j]).repeat_interleave(2, 0) / 2  # mean over the group
    grad = policy.grad(-(weight * advantage * curr[rows]).sum())
    want = policy.grad(reverse_kl(policy, ref))
    assert torch.allclose(grad, want / 2)


# Weights.


def test_weights_by_hand():
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()
    args = {"total_tokens": 4, "total_rows": 2}
    token = losses.token_weights(mask, "token_mean", **args)
    assert token.tolist() == [[0.25, 0.25, 0.25, 0], [0, 0.25, 0, 0], [0, 0, 0, 0]]
    sequence = losses.token_weights(mask, "sequence_mean", **args)
    third = pytest.approx([1 / 6, 1 / 6, 1 / 6, 0])
    assert sequence.tolist() == [third, [0, 0.5, 0, 0], [0, 0, 0, 0]]
    constant = losses.token_weights(mask, "constant", max_tokens=5, **args)
    tenth = pytest.approx([0.1, 0.1, 0.1, 0])
    assert constant.tolist() == [tenth, pytest.approx([0, 0.1, 0, 0]), [0, 0, 0, 0]]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_an_empty_mask_weighs_nothing(aggregation):
    mask = torch.zeros(2, 3).bool()
    out = losses.token_weights(mask, aggregation, total_tokens=0, total_rows=0, max_tokens=4)
    assert out.tolist() == [[0.0] * 3] * 2


# Group advantage.


def slow_advantage(reward, reward_kl, mask, size, *, scale_by_std, to_go) -> list[list[float]]:
    out = []
    for i in range(len(reward)):
        group = range(i // size * size, i // size * size + size)
        totals = [sum(reward[j].tolist()) for j in group]
        kls = [sum(reward_kl[j].tolist()) for j in group]
        mean, mean_kl = sum(totals) / size, sum(kls) / size
        std = math.sqrt(sum((x - mean) ** 2 for x in totals) / (size - 1))
        scale = std + 1e-4 if scale_by_std else 1.0
        row = []
        for t in range(reward.shape[1]):
            at = t if to_go else 0
            task, kl = sum(reward[i, at:].tolist()), sum(reward_kl[i, at:].tolist())
            row.append(((task - mean) / scale + kl - mean_kl) * float(mask[i, t]))
        out.append(row)
    return out


@pytest.mark.parametrize("scale_by_std", [True, False])
@pytest.mark.parametrize("credit", ["trajectory", "return_to_go"])
def test_group_advantage_equals_a_slow_loop(scale_by_std, credit):
    mask = torch.rand(6, 5, generator=torch.Generator().manual_seed(0)) > 0.3
    reward, reward_kl = randn(6, 5) * mask, 0.1 * randn(6, 5, seed=1) * mask
    out = losses.group_advantage(
        reward, reward_kl, mask, 3, scale=losses.spread if scale_by_std else None, credit=credit
    )
    to_go = credit == "return_to_go"
    want = slow_advantage(reward, reward_kl, mask, 3, scale_by_std=scale_by_std, to_go=to_go)
    assert torch.allclose(out, torch.tensor(want, dtype=torch.float64))
