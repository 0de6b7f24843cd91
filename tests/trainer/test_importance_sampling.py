"""What is done after a rollout: importance weights, rewards and masks; who still counts.

Generator against trainer by a slow loop and by enumeration; the rest by numbers of the paper.
"""

import math
from collections import defaultdict

import pytest
import torch
from support.policies import close, leash, make_policy, one_process, rollout
from support.slow_maths import a_bfloat16_generator_is_corrected
from support.updates import HIGH, LOW, double_policy, each_token, grad_of, gradient, kept_log_probs
from tensordict import TensorDict
from torch import Tensor

from trainer import (
    DropTruncated,
    GroupAdvantage,
    GRPOObjective,
    ImportanceSampling,
    OverlongPenalty,
)
from trainer.importance_sampling import correction
from trainer.metrics import idle_groups, summarize


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_far_log_probs_do_not_overflow(level, mode):
    far = torch.full((1, 2), -1e6)
    weight, limited = correction(far, far < 0, level=level, mode=mode, limit=3.0)
    assert 0 <= float(weight.max()) < 1e-8
    assert limited.all() == (mode == "mask")


# Against a loop over tokens, in float64.


def elsewhere(policy, scale: float = 0.4) -> TensorDict:
    """Return a batch with log-probs as of another engine: off by a seeded noise a token."""
    batch = rollout(policy, turns=2, count=2)
    draw = torch.Generator().manual_seed(3)
    gen = batch["log_probs", "full"].double()
    noise = scale * torch.randn(gen.shape, generator=draw, dtype=torch.float64)
    batch["log_probs", "full"] = gen + noise * batch["masks", "all_response_mask"]
    return GroupAdvantage(group_size=4, leash=leash(0.0))(batch)


def slow(policy, batch, old: Tensor, *, level: str, mode: str, limit: float) -> tuple:
    """Return the gradient of the weighted loss, token by token, and the share of limited tokens.

    old is log pi_old, [B, T].
    """
    gen, losses, ratios = batch["log_probs", "full"], [], defaultdict(dict)
    limited = 0
    for i, t in batch["loss_mask"].nonzero().tolist():
        ratios[i][t] = math.exp(float(old[i, t] - gen[i, t]))
    for i, t, token, p in each_token(policy.model, batch):
        w = ratios[i][t] if level == "token" else math.prod(ratios[i].values())
        whole = w
        if mode == "truncate":
            w = min(w, limit)
        elif not 1 / limit <= w <= limit:
            w = 0.0
        limited += w != whole
        r, a = (p[token] - old[i, t]).exp(), batch["advantage"][i, t]
        losses.append(-w * torch.minimum(r * a, r.clamp(1 - LOW, 1 + HIGH) * a))
    policy.model.zero_grad()
    (sum(losses) / len(losses)).backward()
    return grad_of(policy), limited / len(losses)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_weighted_gradient_is_that_of_a_loop_over_tokens(level, mode):
    policy = double_policy()
    batch, limit = elsewhere(policy), 1.4 if level == "token" else 4.0
    options = {"level": level, "mode": mode, "limit": limit}
    batch = ImportanceSampling(policy=policy, micro_batch_tokens=60, **options)(batch)
    old = kept_log_probs(policy, batch)
    close(batch["old_log_probs", "full"], old, 1e-6, "old log-probs")
    with torch.no_grad():
        for p in policy.model.parameters():
            p.mul_(1.02)
    objective = GRPOObjective(clip_low=LOW, clip_high=HIGH, leash=leash(0.0))
    got, metrics = gradient(policy, objective, batch, micro_batch_tokens=120)
    want, share = slow(policy, batch, old, **options)
    assert (got - want).norm() / want.norm() < 1e-5
    assert 0 < metrics["policy/clip_fraction"] < 1
    plain, _ = gradient(policy, objective, batch.exclude("policy_weight"))
    assert (got - plain).norm() / want.norm() > 1e-2, "the weights matter"
    shown = summarize(batch, one_process())["policy/importance_limited"]
    assert 0 < share < 1
    assert shown == pytest.approx(share)


def test_a_bfloat16_generator_is_corrected():
    """By enumeration: every response of two tokens over a vocabulary of six."""
    a_bfloat16_generator_is_corrected()


# Long and cut responses.


def test_the_overlong_penalty_is_that_of_dapo_at_the_last_sampled_token():
    batch = rollout(make_policy(), turns=3)
    before = batch["reward_raw"].clone()
    sampled = batch["masks", "all_response_mask"]
    lengths = sampled.sum(-1).tolist()
    most, buffer, weight = max(lengths) - 1, 6, 0.5
    batch = OverlongPenalty(max_tokens=most, buffer=buffer, weight=weight)(batch)
    seen = set()
    for i, n in enumerate(lengths):
        want = -1.0 if n > most else min(0.0, (most - buffer - n) / buffer)  # eq. 13
        seen.add(want)
        added = batch["reward_raw"][i] - before[i]
        last = sampled[i].nonzero()[-1]
        assert added[last].item() == pytest.approx(weight * want, abs=1e-6)
        assert added.abs().sum().item() == pytest.approx(weight * abs(want), abs=1e-6)
        assert batch["reward_part", "overlong"][i].item() == pytest.approx(weight * want)
    assert (min(seen), max(seen)) == (-1, 0)
    assert any(-1 < value < 0 for value in seen)


def test_truncated_responses_teach_nothing():
    batch = rollout(make_policy())
    cut = batch["truncated"]
    assert 0 < int(cut.sum()) < len(cut)
    kept = batch["masks", "all_response_mask"] & ~cut[:, None]
    assert torch.equal(DropTruncated()(batch)["loss_mask"], kept)


def test_a_group_is_idle_if_its_kept_rows_have_one_reward_or_there_are_none():
    td = TensorDict({"group_id": torch.tensor([7, 7, 1, 1, 4, 4])}, [6])
    td["reward_raw"] = torch.tensor([[0.5, 0.5], [1, 0], [0, 1], [0, 0.5], [0, 1], [0, 0]])
    td["loss_mask"] = torch.ones(6, 2, dtype=torch.bool)
    assert idle_groups(td).tolist() == [True, False, False]
    td["loss_mask"][4:] = False
    assert idle_groups(td).tolist() == [True, False, True]
    td["loss_mask"][3] = False
    assert idle_groups(td).tolist() == [True, True, True], "one alone has nothing beside it"
