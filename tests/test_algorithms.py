"""Every algorithm of conf/algorithm against its paper: loops over sequences and tokens, float64.

The advantage, the objective and the aggregation are those that its YAML composes; what they are
compared with is written from the paper's equation, with the paper's numbers.
"""

import math

import pytest
import torch
from contracts import Words, leash, make_policy, one_process, plain_log_probs
from papers import (
    BETA,
    PAPERS,
    Case,
    G,
    agrees_with_its_paper,
    batch_of,
    beta_of,
    case,
)
from torch import Tensor

from envs.chat_env import ChatEnv
from trainer.advantage import BetaAdvantage, GroupAdvantage, beta_density
from trainer.demonstrations import Demonstrations, ReferenceLogProbs
from trainer.surrogates import RATIOS, Bounds, clipped_term, is_clipped


@pytest.mark.parametrize("name", PAPERS)
def test_loss_and_gradient_are_those_of_the_paper(name):
    clipped = agrees_with_its_paper(name)
    bounded = name not in ("rloo", "minor_sft")
    assert not bounded or 0 < clipped.double().mean() < 1, "the case needs tokens of both kinds"


# The parts.


def advantage_of(part=GroupAdvantage, c: Case | None = None, where="loss", **options) -> Tensor:
    return part(group_size=G, leash=leash(BETA, where), **options)(batch_of(c or case()))[
        "advantage"
    ]


def test_a_group_need_not_lie_together():
    batch = batch_of(case())
    made = GroupAdvantage(group_size=G, leash=leash(BETA))
    want = made(batch.clone())["advantage"]
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    assert torch.equal(made(batch[order])["advantage"], want[order])
    batch["group_id"][0] = 1
    with pytest.raises(ValueError, match="groups of 4 rows"):
        made(batch)


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


def test_whitened_advantages_have_mean_0_and_std_1_over_the_kept_tokens_of_all_ranks():
    batch = batch_of(case())
    mask = batch["loss_mask"]
    a = advantage_of(whiten=True, scale_by_std=False)
    assert a[mask].mean() == pytest.approx(0.0, abs=1e-12)
    assert a[mask].std() == pytest.approx(1.0, rel=1e-3)  # 1e-4 is added to it
    assert not a[~mask].any()

    class Beside:
        """Another rank, whose advantages are all 3."""

        def sum(self, values: Tensor) -> Tensor:
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 1:  # count and sum
                return values + torch.tensor([10.0, 30.0])
            return values + 10 * (3.0 - self.mean) ** 2

    raw = advantage_of(scale_by_std=False)[mask]
    everyone = torch.cat([raw, torch.full((10,), 3.0)])
    other = Beside()
    other.mean = float(everyone.mean())
    got = advantage_of(whiten=True, scale_by_std=False, runtime=other)
    torch.testing.assert_close(got[mask], (raw - everyone.mean()) / (everyone.std() + 1e-4))


def test_an_advantage_has_the_bound_that_it_is_given():
    free, bound = advantage_of(), 0.8
    assert free.max() > bound
    assert free.min() < -bound
    assert torch.equal(advantage_of(clip_advantage=bound), free.clamp(-bound, bound))


@pytest.mark.parametrize(("a", "b"), [(3.0, 2.0), (1.0, 4.0), (0.5, 0.5)])
def test_the_beta_density_gives_the_least_variance(a, b):
    """What BNPO proves: the variance goes with E[p (1 - p) / f(p)^2], p from Beta(a, b)."""
    p = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    chance = torch.distributions.Beta(torch.tensor(a).double(), torch.tensor(b).double())
    wanted = p * (1 - p) * chance.log_prob(p).exp()

    def variance(x: float, y: float) -> float:
        f = torch.tensor([beta_of(v, x, y) for v in p.tolist()], dtype=torch.float64)
        return float((wanted / f**2).mean())

    total = a + b
    ours = beta_density(p, a / total, math.sqrt(a * b / (total**2 * (total + 1))))
    least = float((wanted / ours**2).mean())
    assert least == pytest.approx(variance(1 + a / 3, 1 + b / 3), rel=1e-9)
    for x, y in ((0.05, 0.0), (-0.05, 0.0), (0.0, 0.05), (0.0, -0.05)):
        assert variance(1 + a / 3 + x, 1 + b / 3 + y) > least


def test_bnpo_without_spread_is_reinforce_with_a_baseline_and_wants_rewards_from_0_to_1():
    c = case()
    same = batch_of(c)
    same["reward_raw"] = torch.cat([same["reward_raw"][:G]] * 2)
    same["loss_mask"] = torch.cat([same["loss_mask"][:G]] * 2)
    options = {"group_size": G, "leash": leash(BETA)}
    plain = GroupAdvantage(**options, scale_by_std=False)(same.clone())["advantage"]
    made = BetaAdvantage(**options, scale_by_std=False)
    torch.testing.assert_close(made(same.clone())["advantage"], plain)
    same["reward_raw"] = -same["reward_raw"]
    with pytest.raises(ValueError, match="rewards from 0 to 1"):
        made(same)
    with pytest.raises(ValueError, match="scale_by_std=false"):
        BetaAdvantage(**options)(batch_of(c))


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
