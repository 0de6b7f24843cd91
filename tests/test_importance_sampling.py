"""Generator against trainer: the corrected loss by a slow loop and by enumeration."""

import math
from collections import defaultdict

import pytest
import torch
from contracts import close, leash, one_process, rollout
from enumeration import a_bfloat16_generator_is_corrected
from steps import HIGH, LOW, double_policy, each_token, grad_of, gradient
from tensordict import TensorDict
from torch import Tensor

from trainer import GRPOObjective, ImportanceSampling
from trainer.advantage import GroupAdvantage
from trainer.importance_sampling import correction
from trainer.metrics import summarize


@pytest.mark.parametrize(
    ("level", "mode", "weights"),
    [
        ("token", "truncate", [[1.5, 2.0, 0.5, 0.1], [2.0, 1.0, 1.0, 1.0]]),
        ("token", "mask", [[1.5, 0.0, 0.5, 0.0], [0.0, 1.0, 1.0, 1.0]]),
        ("sequence", "truncate", [[1.5 * 3 * 0.5 * 0.1] * 4, [2.0] * 4]),
        ("sequence", "mask", [[0.0] * 4, [0.0] * 4]),
    ],
)
def test_weights_by_hand(level, mode, weights):
    ratios = torch.tensor([[9.0, 1.5, 3.0, 0.5, 0.1], [9.0, 4.0, 1.0, 1.0, 1.0]])
    sampled = torch.tensor([[False, True, True, True, True]] * 2)
    weight, limited = correction(ratios.log(), sampled, level=level, mode=mode, limit=2.0)
    torch.testing.assert_close(weight[:, 1:], torch.tensor(weights))
    plain = (ratios * 1.0) if level == "token" else ratios[:, 1:].prod(-1, keepdim=True)
    assert torch.equal(limited[:, 1:], ~torch.isclose(weight, plain.expand_as(weight))[:, 1:])
    far = torch.full((1, 2), -1e6)
    weight, _ = correction(far, far < 0, level=level, mode=mode, limit=3.0)
    assert 0 <= float(weight.max()) < 1e-8, "no overflow"


# Against a loop over tokens, in float64.


def elsewhere(policy, scale: float = 0.4) -> TensorDict:
    """Return a batch with log-probs as of another engine: off by a seeded noise a token."""
    batch = rollout(policy, turns=2, count=2)
    draw = torch.Generator().manual_seed(3)
    gen = batch["log_probs", "full"].double()
    noise = scale * torch.randn(gen.shape, generator=draw, dtype=torch.float64)
    batch["log_probs", "full"] = gen + noise * batch["masks", "all_response_mask"]
    return GroupAdvantage(group_size=4, leash=leash(0.0))(batch)


def slow(policy, batch, old: Tensor, *, level: str, mode: str, limit: float) -> Tensor:
    """Return the gradient of the weighted loss, token by token; old is log pi_old, [B, T]."""
    gen, losses, ratios = batch["log_probs", "full"], [], defaultdict(dict)
    for i, t in batch["loss_mask"].nonzero().tolist():
        ratios[i][t] = math.exp(float(old[i, t] - gen[i, t]))
    for i, t, token, p in each_token(policy.model, batch):
        w = ratios[i][t] if level == "token" else math.prod(ratios[i].values())
        if mode == "truncate":
            w = min(w, limit)
        elif not 1 / limit <= w <= limit:
            w = 0.0
        r, a = (p[token] - old[i, t]).exp(), batch["advantage"][i, t]
        losses.append(-w * torch.minimum(r * a, r.clamp(1 - LOW, 1 + HIGH) * a))
    policy.model.zero_grad()
    (sum(losses) / len(losses)).backward()
    return grad_of(policy)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_weighted_gradient_is_that_of_a_loop_over_tokens(level, mode):
    policy = double_policy()
    batch, limit = elsewhere(policy), 1.4 if level == "token" else 4.0
    options = {"level": level, "mode": mode, "limit": limit}
    batch = ImportanceSampling(policy=policy, micro_batch_tokens=60, **options)(batch)
    old = torch.zeros_like(batch["log_probs", "full"])
    with torch.no_grad():
        for i, t, token, p in each_token(policy.model, batch):
            old[i, t] = p[token]
        close(batch["old_log_probs", "full"], old, 1e-6, "old log-probs")
        for p in policy.model.parameters():
            p.mul_(1.02)
    objective = GRPOObjective(clip_low=LOW, clip_high=HIGH, leash=leash(0.0))
    got, metrics = gradient(policy, objective, batch, micro_batch_tokens=120)
    want = slow(policy, batch, old, **options)
    assert (got - want).norm() / want.norm() < 1e-5
    assert 0 < metrics["policy/clip_fraction"] < 1
    plain, _ = gradient(policy, objective, batch.exclude("policy_weight"))
    assert (got - plain).norm() / want.norm() > 1e-2, "the weights matter"
    sampled = batch["masks", "all_response_mask"]
    share = float(batch["logged", "policy/importance_limited"][sampled].double().mean())
    shown = summarize(batch, one_process())["policy/importance_limited"]
    assert 0 < share < 1
    assert shown == pytest.approx(share)


def test_a_bfloat16_generator_is_corrected():
    """By enumeration: every reply of two tokens over a vocabulary of six."""
    a_bfloat16_generator_is_corrected()
