"""The leash is charged once: from the advantage through the objective to a step of the update.

For every algorithm file that samples and in both places, against plain forwards in float64.
"""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from support.invariance import ALGORITHMS, planned, step
from support.policies import G, leash, one_process, scaled
from support.updates import Record, each_token, kept_log_probs, make_update
from tensordict import TensorDict
from torch import Tensor

from policies.critic import Critic
from policies.scorer import Scores
from trainer.advantage import GroupAdvantage
from trainer.kl.controllers import ConstantKLController, TargetKLController
from trainer.kl.estimators import ESTIMATORS, PLACES
from trainer.kl.leash import Leash
from trainer.kl.reference import Reference
from trainer.objectives import GRPOObjective, Terms

COEFF = 0.3
SAMPLING = [name for name in ALGORITHMS if name not in ("sft", "minor_sft", "reward")]


def run(name: str, own: Leash, *, judged_by: Leash | None = None):
    """Return the batch after the advantage, and the metrics of one step of the update."""
    case, runtime = step(name), one_process()
    policy, algorithm = case.policy, case.cfg.algorithm
    if critic := algorithm.get("critic"):
        policy.scorer.critic = Critic(policy.scorer, **critic).double()
    parts = {"leash": judged_by or own, "policy": policy, "runtime": runtime}
    batch = case.batch.clone()
    batch["loss_mask"] = without_the_first(batch["loss_mask"])
    made = planned(case.cfg)
    batch = made.advantage(**parts)(batch)
    objective = made.objective(leash=own)
    optimizer = Record(policy.scorer.parameters())
    options = {"aggregation": algorithm.aggregation, "reference": case.reference.scorer}
    update = make_update(policy, objective, optimizer, **options)
    try:
        return batch, update(batch.clone())
    finally:
        policy.scorer.critic = None


def without_the_first(mask: Tensor) -> Tensor:
    """Remove a row's first token, if it has others, as algorithm.mask removes earlier turns."""
    return mask & ((mask.cumsum(-1) > 1) | (mask.sum(-1, keepdim=True) == 1))  # [B, T]


def exact_kl(policy, reference, batch: TensorDict) -> Tensor:
    """Return the exact KL of each token of the loss mask [B, T], by plain forwards."""
    out = torch.zeros_like(batch["log_probs", "full"])
    with torch.no_grad():
        both = (each_token(model.model, batch) for model in (policy, reference))
        for (i, t, _, p), (*_, q) in zip(*both, strict=True):
            out[i, t] = (p.exp() * (p - q)).sum()
    return out


def charged_once(name: str, where: str) -> None:
    """Raise AssertionError unless COEFF * KL is charged once, and in this place."""
    case, own = step(name), leash(COEFF, where)
    batch, metrics = run(name, own)
    free, _ = run(name, leash(0.0, where))
    mask = batch["loss_mask"]
    gen, curr = batch["log_probs", "full"], kept_log_probs(case.policy, batch)
    ref = kept_log_probs(case.reference, batch)
    k1 = (gen - ref) * mask
    assert k1.abs().sum(-1).min() > 1e-3
    in_reward = COEFF if where == "reward" else 0.0
    paid = batch["reward"].sum(-1) - batch["reward_raw"].sum(-1)
    torch.testing.assert_close(paid, -in_reward * k1.sum(-1), rtol=0, atol=1e-6)
    if name != "distil":  # it has no advantage
        moved = (batch["advantage"] - free["advantage"]).abs().max()
        assert (moved > 1e-4) == (where == "reward")
    rows, tokens = mask.any(-1).sum(), mask.sum()
    each = {
        "token_mean": 1 / tokens,
        "sequence_mean": 1 / (rows * mask.sum(-1, keepdim=True)),
        "constant": 1 / (rows * 12),  # the most tokens of `make_update`
    }[case.cfg.algorithm.aggregation]
    in_loss = COEFF if where != "reward" else 0.0
    kl = torch.where(mask, (ref - curr).exp() - 1 - (ref - curr), 0.0)  # k3
    if where == "sequence":
        kl = exact_kl(case.policy, case.reference, batch)
    want = float((each * kl * in_loss).sum())
    assert metrics.get("loss/kl", 0.0) == pytest.approx(want, rel=1e-6, abs=1e-9)
    parts = sum(v for n, v in metrics.items() if n.startswith("loss/") and n != "loss/total")
    assert metrics["loss/total"] == pytest.approx(parts)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", SAMPLING)
def test_the_kl_is_charged_once(name, where):
    if (name, where) == ("distil", "reward"):
        with pytest.raises(ValueError, match=r"kl\.where=loss"):
            run(name, leash(COEFF, where))
        return
    charged_once(name, where)


@pytest.mark.parametrize(("charges", "learns", "how"), [(1, 0, "twice"), (0, 1, "never")])
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_two_leashes_that_disagree_are_refused(name, charges, learns, how):
    places = ("loss", "reward")
    with pytest.raises(ValueError, match=f"charged {how}"):
        run(name, leash(COEFF, places[learns]), judged_by=leash(COEFF, places[charges]))


@pytest.mark.parametrize("of_leash", ["loss", "reward"])
@pytest.mark.parametrize("of_teacher", ["loss", "reward"])
def test_the_kl_to_a_teacher_is_charged_once_beside_that_to_the_reference(of_leash, of_teacher):
    case, weights = step("grpo"), {"ref": COEFF, "teacher": 0.2}
    places = {"ref": of_leash, "teacher": of_teacher}
    second = replace(leash(0.2, of_teacher), name="teacher")
    own = replace(leash(COEFF, of_leash), teacher=second)
    models = {"ref": case.reference, "teacher": scaled(case.policy, 0.9)}
    batch = Reference(case.policy, models["teacher"], name="teacher")(case.batch.clone())
    batch = GroupAdvantage(group_size=G, leash=own)(batch)
    mask, gen = batch["loss_mask"], batch["log_probs", "full"]
    curr = kept_log_probs(case.policy, batch)
    ref = {name: kept_log_probs(model, batch) for name, model in models.items()}
    paid = torch.zeros_like(gen)
    for name in ref:
        if places[name] == "reward":
            paid -= weights[name] * (gen - ref[name]) * mask
    torch.testing.assert_close(batch["reward_kl"], paid, rtol=0, atol=1e-6)
    optimizer = Record(case.policy.scorer.parameters())
    objective = GRPOObjective(leash=own)
    metrics = make_update(case.policy, objective, optimizer)(batch.clone())
    for name, key in (("ref", "loss/kl"), ("teacher", "loss/kl_teacher")):
        d = ref[name] - curr
        k3 = torch.where(mask, d.exp() - 1 - d, 0.0).sum() / mask.sum()
        want = float(weights[name] * k3) if places[name] == "loss" else 0.0
        assert metrics.get(key, 0.0) == pytest.approx(want, rel=1e-6, abs=1e-9)
    if of_teacher == "reward":
        alone = GroupAdvantage(group_size=G, leash=leash(COEFF, of_leash))
        with pytest.raises(ValueError, match=r"teacher\.coeff"):
            make_update(case.policy, objective, optimizer)(
                alone(batch.exclude("teacher_kl_coeff_in_loss"))
            )


def test_two_exact_divergences_are_refused():
    exact = partial(Leash, ConstantKLController(kl_coef=0.1))
    with pytest.raises(ValueError, match=r"kl\.estimator or teacher\.estimator"):
        exact("full", teacher=exact("jsd", name="teacher"))


class FreeAdvantage:
    """An advantage of a user's own: it charges no KL."""

    def __call__(self, batch):
        return batch.set("advantage", batch["reward_raw"])


class FreeObjective:
    """An objective of a user's own: it charges no KL."""

    reads = ("advantage",)

    def __call__(self, scores, batch):
        return Terms({"policy": -scores.log_probs * batch["advantage"]})


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("own_advantage", [False, True])
@pytest.mark.parametrize("own_objective", [False, True])
def test_one_place_charges_the_kl_whatever_the_parts_are(where, own_advantage, own_objective):
    case = step("grpo")

    def update(coeff: float):
        own = leash(coeff, where)
        advantage = FreeAdvantage() if own_advantage else GroupAdvantage(group_size=G, leash=own)
        objective = FreeObjective() if own_objective else GRPOObjective(leash=own)
        optimizer = Record(case.policy.scorer.parameters())
        options = {"leash": own, "reference": case.reference.scorer}
        made = make_update(case.policy, objective, optimizer, **options)
        return made(advantage(case.batch.clone()))

    charges = not (own_advantage if where == "reward" else own_objective)
    update(0.0)
    if charges:
        assert update(COEFF)["loss/total"] != update(0.0)["loss/total"]
    else:
        with pytest.raises(ValueError, match="charged never"):
            update(COEFF)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("where", PLACES)
def test_a_refused_pair_cannot_be_made(where, estimator):
    make = partial(Leash, ConstantKLController(kl_coef=0.1), estimator, where)
    # In the reward nothing computes the others, and in the sequence it would be a sampled KL.
    only = {"reward": "samples", "sequence": "vocabulary"}
    never = ESTIMATORS[estimator].needs != only.get(where, ESTIMATORS[estimator].needs)
    if not never and where not in ESTIMATORS[estimator].refused:
        assert make().coeff == 0.1
        return
    for options in ({}, {"allow_biased": True} if never else {}):
        with pytest.raises(ValueError, match=f"kl.estimator={estimator}"):
            make(**options)
    assert never or make(allow_biased=True).where == where


@pytest.mark.parametrize(("x", "r"), [(-18.0, 1e-8), (-21.0, 1e-8), (-30.0, 1.0), (25.0, 1e-3)])
def test_far_from_the_reference_k3_ratio_pulls_back_all_the_same(x, r):
    """k3 ends at 20 nats and its large parts cancel; the gradient of both is r x at any x."""
    curr, d = torch.full((1, 4), -40.0, requires_grad=True), min(-x, 20.0)
    td = TensorDict({"ref_log_probs": {"full": curr.detach() - x}}, [1])
    td["log_probs", "full"] = curr.detach() - math.log(r)
    term = leash(1.0, estimator="k3_ratio").loss_term(Scores(curr), td)["kl"]
    assert term.tolist() == [pytest.approx([r * (math.exp(d) - 1 - d)] * 4, rel=1e-5)]
    (slope,) = torch.autograd.grad(term.sum(), curr)
    assert slope.tolist() == [pytest.approx([r * x] * 4, rel=1e-5)]


def test_a_kl_that_nobody_measured_does_not_move_the_coefficient():
    own = Leash(TargetKLController(0.1, target=1.0, horizon=100))
    for unmeasured in ({}, {"reward/dropped_fraction": 1.0}):
        own.follow(unmeasured, responses=16)
        assert own.coeff == 0.1
    own.follow({"kl/ref_sequence": 9.0, "reward/dropped_fraction": 0.5}, responses=16)
    assert own.coeff == pytest.approx(0.1 * (1 + 0.2 * 8 / 100)), "8 responses were judged"
