"""The entropy bonus and its gradient by plain softmaxes."""

import pytest
import torch
from contracts import leash
from steps import HIGH, LOW, double_policy, gradient, prepared, tables
from torch import Tensor

from trainer import GRPOObjective

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
