"""Every algorithm of conf/algorithm against its paper: loops over sequences and tokens, float64.

The advantage, the objective and the aggregation are those that its YAML composes; what they are
compared with is written from the paper's equation, with the paper's numbers.
"""

import pytest
import torch
from contracts import Words, leash, make_policy, one_process, plain_log_probs
from papers import BETA, PAPERS, G, agrees_with_its_paper, batch_of, case

from envs.chat_env import ChatEnv
from trainer.advantage import GroupAdvantage
from trainer.demonstrations import Demonstrations, ReferenceLogProbs
from trainer.surrogates import RATIOS, Bounds, clipped_term, is_clipped


@pytest.mark.parametrize("name", PAPERS)
def test_loss_and_gradient_are_those_of_the_paper(name):
    clipped = agrees_with_its_paper(name)
    bounded = name not in ("rloo", "minor_sft")
    assert not bounded or 0 < clipped.double().mean() < 1, "the case needs tokens of both kinds"


def test_a_group_need_not_lie_together_and_an_advantage_has_its_bound():
    batch, order = batch_of(case()), torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    want = GroupAdvantage(group_size=G, leash=leash(BETA))(batch.clone())["advantage"]
    assert want.abs().max() > 0.8
    bounded = GroupAdvantage(group_size=G, leash=leash(BETA), clip_advantage=0.8)
    assert torch.equal(bounded(batch[order])["advantage"], want[order].clamp(-0.8, 0.8))


def test_a_token_that_is_clipped_with_its_sequence_has_no_gradient():
    c = case()
    mask, curr = batch_of(c)["loss_mask"], c.curr.clone().requires_grad_()
    bounds = Bounds(3e-4, 4e-4)
    a = torch.ones_like(curr)
    r = RATIOS["sequence"](curr, c.gen, mask)
    (clipped_term(curr, c.gen, r, a, bounds) * mask).sum().backward()
    stopped = is_clipped(curr, c.gen, r.detach(), a, bounds) & mask
    assert torch.equal(curr.grad == 0, stopped | ~mask)
    assert 0 < stopped.sum() < mask.sum()


def test_two_sided_clipping_by_hand():
    """Dual clip (arXiv 1912.09729 eq. 5), c = 3: it acts where the advantage is negative."""
    r = torch.tensor([2.0, 4.0, 4.0, 0.5], dtype=torch.float64)
    a = torch.tensor([-1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    curr, gen, bounds = r.log().requires_grad_(), torch.zeros_like(r), Bounds(0.2, 0.2, most=3.0)
    term = clipped_term(curr, gen, curr.exp(), a, bounds)
    assert term.tolist() == pytest.approx([2.0, 3.0, -1.2, 0.8])
    (gradient,) = torch.autograd.grad(term.sum(), curr)
    assert gradient.tolist() == pytest.approx([2.0, 0.0, 0.0, 0.0])
    assert is_clipped(curr, gen, r, a, bounds).tolist() == [False, True, True, True]


@torch.no_grad()
def test_the_reference_of_minor_sft_is_the_policy_as_it_started():
    policy, task = make_policy.__wrapped__(), Words()
    parts = {"task": task, "env": ChatEnv(task), "policy": policy, "runtime": one_process()}
    batch = Demonstrations(size=4, **parts)(0)
    reference = ReferenceLogProbs(policy=policy, micro_batch_tokens=40)
    ids, attended = batch["tokens", "full"], batch["masks", "all_attention_mask"]
    want = torch.zeros(ids.shape)
    for row, keep, out in zip(ids, attended, want, strict=True):
        out[keep] = plain_log_probs(policy, row[keep], 1.0).float()
    for p in policy.model.parameters():
        p.mul_(1.1)
    got = reference(batch)["ref_log_probs", "full"]
    torch.testing.assert_close(got, want * batch["loss_mask"], atol=1e-5, rtol=1e-5)
