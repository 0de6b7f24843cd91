"""The entropy bonus: its gradient against a plain softmax, its controller, its cost."""

import pytest
import torch
from contracts import leash, rollout
from steps import HIGH, LOW, Record, double_policy, gradient, make_update, prepared, tables
from torch import Tensor

from trainer import EntropyBonus, GRPOObjective

policy = pytest.fixture(double_policy)
BONUS = 0.7


def objective() -> GRPOObjective:
    return GRPOObjective(clip_low=LOW, clip_high=HIGH, leash=leash(0.0))


def entropy_gradient(policy, batch) -> tuple[float, Tensor]:
    """Return the mean entropy over the loss mask and its gradient, by plain softmaxes."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for i in range(batch.batch_size[0]):
        real = batch["masks", "all_attention_mask"][i]
        ids, keep = batch["tokens", "full"][i][real], batch["loss_mask"][i][real]
        p = tables(policy.model, ids).exp()
        for t in range(1, len(ids)):
            if keep[t]:
                total = total - (p[t - 1] * p[t - 1].log()).sum()
                count += 1
    policy.model.zero_grad()
    (total / count).backward()
    grads = [x.grad.flatten() for x in policy.model.parameters()]
    return float(total.detach()) / count, torch.cat(grads)


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
    assert "loss/entropy" not in before


def test_the_bonus_adds_the_gradient_of_the_entropy():
    the_bonus_is_that_of_a_plain_softmax()


def test_without_a_bonus_the_entropy_has_no_graph(policy):
    batch = rollout(policy, count=2)
    ids = (batch["tokens", "full"], batch["masks", "all_attention_mask"], batch["loss_mask"])
    seen = policy.scorer(*ids, entropy=True)
    learnt = policy.scorer(*ids, entropy=True, learn_entropy=True)
    assert not seen.entropy.requires_grad
    assert learnt.entropy.requires_grad
    torch.testing.assert_close(seen.entropy, learnt.entropy)
    assert EntropyBonus(0.0)(learnt) == {}


def test_the_coefficient_follows_the_target_in_bounded_steps():
    bonus = EntropyBonus(0.99, target=1.0)
    assert [bonus.update(e) for e in (0.9, 1.0, 0.5)] == pytest.approx([0.995, 1.0, 1.0])
    assert [bonus.update(e) for e in (1.1, 3.0)] == [0.0, 0.0], "above the target none is paid"
    assert bonus.update(0.5) == pytest.approx(0.995)
    low = EntropyBonus(0.005, target=1.0)
    assert [low.update(e) for e in (2.0, 2.0, 0.1)] == pytest.approx([0.0, 0.0, 0.005])
    fixed = EntropyBonus(0.3)
    assert [fixed.update(e) for e in (0.0, 9.0)] == [0.3, 0.3]


def test_a_checkpoint_takes_up_where_it_stopped():
    first = EntropyBonus(0.1, target=1.0)
    first.update(5.0)
    second = EntropyBonus(0.0, target=1.0)
    second.load_state_dict(first.state_dict())
    assert second.coeff == first.coeff == 0.0
    assert second.update(0.5) == first.update(0.5) == pytest.approx(0.1)


def test_the_update_steers_by_the_entropy_it_measured(policy):
    batch, _ = prepared(policy)
    entropy, _ = entropy_gradient(policy, batch)
    for target, following in ((entropy + 0.1, 0.105), (entropy - 0.1, 0.0)):
        options = {"entropy_coeff": 0.1, "entropy_target": target}
        optimizer = Record(policy.model.parameters())
        made = make_update(policy, objective(), optimizer, **options)
        assert made(batch.clone())["policy/entropy_coeff"] == 0.1
        assert made(batch.clone())["policy/entropy_coeff"] == pytest.approx(following)


def test_impossible_coefficients_are_refused():
    with pytest.raises(ValueError, match="entropy coefficient"):
        EntropyBonus(2.0, target=1.0)
