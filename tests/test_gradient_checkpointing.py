"""Layers that are computed again in the backward: the same gradient for less memory."""

import pytest
import torch

from benchmarks.measure import peak_bytes
from policies.load import load_policy, load_reference
from policies.padding import pad, pad_mask
from policies.scorer import Critic

PROMPT = torch.arange(30) % 11 + 4
ROWS = [torch.cat([PROMPT, torch.arange(n) * 7 % 13 + 4]) for n in (9, 4, 12, 7)]
GROUPED = {"group_id": torch.zeros(4, dtype=torch.int64)}


def make(on: bool, *, r: int = 0):
    """Return a policy in float64 with random weights, the same ones every time."""
    policy = load_policy("tiny", lora={"r": r}, gradient_checkpointing=on)
    generator = torch.Generator().manual_seed(0)
    for p in policy.model.parameters():
        p.data = torch.randn(p.shape, generator=generator) * 0.2
    policy.model.double()
    return policy


def gradient(policy, *, full: bool = False, side: str = "right", **options) -> torch.Tensor:
    """Return the gradient of a loss on all that a forward gives, flattened."""
    mask = pad_mask([len(row) for row in ROWS], side=side)
    policy.scorer.train()
    reference = load_reference(policy).scorer if full else None
    scores = policy.scorer(pad(ROWS, side=side), mask, reference=reference, **options)
    loss = (scores.log_probs * torch.linspace(-1, 1, mask.shape[1])).sum()
    loss = loss + (0 if scores.values is None else scores.values.square().sum())
    (loss + (scores.full_kl.sum() if full else 0)).backward()
    trained = [p for p in policy.scorer.parameters() if p.requires_grad]
    return torch.cat([p.grad.flatten() for p in trained])


@pytest.mark.parametrize(
    ("r", "critic", "options"),
    [
        (0, None, {"side": "left"}),
        (0, "head", GROUPED),  # the 4-D mask
        (0, "separate", GROUPED),
        (0, None, {"pack": True}),
        (4, None, {"full": True, **GROUPED}),  # the reference in the same layers in between
    ],
)
def test_the_gradient_is_the_same(r, critic, options):
    found = []
    for on in (True, False):
        policy = make(on, r=r)
        if critic:
            policy.scorer.critic = Critic(policy.scorer, kind=critic)
            policy.scorer.critic.head.weight.data.fill_(0.1)
        found.append(gradient(policy, **options))
    assert found[1].norm() > 1
    assert (found[0] - found[1]).norm() / found[1].norm() < 1e-6


def test_the_backward_of_long_sequences_holds_less_at_once():
    ids = (torch.arange(512) % 40)[None]
    mask, kept = torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
    kept[:, -4:] = True
    peak = {}
    for on in (True, False):
        policy = make(on)
        policy.scorer.train()
        policy.scorer(ids, mask, kept).log_probs.sum().backward()  # the gradients are there
        peak[on] = peak_bytes(
            lambda scorer=policy.scorer: scorer(ids, mask, kept).log_probs.sum().backward()
        )
    assert peak[True] < 0.7 * peak[False]  # there are two layers only
