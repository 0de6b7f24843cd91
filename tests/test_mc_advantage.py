"""Advantages and selection over finished chats: groups that fill up, numbers by hand."""

import statistics

import pytest
import torch
from contracts import Words, make_policy, prompts
from tensordict import TensorDict, lazy_stack

from envs.chat_env import ChatEnv
from trainer.torchrl.collector import LLMCollector
from trainer.torchrl.loss_modules import GRPOLoss
from trainer.torchrl.mc_advantage import MCAdvantage


def chat(prompt: str | int, rewards: list[float], done: bool = True) -> TensorDict:
    """Return a finished chat of as many turns as there are rewards, [T]."""
    size = len(rewards)
    ends = torch.zeros(size, 1, dtype=torch.bool)
    ends[-1] = done
    following = TensorDict({"reward": torch.tensor(rewards).view(size, 1), "done": ends}, [size])
    td = TensorDict({"next": following}, [size])
    if isinstance(prompt, int):
        return td.set("query", torch.full((size,), prompt))
    return lazy_stack([row.set("query", prompt) for row in td.unbind(0)])


def standardised(values: list[float]) -> list[float]:
    """Return values minus their mean over their unbiased standard deviation."""
    mean, std = statistics.mean(values), statistics.stdev(values)
    return [(v - mean) / std for v in values]


def column(td: TensorDict, key: str = "advantage") -> list[float]:
    return [float(row[key]) for row in td.unbind(0)]


@pytest.mark.parametrize("name", ["say", 7])
def test_a_full_group_comes_out_and_the_queue_is_empty(name):
    advantage = MCAdvantage(2)
    for _ in range(2):  # the second round needs two new chats
        assert advantage(chat(name, [0.0])) is None
        assert advantage(chat("other", [5.0, 1.0])) is None
        out = advantage(chat(name, [1.0, 0.0]))
        assert column(out) == pytest.approx(standardised([0.0, 1.0, 0.0]), abs=1e-5)
        assert column(advantage.inv(chat("other", [2.0]))) == pytest.approx(
            standardised([5.0, 1.0, 2.0]), abs=1e-5
        )
        assert not advantage.queues


@pytest.mark.parametrize(
    ("how", "returns"), [("sum", [1.0, 4.0]), ("max", [2.0, 3.0]), ("mean", [1 / 3, 2.0])]
)
def test_a_return_of_a_chat_goes_to_all_its_turns(how, returns):
    advantage = MCAdvantage(2, trajectory_return=how)
    given = lazy_stack([*chat("a", [2.0, -1.0, 0.0]).unbind(0), *chat("a", [1.0, 3.0]).unbind(0)])
    first, second = standardised(returns)
    assert column(advantage(given)) == pytest.approx([first] * 3 + [second] * 2, abs=1e-5)
    assert "advantage" not in given
    # Chats beside each other, [B, T].
    beside = torch.stack([chat(3, [2.0, 0.0]), chat(3, [1.0, 3.0])])
    want = standardised({"sum": [2.0, 4.0], "max": [2.0, 3.0], "mean": [1.0, 2.0]}[how])
    out = advantage(beside)
    assert column(out) == pytest.approx([w for w in want for _ in range(2)], abs=1e-5)


def test_rewards_of_tokens_are_standardised_over_all_tokens_of_the_group():
    rows = [chat("a", [0.0]), chat("a", [0.0])]
    for row, reward in zip(rows, ([1.0, 2.0], [4.0]), strict=True):
        row[0]["next", "reward"] = torch.tensor(reward).view(-1, 1)
    out = MCAdvantage(2)(lazy_stack([row[0] for row in rows]))
    want = standardised([1.0, 2.0, 4.0])
    got = [row["advantage"] for row in out.unbind(0)]
    assert [g.shape for g in got] == [(2, 1), (1, 1)]
    assert torch.cat(got).flatten().tolist() == pytest.approx(want, abs=1e-5)


def test_a_group_without_a_signal_is_dropped():
    advantage = MCAdvantage(2, trajectory_return="sum", keep_return_bounds=(0.0, 1.0))
    kept = {}
    for name, rewards in (("none", [0.0, 0.0]), ("all", [1.0, 1.0]), ("some", [0.0, 1.0])):
        advantage(chat(name, rewards[:1]))
        kept[name] = advantage(chat(name, rewards[1:]))
    assert kept["none"] is None
    assert kept["all"] is None  # the bounds themselves are outside
    assert column(kept["some"]) == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-5)
    assert not advantage.queues
    without = MCAdvantage(2, trajectory_return="sum")
    equal = without(lazy_stack([chat("a", [1.0])[0], chat("a", [1.0])[0]]))
    assert column(equal) == [0.0, 0.0]


def test_what_cannot_be_a_group_is_named():
    for wrong in (1, 2.5, "4"):
        with pytest.raises(ValueError, match=f"a whole grpo_size >= 2, got {wrong!r}"):
            MCAdvantage(wrong)
    with pytest.raises(RuntimeError, match="Expected the trajectory to be done, got 2 turns"):
        MCAdvantage(2)(chat("a", [0.0, 0.0], done=False))
    with pytest.raises(TypeError, match="prompt_key 'query', got NoneType"):
        MCAdvantage(2)(chat("a", [0.0]).exclude("query"))
    with pytest.raises(ValueError, match="low < high"):
        MCAdvantage(2, trajectory_return="sum", keep_return_bounds=(1.0, 1.0))


def test_collector_advantage_and_loss_go_together():
    policy = make_policy()
    collector = LLMCollector(
        ChatEnv(Words(2), group_size=3, max_turns=2),
        policy=policy,
        dataloader=[prompts(2, turns=2)],
        yield_completed_trajectories=True,
        postproc=MCAdvantage(3, prompt_key="group_id", trajectory_return="sum"),
    )
    group = next(iter(collector))
    assert group.batch_size == (6,)  # three chats of two turns
    assert set(group["group_id"].tolist()) in ({0}, {1})
    returns = group["next", "reward"].view(3, 2).sum(-1).tolist()
    want = [a for a in standardised(returns) for _ in range(2)]
    assert column(group) == pytest.approx(want, abs=1e-5)
    actor = policy.get_new_version(generate=False)
    lengths = torch.tensor([int(m.sum()) for m in group.get(("masks", "all_response_mask"),
                                                            as_list=True)])  # fmt: skip
    mean = float((torch.tensor(want) * lengths).sum() / lengths.sum())
    rows = list(group.unbind(0))
    chats = lazy_stack([lazy_stack(rows[i : i + 2]) for i in (0, 2, 4)])  # [3, 2]
    for strategy, given in (("sft", group), ("rlhf", group), ("sft", chats)):
        # Each sampled token counts once, at the ratio 1.
        out = GRPOLoss(actor, masking_strategy=strategy, entropy_bonus=False)(given)
        assert float(out.loss_objective.detach()) == pytest.approx(-mean, abs=1e-4)
        assert float(out.ESS) == pytest.approx(1.0, abs=1e-4)
        assert float(out.kl_approx) == pytest.approx(0.0, abs=1e-4)
        assert float(out.clip_fraction) == 0.0
