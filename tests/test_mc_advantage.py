"""Advantages over finished chats: groups that fill up, numbers by hand."""

import statistics
from typing import Any

import pytest
import torch
from contracts import Words, make_policy, prompts
from tensordict import TensorDict, lazy_stack

from envs.chat_env import ChatEnv
from trainer.torchrl.collector import LLMCollector
from trainer.torchrl.loss_modules import GRPOLoss
from trainer.torchrl.mc_advantage import MCAdvantage


def chat(prompt: str, rewards: list[float], done: bool = True) -> TensorDict:
    """Return a finished chat of as many turns as there are rewards, [T]."""
    ends = [False] * (len(rewards) - 1) + [done]
    turns = [TensorDict(reward=[r], done=[end]) for r, end in zip(rewards, ends, strict=True)]
    return lazy_stack([TensorDict(query=prompt, next=turn) for turn in turns])


def standardised(values: list[float]) -> Any:
    """Return values minus their mean over their unbiased standard deviation."""
    mean, std = statistics.mean(values), statistics.stdev(values)
    return pytest.approx([(v - mean) / std for v in values], abs=1e-5)


def column(td: TensorDict) -> list[float]:
    return [float(row["advantage"]) for row in td.unbind(0)]


def test_a_full_group_comes_out_and_the_queue_is_empty():
    advantage = MCAdvantage(2)
    for _ in range(2):  # the second round needs two new chats
        assert advantage(chat("say", [0.0])) is None
        assert advantage(chat("other", [5.0, 1.0])) is None
        assert column(advantage(chat("say", [1.0, 0.0]))) == standardised([0.0, 1.0, 0.0])
        assert column(advantage(chat("other", [2.0]))) == standardised([5.0, 1.0, 2.0])
        assert not advantage.queues


RETURNS = {"sum": [1.0, 4.0], "max": [2.0, 3.0], "mean": [1 / 3, 2.0]}


@pytest.mark.parametrize("how", RETURNS)
def test_a_return_of_a_chat_goes_to_all_its_turns(how):
    both = lazy_stack([*chat("a", [2.0, -1.0, 0.0]).unbind(0), *chat("a", [1.0, 3.0]).unbind(0)])
    got = column(MCAdvantage(2, trajectory_return=how)(both))
    assert [got[0], got[3]] == standardised(RETURNS[how])
    assert got == [got[0]] * 3 + [got[3]] * 2
    assert "advantage" not in both


def test_rewards_of_tokens_are_standardised_over_all_tokens_of_the_group():
    rows = [chat("a", [0.0])[0] for _ in range(2)]
    for row, reward in zip(rows, ([1.0, 2.0], [4.0]), strict=True):
        row["next", "reward"] = torch.tensor(reward).view(-1, 1)
    advantages = [row["advantage"] for row in MCAdvantage(2)(lazy_stack(rows)).unbind(0)]
    assert [a.shape for a in advantages] == [(2, 1), (1, 1)]
    assert torch.cat(advantages).flatten().tolist() == standardised([1.0, 2.0, 4.0])


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [([0.0, 0.0], False), ([1.0, 1.0], False), ([0.0, 1.0], True)],  # the bounds are outside
)
def test_a_group_without_a_signal_is_dropped(rewards, kept):
    advantage = MCAdvantage(2, trajectory_return="sum", keep_return_bounds=(0.0, 1.0))
    out = advantage(lazy_stack([chat("a", [reward])[0] for reward in rewards]))
    assert (out is not None) == kept
    assert not advantage.queues


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: MCAdvantage(1), ValueError, "grpo_size"),
        (lambda: MCAdvantage(2)(chat("a", [0.0], done=False)), RuntimeError, "done"),
        (lambda: MCAdvantage(2)(chat("a", [0.0]).exclude("query")), TypeError, "prompt_key"),
    ],
)
def test_what_cannot_be_a_group_is_named(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_collector_advantage_and_loss_go_together():
    policy = make_policy()
    collector = LLMCollector(
        ChatEnv(Words(2), group_size=3, max_turns=2),
        policy=policy,
        dataloader=[prompts(2, turns=2)],
        yield_completed_trajectories=True,
        postproc=MCAdvantage(3, prompt_key="group_id", trajectory_return="sum"),
    )
    group = next(iter(collector))  # three chats of two turns
    got = column(group)
    assert (
        got[::2] == got[1::2] == standardised(group["next", "reward"].view(3, 2).sum(-1).tolist())
    )
    actor = policy.get_new_version(generate=False)
    lengths = [int(m.sum()) for m in group.get(("masks", "all_response_mask"), as_list=True)]
    mean = sum(a * n for a, n in zip(got, lengths, strict=True)) / sum(lengths)
    rows = list(group.unbind(0))
    chats = lazy_stack([lazy_stack(rows[i : i + 2]) for i in (0, 2, 4)])  # [3, 2]
    for strategy, batch in (("sft", group), ("rlhf", group), ("sft", chats)):
        out = GRPOLoss(actor, masking_strategy=strategy, entropy_bonus=False)(batch)
        # Each sampled token counts once, at the ratio 1.
        assert float(out.loss_objective.detach()) == pytest.approx(-mean, abs=1e-4)
        assert float(out.kl_approx) == pytest.approx(0.0, abs=1e-4)
