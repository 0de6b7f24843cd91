"""The update: its gradient against a loop over tokens in float64, its steps, AdamW, bfloat16."""

import math
from collections import defaultdict

import pytest
import torch
from support.policies import G, demonstrations, leash, make_policy, one_process, rollout, scaled
from support.updates import (
    COEFF,
    HIGH,
    LOW,
    Record,
    double_policy,
    each_token,
    grad_of,
    gradient,
    kept_log_probs,
    make_update,
    prepared,
)
from tensordict import TensorDict
from torch import Tensor

from envs.transforms.kl import RetrieveKL
from policies.critic import Critic
from policies.load import load_policy, load_reference
from trainer.advantage import GroupAdvantage
from trainer.kl.controllers import ConstantKLController
from trainer.kl.leash import Leash
from trainer.kl.reference import Reference
from trainer.objectives import DistilObjective, GRPOObjective, SFTObjective, Terms
from trainer.optimizer import Muon, make_optimizer, make_schedule, parameter_groups
from trainer.update import Update, split_rows

policy = pytest.fixture(double_policy)


def objective() -> GRPOObjective:
    return GRPOObjective(clip_low=LOW, clip_high=HIGH, leash=leash(COEFF))


def backward(policy, losses: dict[int, list[Tensor]], aggregation: str) -> float:
    """Return the mean of the losses of the tokens of each row; its gradient is in the policy."""
    rows, total = losses.values(), sum(map(sum, losses.values()))
    loss = {
        "token_mean": total / sum(map(len, rows)),
        "sequence_mean": sum(sum(row) / len(row) for row in rows) / len(rows),
        "constant": total / (len(rows) * 12),
    }[aggregation]
    policy.model.zero_grad()
    loss.backward()
    return float(loss.detach())


def slow_grpo(policy, reference, batch, aggregation: str, estimator: str) -> float:
    """Return the loss of the papers, token by token, and leave its gradient in the model."""
    losses: dict[int, list[Tensor]] = defaultdict(list)
    with torch.no_grad():
        theirs = [q for *_, q in each_token(reference.model, batch)]
    for (i, t, token, p), q in zip(each_token(policy.model, batch), theirs, strict=True):
        d, r = q[token] - p[token], (p[token] - batch["log_probs", "full"][i, t]).exp()
        k3, a = d.exp() - d - 1, batch["advantage"][i, t]
        kls = {"k2": d**2 / 2, "k3": k3, "k3_ratio": r * k3, "full": (p.exp() * (p - q)).sum()}
        clipped = torch.minimum(r * a, r.clamp(1 - LOW, 1 + HIGH) * a)
        losses[i].append(COEFF * kls[estimator] - clipped)
    return backward(policy, losses, aggregation)


def with_states(policy, reference, batch: TensorDict) -> TensorDict:
    """Return the batch with the reference's states, after a check that its KL is the same."""
    kept = Reference(policy, reference)(batch.clone(), keep_states=True)
    torch.testing.assert_close(kept["kl_penalty"], batch["kl_penalty"], rtol=0, atol=1e-12)
    return kept


def kept_states_give_the_kl_of_a_pass() -> None:
    policy = double_policy()
    batch, reference = prepared(policy)
    with_states(policy, reference, batch)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("estimator", ["k2", "k3", "full", "k3_ratio"])
def test_grpo_gradient_is_that_of_a_loop_over_tokens(policy, aggregation, estimator):
    batch, reference = prepared(policy)
    batch["loss_mask"][1] = False  # a row that counts for nothing
    own = leash(COEFF, estimator=estimator)
    made = GRPOObjective(clip_low=LOW, clip_high=HIGH, leash=own)
    options = {"aggregation": aggregation, "reference": reference.scorer}
    got, metrics = gradient(policy, made, batch, micro_batch_tokens=120, **options)
    loss = slow_grpo(policy, reference, batch, aggregation, estimator)
    want = grad_of(policy)
    assert (got - want).norm() / want.norm() < 1e-5
    assert metrics["loss/total"] == pytest.approx(loss, abs=1e-5)
    assert metrics["loss/total"] == pytest.approx(metrics["loss/policy"] + metrics["loss/kl"])
    assert 0 < metrics["policy/clip_fraction"] < 1
    assert metrics["optim/grad_norm"] == pytest.approx(float(want.norm()), rel=1e-5)
    if estimator == "full":  # from the states of the score phase: no other pass of the body
        kept = with_states(policy, reference, batch)
        reference.model.base_model.register_forward_hook(lambda *_: pytest.fail("a second pass"))
        policy.model.zero_grad()
        again, _ = gradient(policy, made, kept, micro_batch_tokens=120, **options)
        assert (again - got).norm() / got.norm() < 1e-12


@pytest.mark.parametrize("exact", ["ref", "teacher"])
def test_leash_and_teacher_give_the_gradient_of_the_sum_of_both_loops(exact):
    """One of the two reads whole distributions, the other the sampled tokens."""
    policy = double_policy()
    batch, start = prepared(policy)
    models = {"ref": start, "teacher": scaled(policy, 0.9)}
    batch = Reference(policy, models["teacher"], name="teacher")(batch)
    kinds = {name: "full" if name == exact else "k3_ratio" for name in models}
    second = Leash(ConstantKLController(kl_coef=0.2), kinds["teacher"], name="teacher")
    own = Leash(ConstantKLController(kl_coef=COEFF), kinds["ref"], teacher=second)
    options = {"reference": models[exact].scorer, "micro_batch_tokens": 120}
    got, metrics = gradient(policy, DistilObjective(leash=own), batch, **options)
    with torch.no_grad():
        theirs = {name: [q for *_, q in each_token(m.model, batch)] for name, m in models.items()}
    losses: dict[int, list[Tensor]] = defaultdict(list)
    found = []
    for index, (i, t, token, p) in enumerate(each_token(policy.model, batch)):
        terms = []
        for name, coeff in (("ref", COEFF), ("teacher", 0.2)):
            q, r = theirs[name][index], (p[token] - batch["log_probs", "full"][i, t]).exp()
            d = q[token] - p[token]
            kl = (p.exp() * (p - q)).sum() if name == exact else r * (d.exp() - d - 1)
            terms.append(coeff * kl)
        losses[i].append(terms[0] + terms[1])
        found.append([term.item() for term in terms])
    backward(policy, losses, "token_mean")
    want = grad_of(policy)
    assert (got - want).norm() / want.norm() < 1e-5
    means = torch.tensor(found).mean(0).tolist()
    assert [metrics["loss/kl"], metrics["loss/kl_teacher"]] == pytest.approx(means, rel=1e-4)
    coeff = {"ref": COEFF, "teacher": 0.2}[exact]
    mean = means[0 if exact == "ref" else 1]
    assert metrics[f"kl/{exact}_full"] == pytest.approx(mean / coeff, rel=1e-4)


def divergences(p: Tensor, q: Tensor, weight: float) -> dict[str, Tensor]:
    """Return the divergences of a token's log-probs, [V] each, by their definitions."""
    m = (weight * q.exp() + (1 - weight) * p.exp()).log()
    halves = weight * q.exp() * (q - m) + (1 - weight) * p.exp() * (p - m)
    return {
        "full": (p.exp() * (p - q)).sum(),
        "forward": (q.exp() * (q - p)).sum(),
        "jsd": halves.sum(),
    }


def later_states(kls: dict[int, list[float]], i: int, place: int) -> float:
    """Return the KL after a row's token, minus the mean of its group's others, by loops."""
    later = {j: [sum(row[u + 1 :]) for u in range(len(row))] for j, row in kls.items()}
    group = range(i // G * G, i // G * G + G)
    others = [later[j][min(place, len(later[j]) - 1)] for j in group if j != i and j in later]
    return later[i][place] - (sum(others) / len(others) if others else 0.0)


def distils_as_the_loop(estimator: str, cap: float | None, where: str = "loss") -> None:
    """Raise AssertionError unless loss and gradient are those of a loop over tokens.

    The teacher has another temperature; there is no reward. The chats have two turns.
    """
    policy = double_policy()
    batch, teacher = prepared(policy)
    teacher.scorer.temperature_factor = 0.4
    batch["loss_mask"][1] = False  # one row of a group was dropped
    own = Leash(ConstantKLController(kl_coef=COEFF), estimator, where, jsd_weight=0.3, cap=cap)
    options = {"reference": teacher.scorer, "micro_batch_tokens": 120}
    got, metrics = gradient(policy, DistilObjective(leash=own), batch, **options)
    losses: dict[int, list[Tensor]] = defaultdict(list)
    with torch.no_grad():
        theirs = [q for *_, q in each_token(teacher.model, batch, 0.4)]
    found, capped, logs = [], defaultdict(list), defaultdict(list)
    for (i, t, token, p), q in zip(each_token(policy.model, batch), theirs, strict=True):
        kl = divergences(p, q, 0.3)[estimator]
        found.append(float(kl.detach()))
        losses[i].append(COEFF * (kl if cap is None else kl.clamp(max=cap)))
        capped[i].append(float(losses[i][-1].detach()))
        logs[i].append(p[token] - batch["log_probs", "full"][i, t])
    if where == "sequence":
        for i, row in logs.items():
            for place, x in enumerate(row):
                change = x.exp() * later_states(capped, i, place)
                losses[i][place] = losses[i][place] + change - change.detach()
    loss = backward(policy, losses, "token_mean")
    want = grad_of(policy)
    assert (got - want).norm() / want.norm() < 1e-5
    assert metrics["loss/total"] == metrics["loss/kl"] == pytest.approx(loss, abs=1e-6)
    name = {"full": "kl/ref_full", "forward": "kl/ref_forward", "jsd": "kl/ref_jsd"}[estimator]
    assert metrics[name] == pytest.approx(sum(found) / len(found), abs=1e-6)
    if cap is not None:
        assert min(found) < cap < max(found)


@pytest.mark.parametrize("cap", [None, 0.3])
@pytest.mark.parametrize("estimator", ["full", "forward", "jsd"])
def test_distillation_gradient_is_that_of_a_loop_over_tokens(estimator, cap):
    distils_as_the_loop(estimator, cap)


@pytest.mark.parametrize("cap", [None, 0.3])
def test_the_kl_of_the_sequence_is_that_of_a_loop_over_tokens(cap):
    distils_as_the_loop("full", cap, "sequence")


@pytest.mark.parametrize(
    ("aggregation", "token_loss", "anchor"),
    [
        ("token_mean", "nll", None),
        ("sequence_mean", "nll", None),
        ("token_mean", "dft", "forward"),  # ASFT
        ("sequence_mean", "nll", "full"),
    ],
)
def test_sft_gradient_is_that_of_a_loop_over_tokens(aggregation, token_loss, anchor):
    policy = double_policy()
    batch, start = demonstrations(policy), scaled(policy, 0.8)
    with torch.no_grad():
        each = [q for *_, q in each_token(start.model, batch)]
    assert Reference(policy, start)(batch, keep_states=True) is batch, "nothing was sampled"
    own = Leash(ConstantKLController(kl_coef=COEFF if anchor else 0.0), anchor or "k3_ratio")
    objective = SFTObjective(leash=own, token_loss=token_loss)
    options = {"aggregation": aggregation, "reference": start.scorer}
    got, metrics = gradient(policy, objective, batch, **options)
    losses: dict[int, list[Tensor]] = defaultdict(list)
    found = []
    for (i, _, token, p), q in zip(each_token(policy.model, batch), each, strict=True):
        kl = divergences(p, q, 0.5)[anchor or "full"]
        found.append(float(kl.detach()))
        term = -p[token] if token_loss == "nll" else -p[token].exp()
        losses[i].append(term + (COEFF * kl if anchor else 0.0))
    backward(policy, losses, aggregation)
    assert (got - grad_of(policy)).norm() / grad_of(policy).norm() < 1e-6  # weights are float32
    measured = metrics.get(f"kl/ref_{anchor}")
    assert measured == (pytest.approx(sum(found) / len(found)) if anchor else None)
    assert max(found) > 0.01


@torch.no_grad()
def test_metrics_are_means_over_the_loss_mask(policy):
    # Not as in TorchRL, which averages over padding and prompt too.
    batch, _ = prepared(policy)
    with torch.enable_grad():
        _, metrics = gradient(policy, objective(), batch)
    moved, entropies, clipped = [], [], []
    for i, t, token, p in each_token(policy.model, batch):
        moved.append(float(batch["log_probs", "full"][i, t] - p[token]))
        entropies.append(-float((p.exp() * p).sum()))
        r, a = math.exp(-moved[-1]), float(batch["advantage"][i, t])
        clipped.append((r > 1 + HIGH and a > 0) or (r < 1 - LOW and a < 0))
    count = len(moved)
    assert metrics["kl/behaviour"] == pytest.approx(sum(moved) / count, abs=1e-5)
    assert metrics["policy/entropy"] == pytest.approx(sum(entropies) / count, abs=1e-5)
    assert metrics["policy/clip_fraction"] == pytest.approx(sum(clipped) / count)
    assert metrics["policy/ratio_max"] == pytest.approx(math.exp(-min(moved)), rel=1e-4)


def test_the_gradient_is_clipped_to_its_limit(policy):
    batch, _ = prepared(policy)
    whole, metrics = gradient(policy, objective(), batch)
    cut, same = gradient(policy, objective(), batch, max_grad_norm=float(whole.norm()) / 4)
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
    update = make_update(policy, Poisoned(leash=leash(COEFF)), optimizer, lr=0.1, max_grad_norm=1.0)
    assert update(batch.clone())["optim/skipped_steps"] == update.step == 1
    for p, old in zip(policy.model.parameters(), before, strict=True):
        assert torch.equal(p, old)
    assert not optimizer.state
    assert update(batch.clone())["optim/skipped_steps"] == 1, "nothing of it is left"
    assert all(p.isfinite().all() for p in policy.model.parameters())
    assert not torch.equal(next(policy.model.parameters()), before[0])


def test_an_empty_minibatch_is_skipped_and_adds_nothing_to_a_mean(policy):
    batch, _ = prepared(policy)
    alone = gradient(policy, objective(), batch[G:])[1]
    batch["loss_mask"][:G] = False
    beside = gradient(policy, objective(), batch, minibatches=2)[1]
    assert beside["optim/skipped_steps"] == 1
    assert beside == pytest.approx({**alone, "optim/skipped_steps": 1}, rel=1e-6)
    options = {"lr": 1.0, "minibatches": 2, "epochs": 2}
    moved = make_update(policy, objective(), Record(policy.model.parameters(), lr=1.0), **options)
    metrics = moved(batch.clone())
    assert metrics["kl/mismatch"] == pytest.approx(alone["kl/mismatch"], rel=1e-6), "before a step"
    assert metrics["kl/behaviour_k3"] != pytest.approx(alone["kl/behaviour_k3"], rel=0.01)
    batch["loss_mask"][:] = False  # all of it is skipped
    optimizer = Record(policy.model.parameters())
    left = make_update(policy, objective(), optimizer)(batch)
    assert not optimizer.grads
    assert {name for name in left if name.startswith(("loss/", "kl/"))} == {"loss/total"}


def test_epochs_and_minibatches_make_steps_of_whole_groups_at_the_rate_of_their_number(policy):
    batch, _ = prepared(policy)
    first = Record(policy.model.parameters())
    make_update(policy, objective(), first)(batch[:G].clone())
    optimizer = Record(policy.model.parameters())
    rate = make_schedule("linear", lr=0.1, warmup=2, total=8)
    update = make_update(policy, objective(), optimizer, lr=rate, epochs=2, minibatches=2)
    metrics = update(batch.clone())
    want = [0.05, 0.1, 0.1, 0.1 * 5 / 6]
    assert optimizer.rates == pytest.approx(want)
    assert metrics["optim/lr"] == pytest.approx(sum(want[2:]) / 2), "of the last epoch"
    update(batch.clone())
    assert optimizer.rates[4:] == pytest.approx([0.1 * (8 - s) / 6 for s in (4, 5, 6, 7)])
    # Each minibatch normalises over itself: one prompt's gradient alone.
    torch.testing.assert_close(first.grads[0], optimizer.grads[0], rtol=1e-5, atol=1e-8)


def test_an_iteration_ends_before_the_step_that_finds_the_policy_too_far(policy):
    def fresh() -> TensorDict:  # that the policy has just sampled
        batch = RetrieveKL(scaled(policy, 0.95))(rollout(policy))
        return GroupAdvantage(group_size=G, leash=leash(COEFF))(batch)

    def stopping(target_kl: float, **options) -> tuple:
        steps, rate = Record(policy.model.parameters()), make_schedule("linear", lr=0.3, total=12)
        options |= {"lr": rate, "epochs": 2, "minibatches": 2, "target_kl": target_kl}
        return make_update(policy, objective(), steps, **options), steps

    batch, (update, steps) = fresh(), stopping(1e-7)
    metrics = update(batch.clone())
    assert len(steps.grads) == 1, "the first is taken, by the policy that sampled"
    assert metrics["optim/early_stopped"] == 3 / 4
    assert all(p.grad is None for p in policy.model.parameters())
    part = batch[split_rows(batch, 2)[1]]  # whose step is left out
    d = (kept_log_probs(policy, part) - part["log_probs", "full"])[part["loss_mask"]]
    terms = d.exp() - 1 - d  # r - 1 - log r
    assert terms.mean() > 1e-7
    want = float(terms.sum() / batch["loss_mask"].sum())
    assert metrics["kl/behaviour_k3"] == pytest.approx(want, rel=1e-4)
    update(fresh())
    assert steps.rates == pytest.approx([0.3, 0.3 * 8 / 12]), "the schedule counts what is left out"
    assert stopping(1e9)[0](fresh())["optim/early_stopped"] == 0.0


def test_minibatches_keep_groups_whole_on_any_number_of_ranks():
    batch = TensorDict({"group_id": torch.tensor([3, 3, 1, 1, 2, 2, 9, 9])}, [8])
    assert split_rows(batch, 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    halves = [split_rows(batch[rows], 2) for rows in (slice(0, 4), slice(4, 8))]
    assert halves == [[[0, 1], [2, 3]]] * 2
    with pytest.raises(ValueError, match=r"algorithm\.minibatches=3"):
        split_rows(batch, 3)


def test_only_matrices_are_decayed_and_frozen_parts_left_out():
    policy = make_policy.__wrapped__()
    next(policy.model.parameters()).requires_grad_(False)
    decayed, plain = make_optimizer(policy.model, lr=0.1, weight_decay=0.5).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.5, 0.0)
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    for group, matrices in ((decayed, True), (plain, False)):
        assert {*group["params"]} == {p for p in trained if (p.ndim > 1) == matrices}


def test_schedules_warm_up_and_end_at_0():
    linear, half = [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0], math.cos(math.pi / 4) / 2
    cosine = [0.5, 1, 1, 0.5 + half, 0.5, 0.5 - half, 0, 0]
    for name, want in {"constant": [0.5] + [1] * 7, "linear": linear, "cosine": cosine}.items():
        rate = make_schedule(name, lr=2.0, warmup=2, total=6)
        assert [rate(s) for s in (*range(7), 100)] == pytest.approx([2 * w for w in want])


# AdamW.


def slow_adamw(weight: float, grads: list[float], *, lr: float, decay: float, eps=1e-8) -> float:
    """Return a weight after AdamW steps (Loshchilov and Hutter, algorithm 2), in Python floats."""
    mean = square = 0.0
    for t, grad in enumerate(grads, start=1):
        mean, square = 0.9 * mean + 0.1 * grad, 0.999 * square + 0.001 * grad**2
        move = mean / (1 - 0.9**t) / ((square / (1 - 0.999**t)) ** 0.5 + eps)
        weight = weight - lr * decay * weight - lr * move
    return weight


GRADS = [0.5, -0.25, 1.0, 0.75, 0.5, 0.5, -0.125, 1.0] * 25  # exact in bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_hundred_small_steps_are_those_of_the_formula(dtype):
    model = torch.nn.Linear(1, 1, bias=False, dtype=dtype)
    model.weight.data.fill_(0.5)
    place = model.weight.data_ptr()
    optimizer = make_optimizer(model, lr=1e-5, weight_decay=0.1)
    for grad in GRADS:
        model.weight.grad = torch.full_like(model.weight, grad)
        optimizer.step()
    want = slow_adamw(0.5, GRADS, lr=1e-5, decay=0.1)
    assert want < 0.4985
    state = optimizer.state[model.weight]
    got = state.get("master", model.weight).item()
    assert got == pytest.approx(want, abs=5e-6)
    assert model.weight.dtype == dtype
    assert model.weight.item() == torch.tensor(got).to(dtype).item()
    assert model.weight.data_ptr() == place, "whoever shares the weight sees it move"
    assert ("master" in state) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_moves_hidden_matrices_by_orthogonal_steps_and_the_rest_by_adamw(dtype):
    """By the singular values of a step; the first step of AdamW is lr times the sign."""
    policy = make_policy.__wrapped__()
    model = policy.model.to(dtype)
    groups = parameter_groups(policy.scorer)
    optimizer = Muon(groups, model=policy.scorer, lr=1e-2, momentum=0.9)
    draw = torch.Generator().manual_seed(0)
    before = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=draw).to(dtype)
    slopes = {name: p.grad.float().clone() for name, p in model.named_parameters()}
    optimizer.step()
    hidden = 0
    for name, p in model.named_parameters():
        state = optimizer.state[p]
        moved = state.get("master", p).detach().float() - before[name]
        if p.ndim == 2 and "embed" not in name and "head" not in name:
            hidden += 1
            size = 0.2 * max(p.shape) ** 0.5 * 1e-2  # Moonlight eq. 4
            spread = torch.linalg.svdvals(moved) / size
            assert 0.6 < spread[: len(spread) // 2].min() < spread.max() < 1.4, name
            assert set(state) - {"master"} == {"momentum_buffer"}
        else:
            torch.testing.assert_close(moved, -1e-2 * slopes[name].sign(), rtol=1e-3, atol=1e-6)
    assert hidden >= 7


# bfloat16 weights or products: what is small is computed in float32.


HALF = [{"dtype": "bfloat16"}, {"autocast": "bfloat16"}]


def with_update(options: dict, *, lr: float, objective) -> tuple:
    """Return a policy with larger weights than at its start, and its update."""
    policy = load_policy("tiny", max_new_tokens=6, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in policy.model.parameters():
            if p.ndim > 1:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    optimizer = make_optimizer(policy.scorer, lr=lr)
    return policy, Update(
        policy.scorer,
        optimizer,
        objective,
        one_process(),
        lr=lambda _: lr,
        leash=getattr(objective, "leash", None) or leash(0.0),
    )


@pytest.mark.parametrize("options", HALF)
def test_log_probs_kl_entropy_and_values_are_float32(options):
    policy, _ = with_update(options, lr=0.0, objective=SFTObjective())
    exact, _ = with_update({}, lr=0.0, objective=SFTObjective())
    policy.scorer.critic = Critic(policy.scorer)
    exact.scorer.critic = Critic(exact.scorer)
    ids = torch.arange(4, 36).reshape(2, 16)
    every = torch.ones_like(ids, dtype=torch.bool)
    reference = load_reference(policy).scorer
    mine = policy.scorer(ids, every, entropy=True, reference=reference)
    for value in (mine.log_probs, mine.entropy, mine.divergence, mine.values):
        assert value.dtype == torch.float32
    assert not mine.divergence.any(), "the same rounding in both"
    wanted = exact.scorer(ids, every, entropy=True)
    # In bfloat16 a sum over the vocabulary would be off by 1 % and log-probs of 5 by 0.03 each.
    total = policy.scorer.logits(ids, every).float().log_softmax(-1).exp().sum(-1)[:, 1:]
    assert (total - 1).abs().max() < 1e-5
    assert (mine.log_probs - wanted.log_probs).abs().max() < 0.1
    assert (mine.log_probs != mine.log_probs.bfloat16()).float().mean() > 0.5


@pytest.mark.parametrize("options", HALF)
def test_a_policy_step_is_finite_and_starts_on_the_reference(options):
    own = leash()
    policy, update = with_update(options, lr=1e-3, objective=GRPOObjective(leash=own))
    reference = Reference(policy, load_reference(policy))
    for step in range(2):
        batch = GroupAdvantage(group_size=G, leash=own)(reference(rollout(policy)))
        assert batch["kl_penalty"].dtype == torch.float32
        assert 0 < batch["kl_penalty"].abs().max() < (0.1 if step == 0 else math.inf)
        metrics = update(batch)
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["kl/mismatch"] < 0.05
        assert metrics["optim/grad_norm"] > 1e-3
