"""Rows of docs/coming_from_*.md that are marked = or ≠, each run against the peer's own function.

A row and its case in peers.yaml are one: a case names its row by the first cell, and a marked row
without a case fails, as does a case without a row.
"""

import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support import peers
from support.peers import LENGTHS, MOST, ActorConfig, Data, G, draw, leash_gradient, peer_gradient
from torch import Tensor

# Warnings of the peers, on the transformers that leash takes, are theirs.
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).parents[2]
CASES = yaml.safe_load((ROOT / "tests" / "peers" / "peers.yaml").read_text())
PAGES = {"trl": "trl", "verl": "verl", "openrlhf": "verl"}


@pytest.fixture(autouse=True)
def float64():
    """Compare in float64: token weights have torch's default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def two_engines() -> Data:
    """Responses of another engine: what the trainer scores is not what sampled."""
    d = draw(move=0.5)
    return replace(d, old=2 * d.curr - d.gen)


DATA = {
    "usual": draw,
    "near": partial(draw, move=0.02),  # ratios within GSPO's bounds and without them
    "moved": partial(draw, move=1.5),
    "far_reference": partial(draw, far_ref=2.0),
    "on_policy": partial(draw, on_policy=True),
    "two_engines": two_engines,
}


imported = cache(peers.import_peers)


def verl_loss(
    d: Data,
    *,
    loss_mode: str = "vanilla",
    loss_agg_mode: str = "token-mean",
    advantage: str = "grpo",
    rollout: tuple[str, Any] | None = None,
    entropy_coeff: float = 0.0,
    kl_loss: tuple[str, float] = ("k3", 0.0),
    cliprange_value: float | None = None,
    **actor: Any,
) -> Tensor:
    """Return the loss as verl's workers put it together from core_algos."""
    core, corrections = imported()[:2]
    curr, old, mask = d.log_probs(d.curr), d.log_probs(d.old), d.mask.double()
    weights = None
    if rollout is not None:
        log_ratio = (old - d.log_probs(d.gen)).detach()
        weights, _ = corrections.compute_rollout_correction_weights(log_ratio, mask, *rollout)
    config = ActorConfig(**{"clip_ratio_c": 1e9, **actor})
    if loss_agg_mode == "seq-mean-token-sum-norm":
        config.global_batch_info = {"loss_scale_factor": MOST}
    policy = core.get_policy_loss_fn(loss_mode)
    given = (old, curr, verl_advantages(d, advantage), mask, loss_agg_mode, config)
    loss = policy(*given, rollout_is_weights=weights)[0]
    add = partial(core.agg_loss, loss_mask=mask, loss_agg_mode=loss_agg_mode)
    table = d.curr.log_softmax(-1)
    loss = loss + entropy_coeff * add(loss_mat=(table.exp() * table).sum(-1))
    kind, coeff = kl_loss
    loss = loss + coeff * add(loss_mat=core.kl_penalty(curr, d.log_probs(d.ref), kind))
    if cliprange_value is not None:
        returns = d.old_values + verl_advantages(d, "returns")
        found = core.compute_value_loss(d.values, returns, d.old_values, mask, cliprange_value)
        loss = loss + 0.5 * found[0]
    return loss


def verl_advantages(d: Data, name: str) -> Tensor:
    """Return verl's advantages [B, T]; "returns": those of GAE before they are whitened."""
    core, mask = imported()[0], d.mask.double()
    reward = d.rewards[:, None] * (torch.arange(peers.T) == torch.tensor(LENGTHS)[:, None])
    groups = [row // G for row in range(len(LENGTHS))]
    if name in ("gae", "returns"):
        values = d.old_values
        found = core.compute_gae_advantage_return(reward, values, mask, gamma=1.0, lam=0.95)
        return found[0] if name == "gae" else found[1] - values
    if name == "plus_plus":
        config = ActorConfig(gamma=1.0)
        return core.compute_reinforce_plus_plus_outcome_advantage(reward, mask, config)[0]
    if name == "plus_plus_baseline":
        compute = core.compute_reinforce_plus_plus_baseline_outcome_advantage
        return compute(reward, mask, groups)[0]
    if name == "rloo":
        return core.compute_rloo_outcome_advantage(reward, mask, groups)[0]
    std = {"grpo": False, "grpo_std": True}[name]
    compute = core.compute_grpo_outcome_advantage
    return compute(reward, mask, groups, norm_adv_by_std_in_grpo=std)[0]


def openrlhf_loss(d: Data, *, kl: tuple[str, float] = ("k3", 0.0), **settings: Any) -> Tensor:
    _, _, losses, utils = imported()
    mask, curr = d.mask.double(), d.log_probs(d.curr)
    policy = losses.PolicyLoss(**settings)
    loss = policy(curr, d.log_probs(d.old), verl_advantages(d, "grpo"), mask)[0]
    to_float, torch.Tensor.float = torch.Tensor.float, torch.Tensor.double  # compared in float64
    try:
        term = utils.compute_approx_kl(curr, d.log_probs(d.ref), kl_estimator=kl[0])
    finally:
        torch.Tensor.float = to_float
    return loss + kl[1] * losses.aggregate_loss(term, mask)


LOSSES = {"trl": peers.trl_loss, "verl": verl_loss, "openrlhf": openrlhf_loss}
EACH = [(peer, case) for peer in CASES for case in CASES[peer]]


@pytest.mark.parametrize(("peer", "case"), EACH, ids=[f"{p}: {c['row']}" for p, c in EACH])
def test_the_gradient_is_the_peers_or_differs_as_the_row_has_it(peer, case):
    d, words = DATA[case.get("data", "usual")](), case.get("words", "")
    loss = partial(LOSSES[peer], **case.get("theirs", {}))
    theirs = peer_gradient(loss, d, values=case.get("values", False)) / case.get("times", 1)
    bound = case.get("within", 1e-9) * float(theirs.abs().max())
    gap = float((leash_gradient(d, *split(words)) - theirs).abs().max())
    assert bound > 0
    assert (gap > bound) if case.get("differs") else (gap <= bound), gap
    if not case.get("differs"):
        changed = leash_gradient(d, *split(f"{words} {case['other']}"))
        assert float((changed - theirs).abs().max()) > 1e3 * bound


def split(words: str) -> list[str]:
    """Return the words of a command line; a list in braces is one."""
    return re.findall(r"\S+=\{.*?\}\}|\S+=\{.*?\}|\S+", words)


@pytest.mark.parametrize("page", ["trl", "verl"])
def test_every_marked_row_has_a_case_and_every_case_a_row(page):
    text = (ROOT / "docs" / f"coming_from_{page}.md").read_text()
    rows = {(row, mark == "≠") for row, mark in re.findall(r"(?m)^\| (.+?) \| .+? \| ([=≠])", text)}
    found = {(case["row"], bool(case.get("differs"))) for peer, case in EACH if PAGES[peer] == page}
    assert rows == found
