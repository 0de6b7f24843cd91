"""bfloat16 weights or products: a run learns, and what is small is computed in float32."""

import math

import pytest
import torch
from contracts import G, leash, one_process, rollout

from policies.load import load_policy, load_reference
from policies.scorer import Critic
from trainer.advantage import GroupAdvantage
from trainer.objectives import GRPOObjective, SFTObjective
from trainer.optimizer import make_optimizer
from trainer.reference import Reference
from trainer.update import Update

HALF = [{"dtype": "bfloat16"}, {"autocast": "bfloat16"}]


def make(options: dict, *, lr: float, objective) -> tuple:
    """Return a policy with larger weights than at its start, and its update."""
    policy = load_policy("tiny", max_new_tokens=6, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in policy.model.parameters():
            if p.ndim > 1:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    optimizer = make_optimizer(policy.scorer, lr=lr)
    return policy, Update(policy.scorer, optimizer, objective, one_process(), lr=lambda _: lr)


@pytest.mark.parametrize("options", HALF)
def test_log_probs_kl_entropy_and_values_are_float32(options):
    policy, _ = make(options, lr=0.0, objective=SFTObjective())
    exact, _ = make({}, lr=0.0, objective=SFTObjective())
    policy.scorer.critic = Critic(policy.scorer)
    exact.scorer.critic = Critic(exact.scorer)
    ids = torch.arange(4, 36).reshape(2, 16)
    every = torch.ones_like(ids, dtype=torch.bool)
    reference = load_reference(policy).scorer
    mine = policy.scorer(ids, every, entropy=True, reference=reference)
    for value in (mine.log_probs, mine.entropy, mine.full_kl, mine.values):
        assert value.dtype == torch.float32
    assert not mine.full_kl.any(), "the same rounding in both"
    wanted = exact.scorer(ids, every, entropy=True)
    # In bfloat16 a sum over the vocabulary would be off by 1 % and log-probs of 5 by 0.03 each.
    total = policy.scorer.logits(ids, every).float().log_softmax(-1).exp().sum(-1)[:, 1:]
    assert (total - 1).abs().max() < 1e-5
    assert (mine.log_probs - wanted.log_probs).abs().max() < 0.1
    assert (mine.log_probs != mine.log_probs.bfloat16()).float().mean() > 0.5


@pytest.mark.parametrize("options", HALF)
def test_a_policy_step_is_finite_and_starts_on_the_reference(options):
    own = leash()
    policy, update = make(options, lr=1e-3, objective=GRPOObjective(leash=own))
    reference = Reference(policy, load_reference(policy))
    for step in range(2):
        batch = GroupAdvantage(group_size=G, leash=own)(reference(rollout(policy)))
        assert batch["kl_penalty"].dtype == torch.float32
        assert 0 < batch["kl_penalty"].abs().max() < (0.1 if step == 0 else math.inf)
        metrics = update(batch)
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["kl/mismatch"] < 0.05
        assert metrics["optim/grad_norm"] > 1e-3


def fallen(options: dict, *, plain: bool = False) -> float:
    """Return by which share the loss of some replies falls in 25 steps.

    At this rate most steps are below the rounding of a bfloat16 weight.
    """
    policy, update = make(options, lr=3e-5, objective=SFTObjective())
    if plain:
        update.optimizer = torch.optim.AdamW(policy.scorer.parameters(), lr=3e-5, weight_decay=0.0)
    batch = rollout(policy)
    loss = [update(batch.clone())["loss/total"] for _ in range(25)]
    return 1 - loss[-1] / loss[0]


@pytest.mark.runs
def test_it_learns_as_fast_as_in_float32():
    want = fallen({})
    assert want > 0.05
    for options in HALF:
        assert fallen(options) == pytest.approx(want, rel=0.1)
    assert fallen(HALF[0], plain=True) < 0.7 * want
