"""LLMCollector: the turns of chats side by side, whole chats, and who asks whom for the policy.
And MCAdvantage, the advantages over chats that it finishes, by hand.

That the KL transforms get the policy from it is a row of the specification (kl.py).
"""

import statistics
from functools import partial
from typing import Any

import pytest
import torch
from support.chats import start
from support.policies import close, make_wrapper, prompts
from support.tasks import Uneven, Words
from tensordict import TensorDict, lazy_stack

from envs.torchrl.chat_env import ChatEnv, DatasetChatEnv
from envs.torchrl.step_counter import StepCounter
from policies.padding import pad
from trainer.collect import collect
from trainer.torchrl.collector import LLMCollector
from trainer.torchrl.loss_modules import GRPOLoss
from trainer.torchrl.mc_advantage import MCAdvantage

TRAJ = ("collector", "traj_ids")
FULL, VALUES = ("tokens", "full"), ("log_probs", "full")
LAST = {"yield_only_last_steps": True}


def uneven(policy=None, **kwargs) -> LLMCollector:
    """Return a collector over chats of one, two and three turns, again and again."""
    env = ChatEnv(Uneven(), max_turns=3)
    data = kwargs.pop("dataloader", [start(Uneven())])
    return LLMCollector(env, policy=policy or make_wrapper(), dataloader=data, **kwargs)


def test_a_chat_that_ends_makes_room_for_the_next_prompt():
    batch = next(iter(uneven(dialog_turns_per_batch=10)))
    assert batch.batch_size == (3, 4)  # 12 turns are the least that fill four columns
    # Chat n has n % 3 + 1 turns; the chats of the next reset wait for the places that get free.
    assert batch[TRAJ].tolist() == [[0, 3, 4, 4], [1, 1, 5, 5], [2, 2, 2, 6]]
    done = batch["next", "done"].squeeze(-1).int().tolist()
    assert done == [[1, 1, 0, 1], [0, 1, 0, 0], [0, 0, 1, 1]]
    flat = next(iter(uneven(dialog_turns_per_batch=10, flatten_data=True)))
    assert flat[TRAJ].tolist() == [0, 3, 4, 4, 1, 1, 5, 5, 2, 2, 2, 6]


@pytest.mark.parametrize("padded", [True, False])
def test_whole_chats_are_those_of_collect_turn_by_turn(padded):
    policy = make_wrapper().get_new_version(pad_output=padded)
    whole = collect(start(Uneven()), ChatEnv(Uneven(), max_turns=3), policy)
    data = iter([start(Uneven())])
    batches = uneven(policy, yield_completed_trajectories=True, dataloader=data)
    chats = {int(chat[TRAJ][0]): list(chat.unbind(0)) for chat in batches}
    assert {number: len(turns) for number, turns in chats.items()} == {0: 1, 1: 2, 2: 3}
    for number, turns in chats.items():
        want, real = whole[number], whole["masks", "all_attention_mask"][number]
        for key in (FULL, ("masks", "all_assistant_mask")):
            assert torch.equal(turns[-1][key], want[key][real])
        for key, same in ((("masks", "all_response_mask"), "loss_mask"), (VALUES, VALUES)):
            summed = pad([turn[key] for turn in turns]).sum(0)  # as long as the whole chat
            close(summed, want[same][real], 1e-5, str(key))
        assert sum(float(t["next", "reward"]) for t in turns) == float(want["reward_raw"].sum())


def test_the_modes_of_histories_and_tokens_give_the_same_ids():
    policy, ids = make_wrapper(), []
    for mode in ("history", "tokens"):
        env = ChatEnv(Uneven(), max_turns=3, input_mode=mode, tokenizer=policy.tokenizer)
        made = {"policy": policy.get_new_version(input_mode=mode), "dataloader": [start(Uneven())]}
        batch = LLMCollector(env, dialog_turns_per_batch=10, flatten_data=True, **made).rollout()
        ids.append([row.tolist() for row in batch.get(FULL, as_list=True)])
    assert ids[0] == ids[1]


def test_only_the_last_turns_are_kept_and_all_are_counted():
    first, second = list(uneven(**LAST, dialog_turns_per_batch=2, total_dialog_turns=6))
    # In the order in which they end: chats 0 and 3 of one turn, then 1 and 2: 2 + 5 turns ran.
    assert first[TRAJ].tolist() == [0, 3]
    assert second[TRAJ].tolist() == [1, 2]
    assert second["turn"].tolist() == [1, 2]


ROWS = Words().rows("train")


@pytest.mark.parametrize(
    "batches", [ROWS, [ROWS[:3], ROWS[3:]], [prompts(4)]], ids=["rows", "lists", "tensordicts"]
)
def test_groups_of_data_are_numbered_and_an_iterator_ends(batches):
    env = ChatEnv(Words(), group_size=2)
    turns = list(LLMCollector(env, policy=make_wrapper(), dataloader=iter(batches), **LAST))
    assert [int(b["group_id"]) for b in turns] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [b["row"][0]["answer"] for b in turns[::2]] == [r["answer"] for r in ROWS]


@pytest.mark.parametrize(
    "data", [[["Hi", "Ho"], "Hey"], [[{"query": "Hi", "n": 3}, {"query": "Ho", "n": 4}]]]
)
def test_texts_and_columns_are_data_and_a_batch_that_they_cannot_fill_is_dropped(data):
    env = partial(ChatEnv, max_turns=1)
    settings = {"policy_factory": make_wrapper, "dialog_turns_per_batch": 2}
    (batch,) = LLMCollector(env, **settings, dataloader=iter(data))
    turns = batch.view(-1).unbind(0)
    asked = [row["history"].full.messages()[0]["content"] for row in turns]
    assert asked == ["Hi", "Ho"]
    assert [row["n"] for row in turns if "n" in row.keys()] in ([], [3, 4])  # noqa: SIM118


@pytest.mark.parametrize(("reset", "second"), [(True, [3, 4, 5]), (False, [3, 1, 2])])
def test_a_reset_gives_up_running_chats(reset, second):
    collector = uneven(dialog_turns_per_batch=3, reset_at_each_iter=reset)
    chats = [collector.rollout()[TRAJ].flatten().tolist() for _ in range(2)]
    assert chats == [[0, 1, 2], second]


def test_postproc_maps_batches_and_may_skip_them():
    counts = iter([None, 2, None, 4])
    collector = uneven(dialog_turns_per_batch=3, total_dialog_turns=12)
    collector.postproc = lambda batch: (n := next(counts)) and (batch, n)
    assert [n for _, n in collector] == [2, 4]


def test_an_environment_may_have_its_own_data():
    rows = [{"query": text, "answer": text[::-1]} for text in ("one", "two", "three")]
    env = DatasetChatEnv.from_dataloader(rows, batch_size=2, repeats=2)
    env = env.append_transform(StepCounter(max_steps=2))
    batch = next(iter(LLMCollector(env, policy=make_wrapper(), dialog_turns_per_batch=8)))
    assert batch[TRAJ].tolist() == [[0, 0, 2, 2], [1, 1, 3, 3]]
    assert [row["answer"] for row in batch[0].unbind(0)] == ["eno"] * 2 + ["owt"] * 2
    assert batch["group_id"].tolist() == [[0, 0, 1, 1]] * 2


def test_new_weights_of_any_form_are_loaded_and_count_a_version():
    policy, other = make_wrapper.__wrapped__(), make_wrapper.__wrapped__()
    state, weight = other.model.state_dict(), policy.model.model.norm.weight
    collector = LLMCollector(ChatEnv(Words()), policy=policy, dataloader=[prompts(1)],
                             dialog_turns_per_batch=1, track_policy_version=True)  # fmt: skip
    assert int(collector.rollout()["policy_version"]) == collector.policy_version == 0
    for version, new in enumerate((other, state, TensorDict(state).unflatten_keys(".")), start=1):
        torch.nn.init.zeros_(weight)
        collector.update_policy_weights_(new)
        assert torch.equal(weight, state["model.norm.weight"])
        row = collector.rollout()
        assert int(row["policy_version"]) == collector.policy_version == version
    collector.update_policy_weights_()  # the policy itself was trained
    assert collector.policy_version == version + 1
    untracked = uneven(policy, dialog_turns_per_batch=1)  # the policy's own
    assert untracked.rollout()["policy_version"].tolist() == [[version + 1]] * 3
    assert untracked.policy_version is None


def several():
    return make_wrapper().get_new_version(num_samples=2)


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({}, ValueError, "dialog_turns_per_batch"),
        ({"policy": None}, TypeError, "policy_factory"),
        ({**LAST, "dataloader": [3]}, TypeError, "got 3"),
        ({**LAST, "dataloader": [{"text": "Hi"}]}, TypeError, "'query'"),
        ({**LAST, "policy": None, "policy_factory": several}, ValueError, "num_samples"),
    ],
)
def test_what_cannot_be_collected_is_named(kwargs, error, match):
    with pytest.raises(error, match=match):
        LLMCollector(ChatEnv(Words()), **{"policy": make_wrapper(), **kwargs}).rollout()


# MCAdvantage.


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


def test_a_return_of_a_chat_goes_to_all_its_turns():
    """Of three chats: two returns are the same once they are standardised."""
    chats = ([2.0, -1.0, 0.0], [1.0, 3.0], [0.0])
    rows = lazy_stack([turn for rewards in chats for turn in chat("a", rewards).unbind(0)])
    for how, returns in {"sum": [1, 4, 0], "max": [2, 3, 0], "mean": [1 / 3, 2, 0]}.items():
        got = column(MCAdvantage(3, trajectory_return=how)(rows))
        assert [got[0], got[3], got[5]] == standardised(returns)
        assert got == [got[0]] * 3 + [got[3]] * 2 + [got[5]]
    assert "advantage" not in rows


def test_a_group_without_a_signal_is_dropped():
    for rewards, kept in ((0.0, 0.0), False), ((1.0, 1.0), False), ((0.0, 1.0), True):
        advantage = MCAdvantage(2, trajectory_return="sum", keep_return_bounds=(0.0, 1.0))
        out = advantage(lazy_stack([chat("a", [reward])[0] for reward in rewards]))
        assert (out is not None) == kept, "the bounds are outside"
        assert not advantage.queues


def test_what_cannot_be_a_group_is_named():
    with pytest.raises(RuntimeError, match="done"):
        MCAdvantage(2)(chat("a", [0.0], done=False))
    with pytest.raises(TypeError, match="prompt_key"):
        MCAdvantage(2)(chat("a", [0.0]).exclude("query"))


def test_collector_advantage_and_loss_go_together():
    policy, env = make_wrapper(), ChatEnv(Words(2), group_size=3, max_turns=2)
    whole = {"dataloader": [prompts(2, turns=2)], "yield_completed_trajectories": True}
    advantage = MCAdvantage(3, prompt_key="group_id", trajectory_return="sum")
    group = next(iter(LLMCollector(env, policy=policy, postproc=advantage, **whole)))
    got, rewards = column(group), group["next", "reward"].view(3, 2)  # three chats of two turns
    assert got[::2] == got[1::2] == standardised(rewards.sum(-1).tolist())
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
