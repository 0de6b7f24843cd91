"""The entropy bonus: its gradient against a plain softmax, its controller, its cost."""

import pytest
import torch
from support.policies import leash, rollout
from support.updates import (
    HIGH,
    LOW,
    Record,
    double_policy,
    each_token,
    grad_of,
    gradient,
    make_update,
    prepared,
)
from torch import Tensor

from trainer import EntropyBonus, GRPOObjective

BONUS = 0.7


def objective() -> GRPOObjective:
    return GRPOObjective(clip_low=LOW, clip_high=HIGH, leash=leash(0.0))


def entropy_gradient(policy, batch) -> tuple[float, Tensor]:
    """Return the mean entropy over the loss mask and its gradient, by plain softmaxes."""
    each = [-(p.exp() * p).sum() for *_, p in each_token(policy.model, batch)]
    mean = sum(each) / len(each)
    policy.model.zero_grad()
    mean.backward()
    return float(mean.detach()), grad_of(policy)


def the_bonus_is_that_of_a_plain_softmax() -> None:
    policy = double_policy()
    batch, _ = prepared(policy)
    plain, before = gradient(policy, objective(), batch)
    paid, metrics = gradient(policy, objective(), batch, entropy_coeff=BONUS)
    entropy, want = entropy_gradient(policy, batch)
    assert ((plain - paid) - BONUS * want).norm() / (BONUS * want).norm() < 1e-5
    assert metrics["policy/entropy"] == pytest.approx(entropy, rel=1e-6)
    assert metrics["loss/entropy"] == pytest.approx(-BONUS * entropy, rel=1e-6)
    assert metrics["loss/total"] == pytest.approx(before["loss/total"] - BONUS * entropy)
    assert (before["policy/entropy_coeff"], metrics["policy/entropy_coeff"]) == (0.0, BONUS)


def test_the_bonus_adds_the_gradient_of_the_entropy():
    the_bonus_is_that_of_a_plain_softmax()


def test_without_a_bonus_the_entropy_has_no_graph():
    policy = double_policy()
    batch = rollout(policy, count=2)
    ids = (batch["tokens", "full"], batch["masks", "all_attention_mask"], batch["loss_mask"])
    seen = policy.scorer(*ids, entropy=True)
    learnt = policy.scorer(*ids, entropy=True, learn_entropy=True)
    assert (seen.entropy.requires_grad, learnt.entropy.requires_grad) == (False, True)
    torch.testing.assert_close(seen.entropy, learnt.entropy)


def test_the_coefficient_follows_the_target_in_bounded_steps_and_a_checkpoint_holds_it():
    bonus = EntropyBonus(0.99, target=1.0)
    assert [bonus.update(e) for e in (0.9, 1.0, 0.5)] == pytest.approx([0.995, 1.0, 1.0])
    assert [bonus.update(e) for e in (1.1, 3.0)] == [0.0, 0.0], "above the target none is paid"
    other = EntropyBonus(0.0, target=1.0)
    other.load_state_dict(bonus.state_dict())
    assert other.coeff == bonus.coeff == 0.0
    assert other.update(0.5) == bonus.update(0.5) == pytest.approx(0.995)
    low = EntropyBonus(0.005, target=1.0)
    assert [low.update(e) for e in (2.0, 2.0, 0.1)] == pytest.approx([0.0, 0.0, 0.005])
    fixed = EntropyBonus(0.3)
    assert [fixed.update(e) for e in (0.0, 9.0)] == [0.3, 0.3]


def test_the_update_steers_by_the_entropy_it_measured():
    policy = double_policy()
    batch, _ = prepared(policy)
    entropy, _ = entropy_gradient(policy, batch)
    for target, following in ((entropy + 0.1, 0.105), (entropy - 0.1, 0.0)):
        options = {"entropy_coeff": 0.1, "entropy_target": target}
        made = make_update(policy, objective(), Record(policy.model.parameters()), **options)
        seen = [made(batch.clone())["policy/entropy_coeff"] for _ in range(2)]
        assert seen == pytest.approx([0.1, following])
