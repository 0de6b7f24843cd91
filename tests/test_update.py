"""The update: its gradient against a loop over tokens in float64, and when it refuses to step."""

import math
from collections.abc import Iterator

import pytest
import torch
from contracts import G, Words, leash, make_policy, one_process, rollout
from steps import (
    COEFF,
    HIGH,
    LOW,
    Record,
    double_policy,
    grad_of,
    gradient,
    make_update,
    prepared,
    scaled,
    tables,
)
from tensordict import TensorDict
from torch import Tensor

from envs.chat_env import ChatEnv
from envs.transforms import RetrieveKL
from trainer.advantage import GroupAdvantage
from trainer.demonstrations import Demonstrations
from trainer.objectives import GRPOObjective, SFTObjective, Terms
from trainer.optimizer import make_optimizer, make_schedule
from trainer.runtime import Runtime
from trainer.update import Update, split_rows

policy = pytest.fixture(double_policy)


def slow_grpo(policy, reference, batch, aggregation: str, estimator: str | None) -> float:
    """Return the loss of the papers, token by token, and leave its gradient in the model."""
    losses: list[list[Tensor]] = []
    for i in range(batch.batch_size[0]):
        real = batch["masks", "all_attention_mask"][i]
        ids, keep = batch["tokens", "full"][i][real], batch["loss_mask"][i][real]
        gen, advantage = batch["log_probs", "full"][i][real], batch["advantage"][i][real]
        mine = tables(policy.model, ids)
        with torch.no_grad():
            theirs = tables(reference.model, ids)
        row = []
        for t in range(1, len(ids)):
            if not keep[t]:
                continue
            curr, ref = mine[t - 1, ids[t]], theirs[t - 1, ids[t]]
            r, a = (curr - gen[t]).exp(), advantage[t]
            loss = -torch.minimum(r * a, r.clamp(1 - LOW, 1 + HIGH) * a)
            if estimator == "k2":
                loss = loss + COEFF * (curr - ref) ** 2 / 2
            elif estimator in ("k3", "k3_ratio"):
                times = r if estimator == "k3_ratio" else 1
                loss = loss + COEFF * times * ((ref - curr).exp() - (ref - curr) - 1)
            elif estimator == "full":
                p, q = mine[t - 1], theirs[t - 1]
                loss = loss + COEFF * (p.exp() * (p - q)).sum()
            row.append(loss)
        losses.append(row)
    rows = [row for row in losses if row]
    if aggregation == "token_mean":
        total = sum(sum(row) for row in rows) / sum(len(row) for row in rows)
    elif aggregation == "sequence_mean":
        total = sum(sum(row) / len(row) for row in rows) / len(rows)
    else:
        total = sum(sum(row) for row in rows) / (len(rows) * 12)
    policy.model.zero_grad()
    total.backward()
    return float(total.detach())


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("estimator", ["k2", "k3", "full", "k3_ratio"])
def test_grpo_gradient_is_that_of_a_loop_over_tokens(policy, aggregation, estimator):
    batch, reference = prepared(policy)
    batch["loss_mask"][1] = False  # a row that counts for nothing
    own = leash(COEFF, estimator=estimator)
    objective = GRPOObjective(clip_low=LOW, clip_high=HIGH, leash=own)
    options = {"aggregation": aggregation, "reference": reference.scorer}
    got, metrics = gradient(policy, objective, batch, micro_batch_tokens=120, **options)
    loss = slow_grpo(policy, reference, batch, aggregation, estimator)
    want = grad_of(policy)
    assert (got - want).norm() / want.norm() < 1e-5
    assert metrics["loss/total"] == pytest.approx(loss, abs=1e-5)
    assert metrics["loss/total"] == pytest.approx(metrics["loss/policy"] + metrics["loss/kl"])
    assert 0 < metrics["policy/clip_fraction"] < 1
    assert metrics["optim/grad_norm"] == pytest.approx(float(want.norm()), rel=1e-5)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("mask", ["assistant", "prompt"])
def test_sft_gradient_is_that_of_a_loop_over_tokens(policy, aggregation, mask):
    parts = {"task": Words(), "env": ChatEnv(Words()), "policy": policy, "runtime": one_process()}
    batch = Demonstrations(**parts, size=4, mask=mask)(0)
    got, metrics = gradient(policy, SFTObjective(), batch, aggregation=aggregation)
    rows = []
    for i in range(4):
        real = batch["masks", "all_attention_mask"][i]
        ids, keep = batch["tokens", "full"][i][real], batch["loss_mask"][i][real]
        table = tables(policy.model, ids)
        rows.append([-table[t - 1, ids[t]] for t in range(1, len(ids)) if keep[t]])
    if aggregation == "token_mean":
        loss = sum(sum(r) for r in rows) / sum(len(r) for r in rows)
    else:
        loss = sum(sum(r) / len(r) for r in rows) / 4
    policy.model.zero_grad()
    loss.backward()
    assert (got - grad_of(policy)).norm() / grad_of(policy).norm() < 1e-5
    assert metrics["loss/total"] == pytest.approx(float(loss.detach()), abs=1e-5)


def drifts(policy, batch) -> Iterator[tuple[TensorDict, int, float, Tensor]]:
    """Yield row, place t, log curr - log gen and log p(. | tokens < t) of each kept token."""
    for row in batch.unbind(0):
        places = row["masks", "all_attention_mask"].nonzero().squeeze(-1).tolist()
        ids = row["tokens", "full"][places]
        with torch.no_grad():
            table = tables(policy.model, ids)
        for number, t in enumerate(places):
            if row["loss_mask"][t]:
                drift = table[number - 1, ids[number]] - row["log_probs", "full"][t]
                yield row, t, float(drift), table[number - 1]


def test_metrics_are_means_over_the_loss_mask(policy):
    # Not as in TorchRL, which averages over padding and prompt too.
    batch, _ = prepared(policy)
    objective = GRPOObjective(clip_low=LOW, clip_high=HIGH, leash=leash(0.0))
    _, metrics = gradient(policy, objective, batch)
    moved, entropies, clipped = [], [], []
    for row, t, drift, after in drifts(policy, batch):
        moved.append(-drift)
        entropies.append(-float((after.exp() * after).sum()))
        r, a = math.exp(drift), float(row["advantage"][t])
        clipped.append((r > 1 + HIGH and a > 0) or (r < 1 - LOW and a < 0))
    count = len(moved)
    assert metrics["kl/behaviour"] == pytest.approx(sum(moved) / count, abs=1e-5)
    assert metrics["policy/entropy"] == pytest.approx(sum(entropies) / count, abs=1e-5)
    assert metrics["policy/clip_fraction"] == pytest.approx(sum(clipped) / count)
    assert metrics["policy/ratio_max"] == pytest.approx(math.exp(-min(moved)), rel=1e-4)
    assert "loss/kl" not in metrics


def test_the_gradient_is_clipped_to_its_limit(policy):
    batch, _ = prepared(policy)
    objective = GRPOObjective(leash=leash(COEFF))
    whole, metrics = gradient(policy, objective, batch)
    limit = float(whole.norm()) / 4
    cut, same = gradient(policy, objective, batch, max_grad_norm=limit)
    torch.testing.assert_close(cut, whole / 4, rtol=1e-4, atol=1e-9)
    assert same["optim/grad_norm"] == pytest.approx(metrics["optim/grad_norm"])


class Poisoned(GRPOObjective):
    """An objective whose first call gives an infinite loss."""

    factor = math.inf

    def __call__(self, scores, batch) -> Terms:
        terms = super().__call__(scores, batch)
        loss = {name: value * self.factor for name, value in terms.loss.items()}
        self.factor = 1.0
        return Terms(loss, terms.means, terms.maxima)


def test_a_non_finite_step_is_skipped_counted_and_harmless(policy):
    batch, _ = prepared(policy)
    before = [p.detach().clone() for p in policy.model.parameters()]
    optimizer = make_optimizer(policy.model, lr=0.1)
    objective = Poisoned(leash=leash(COEFF))
    update = make_update(policy, objective, optimizer, lr=0.1, max_grad_norm=1.0)
    assert update(batch.clone())["optim/skipped_steps"] == update.step == 1
    for p, old in zip(policy.model.parameters(), before, strict=True):
        assert torch.equal(p, old)
    assert not optimizer.state
    assert update(batch.clone())["optim/skipped_steps"] == 1, "nothing of it is left"
    assert all(p.isfinite().all() for p in policy.model.parameters())
    assert not torch.equal(next(policy.model.parameters()), before[0])


def test_an_empty_minibatch_adds_nothing_to_a_mean_and_a_mean_over_nothing_is_absent(policy):
    batch, _ = prepared(policy)
    objective = GRPOObjective(leash=leash(COEFF))
    alone = gradient(policy, objective, batch[G:])[1]
    batch["loss_mask"][:G] = False
    beside = gradient(policy, objective, batch, minibatches=2)[1]
    assert beside.pop("optim/skipped_steps") == 1 + alone.pop("optim/skipped_steps")
    assert beside == pytest.approx(alone, rel=1e-6)
    batch["loss_mask"][:] = False  # all of it is skipped
    optimizer = Record(policy.model.parameters())
    left = make_update(policy, objective, optimizer)(batch)
    assert not optimizer.grads
    assert left["optim/skipped_steps"] == 1
    assert {name for name in left if name.startswith(("loss/", "kl/"))} == {"loss/total"}


def test_mismatch_is_measured_before_the_first_step_also_after_an_empty_minibatch(policy):
    batch, _ = prepared(policy)
    objective = GRPOObjective(leash=leash(COEFF))
    alone = gradient(policy, objective, batch[G:])[1]
    batch["loss_mask"][:G] = False
    options = {"lr": 1.0, "minibatches": 2, "epochs": 2}
    moved = make_update(policy, objective, Record(policy.model.parameters(), lr=1.0), **options)
    metrics = moved(batch)
    assert metrics["kl/mismatch"] == pytest.approx(alone["kl/mismatch"], rel=1e-6)
    assert metrics["kl/behaviour_k3"] != pytest.approx(alone["kl/behaviour_k3"], rel=0.01)


def test_epochs_and_minibatches_make_steps_of_whole_groups_at_the_rate_of_their_number(policy):
    batch, _ = prepared(policy)
    first = Record(policy.model.parameters())
    make_update(policy, GRPOObjective(leash=leash(COEFF)), first)(batch[:G].clone())
    optimizer = Record(policy.model.parameters())
    rate = make_schedule("linear", lr=0.1, warmup=2, total=8)
    options = {"lr": rate, "epochs": 2, "minibatches": 2}
    update = make_update(policy, GRPOObjective(leash=leash(COEFF)), optimizer, **options)
    metrics = update(batch.clone())
    assert update.step == 4
    want = [0.05, 0.1, 0.1, 0.1 * 5 / 6]
    assert optimizer.rates == pytest.approx(want)
    assert metrics["optim/lr"] == pytest.approx(sum(want[2:]) / 2), "of the last epoch"
    update(batch.clone())
    assert optimizer.rates[4:] == pytest.approx([0.1 * (8 - s) / 6 for s in (4, 5, 6, 7)])
    # Each minibatch normalises over itself: one prompt's gradient alone.
    torch.testing.assert_close(first.grads[0], optimizer.grads[0], rtol=1e-5, atol=1e-8)


def stopping(policy, target_kl, *, runtime=None) -> tuple[Update, Record]:
    """Return an update of 2 epochs x 2 minibatches on a linear schedule of 3 iterations."""
    optimizer = Record(policy.model.parameters())
    options = {"lr": make_schedule("linear", lr=0.3, total=12), "epochs": 2, "minibatches": 2}
    options |= {"runtime": runtime, "target_kl": target_kl}
    return make_update(policy, GRPOObjective(leash=leash(COEFF)), optimizer, **options), optimizer


def fresh(policy) -> TensorDict:
    """Return a batch with advantages that the policy has just sampled."""
    batch = rollout(policy, count=4)
    return GroupAdvantage(group_size=G, leash=leash(COEFF))(
        RetrieveKL(ref_model=scaled(policy, 0.95), add_to_reward=False)(batch)
    )


def test_an_iteration_ends_before_the_step_that_finds_the_policy_too_far(policy):
    batch = fresh(policy)
    update, steps = stopping(policy, 1e-7)
    metrics = update(batch.clone())
    assert len(steps.grads) == 1, "the first is taken, by the policy that sampled"
    assert metrics["optim/early_stopped"] == 3 / 4
    assert all(p.grad is None for p in policy.model.parameters())
    first, second = (batch[rows] for rows in split_rows(batch, 2))  # second: its step is left out
    terms = [math.exp(d) - 1 - d for _, _, d, _ in drifts(policy, second)]  # r - 1 - log r
    assert sum(terms) / len(terms) > 1e-7
    tokens = float(first["loss_mask"].sum() + second["loss_mask"].sum())
    assert metrics["kl/behaviour_k3"] == pytest.approx(sum(terms) / tokens, rel=1e-4)
    assert update.step == 4, "the schedule goes on with the next iteration"
    update(fresh(policy))
    assert steps.rates == pytest.approx([0.3, 0.3 * 8 / 12])
    free, taken = stopping(policy, 1e9)
    assert free(fresh(policy))["optim/early_stopped"] == 0.0
    assert len(taken.grads) == 4


class FarRank(Runtime):
    """This process, told that the policy has moved far on another rank's tokens."""

    def sums(self, values):
        return {k: v + 9.0 if k == "kl/behaviour_k3" else v for k, v in values.items()}


def test_all_ranks_stop_if_their_mean_is_too_far(policy, tmp_path):
    update, steps = stopping(policy, 1e-6, runtime=FarRank(tmp_path))
    assert update(fresh(policy))["optim/early_stopped"] == 1.0
    assert not steps.grads


def test_minibatches_keep_groups_whole_and_must_divide_them():
    batch = TensorDict({"group_id": torch.tensor([3, 3, 1, 1, 2, 2, 9, 9])}, [8])
    assert split_rows(batch, 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    # Two ranks with half of it each make the same two.
    halves = [split_rows(batch[rows], 2) for rows in (slice(0, 4), slice(4, 8))]
    assert halves == [[[0, 1], [2, 3]]] * 2
    with pytest.raises(ValueError, match=r"algorithm\.minibatches=3"):
        split_rows(batch, 3)


def test_only_matrices_are_decayed_and_frozen_parts_left_out():
    policy = make_policy.__wrapped__()
    next(policy.model.parameters()).requires_grad_(False)
    optimizer = make_optimizer(policy.model, lr=0.1, weight_decay=0.5)
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.5, 0.0)
    assert all(p.ndim > 1 for p in decayed["params"])
    assert all(p.ndim == 1 for p in plain["params"])
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    assert len(trained) == len(decayed["params"]) + len(plain["params"])


@pytest.mark.parametrize(
    ("schedule", "want"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
        ("cosine", [0.5, 1, 1, 0.853553, 0.5, 0.146447, 0]),
    ],
)
def test_schedules(schedule, want):
    rate = make_schedule(schedule, lr=2.0, warmup=2, total=6)
    assert [rate(s) for s in range(7)] == pytest.approx([2 * w for w in want], abs=1e-6)
    assert rate(100) == pytest.approx(2 * want[-1])
