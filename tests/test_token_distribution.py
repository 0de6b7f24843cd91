"""The road's distribution and the public ones are one: the same numbers under each mask."""

import pytest
import torch
from contracts import G, Words, make_policy, one_process, rollout
from tensordict import TensorDict, lazy_stack
from torch import Tensor

from benchmarks.measure import peak_bytes
from envs.chat_env import ChatEnv
from policies import token_distribution
from policies.padding import predicted
from policies.token_distribution import NAMES, Head, TokenDistribution, named_mask
from trainer import DynamicRollouts, Rollouts


def last_prompts(batch: TensorDict) -> TensorDict:
    """Return what stood before the last reply of each row, ragged, by a loop over its tokens."""
    rows = []
    for ids, sampled in zip(
        batch["tokens", "full"], batch["masks", "all_response_mask"], strict=True
    ):
        at = max(t for t in range(len(ids)) if sampled[t] and not sampled[t - 1])
        rows.append(TensorDict(prompt=ids[:at]))
    return lazy_stack(rows)


def public(policy, batch: TensorDict, name: str):
    """Return the distribution that the documented methods give for a name."""
    scorer, td = policy.get_new_version(generate=False), batch.select("tokens", "masks")
    td["temperature"] = batch["temperature"]
    if name == "prompt":
        td["turn"] = last_prompts(batch)
        return scorer._get_dist_with_prompt_mask(td, tokens_key=("turn", "prompt"))
    if name == "assistant":
        return scorer._get_dist_with_assistant_mask(td)
    if name == "attention":
        return scorer.get_dist(td)
    return scorer.get_dist(td, mask_key=("masks", "all_response_mask"))


def gradient(policy, values: Tensor) -> Tensor:
    parameters = list(policy.model.parameters())
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(values.sum(), parameters, retain_graph=True)]
    )


def road(scorer, ids, keep, attention, temperature) -> TokenDistribution:
    return scorer._dist(scorer._lay(ids, attention, keep, None), keep, temperature)


@pytest.mark.parametrize("name", NAMES)
def test_the_road_and_the_public_distribution_give_the_same_numbers(monkeypatch, name):
    policy = make_policy(temperature=0.7)
    batch = rollout(policy, turns=3, count=3)
    ids, attention = batch["tokens", "full"], batch["masks", "all_attention_mask"]
    theirs, keep = public(policy, batch, name), named_mask(batch, name)
    assert torch.equal(theirs.mask, keep)
    monkeypatch.setattr(token_distribution, "SLICE", 7 * policy.model.config.vocab_size)
    known = predicted(attention, keep)  # nothing stands before the first token
    mine = road(policy.scorer, ids, known, attention, batch["temperature"])
    assert torch.equal(mine.mask, known)
    scores = mine.scores(ids, learn=True)
    for own, other in (
        (scores.log_probs, theirs.log_prob(ids)),
        (scores.entropy, theirs.entropy()),
    ):
        assert bool((own != 0).any())
        torch.testing.assert_close(own, other.where(known, 0.0), atol=1e-4, rtol=1e-4)
        grads = [gradient(policy, values[known]) for values in (own, other)]
        assert (grads[0] - grads[1]).norm() / grads[1].norm() < 1e-4


@pytest.mark.parametrize("wanted", ["log_probs", "entropy"])
def test_logits_of_whole_sequences_never_exist(monkeypatch, wanted):
    width, ids = 20_000, torch.randint(9, (4, 32))
    head = Head(torch.randn(width, 8, requires_grad=True), None, None)
    dist = TokenDistribution(head, torch.randn(ids.numel(), 8), ids >= 0)
    whole = 4 * ids.numel() * width  # bytes of [B, T, V]

    def run() -> None:
        out = getattr(dist.scores(ids, learn=wanted == "entropy"), wanted)
        torch.autograd.grad(out.sum(), head.weight)

    assert peak_bytes(run) > whole, "the meter sees logits"
    monkeypatch.setattr(token_distribution, "SLICE", 4 * width)
    assert peak_bytes(run) < 0.25 * whole


def test_a_distribution_over_no_token_says_nothing():
    policy, ids = make_policy(), torch.tensor([[5, 6, 7]])
    dist = road(policy.scorer, ids, ids > 9, ids > 0, 1.0)
    scores = dist.scores(ids, learn=True)
    assert not scores.log_probs.any()
    assert not scores.entropy.any()


@pytest.mark.parametrize("kind", [Rollouts, DynamicRollouts])
def test_a_run_learns_the_tokens_that_its_mask_names(kind):
    policy, task = make_policy(), Words(turns=3)
    env = ChatEnv(task, group_size=G, max_turns=3)
    parts = {"task": task, "env": env, "generator": policy, "runtime": one_process(), "size": 4}
    for name in ("response", "assistant", "prompt"):
        batch = kind(**parts, mask=name)(0)
        kept = batch["loss_mask"].any(-1, keepdim=True)
        assert kept.any()
        want = batch["masks", "all_response_mask"]
        if name == "prompt":  # the last turn alone
            starts = torch.tensor([len(row["prompt"]) for row in last_prompts(batch).unbind(0)])
            want = want & (torch.arange(want.shape[1]) >= starts[:, None])
            assert want.sum() < batch["masks", "all_response_mask"].sum()
        assert torch.equal(batch["loss_mask"], want & kept)
    with pytest.raises(ValueError, match="reply"):
        kind(**parts, mask="reply")(0)
