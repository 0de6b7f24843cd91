"""LLMCollector: the turns of chats side by side, whole chats, and who asks whom for the policy.

That the KL transforms get the policy from it is a row of the specification (kl.py).
"""

from functools import partial

import pytest
import torch
from contracts import Words, make_policy, prompts
from tensordict import TensorDict
from uneven_chats import Uneven, start

from envs.chat_env import ChatEnv, DatasetChatEnv
from envs.transforms.step_counter import StepCounter
from trainer.collect import collect
from trainer.torchrl.collector import LLMCollector

TRAJ = ("collector", "traj_ids")
FULL = ("tokens", "full")
LAST = {"yield_only_last_steps": True}


def uneven(policy=None, **kwargs) -> LLMCollector:
    """Return a collector over chats of one, two and three turns, again and again."""
    env = ChatEnv(Uneven(), max_turns=3)
    data = kwargs.pop("dataloader", [start(Uneven())])
    return LLMCollector(env, policy=policy or make_policy(), dataloader=data, **kwargs)


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
    def widened(row, key):  # up to the length of the whole chat
        return torch.nn.functional.pad(row[key], (0, size - len(row[key])))

    policy = make_policy().get_new_version(pad_output=padded)
    whole = collect(start(Uneven()), ChatEnv(Uneven(), max_turns=3), policy)
    data = iter([start(Uneven())])
    batches = uneven(policy, yield_completed_trajectories=True, dataloader=data)
    chats = {int(chat[TRAJ][0]): list(chat.unbind(0)) for chat in batches}
    assert {number: len(turns) for number, turns in chats.items()} == {0: 1, 1: 2, 2: 3}
    for number, turns in chats.items():
        want, real = whole[number], whole["masks", "all_attention_mask"][number]
        size = int(real.sum())
        for key in (FULL, ("masks", "all_assistant_mask")):
            assert turns[-1][key].tolist() == want[key][real].tolist()
        marks = sum(widened(t, ("masks", "all_response_mask")).int() for t in turns)
        assert marks.tolist() == want["loss_mask"][real].int().tolist()
        values = sum(widened(t, ("log_probs", "full")) for t in turns)
        torch.testing.assert_close(values, want["log_probs", "full"][real], atol=1e-5, rtol=0)
        reward = sum(float(t["next", "reward"]) for t in turns)
        assert reward == float(want["reward_raw"].sum())


@pytest.mark.parametrize("mode", ["tokens", "text"])
def test_other_input_modes_give_the_same_ids(mode):
    policy, ids = make_policy(), {}
    for way in ("history", mode):
        env = ChatEnv(Uneven(), max_turns=3, input_mode=way, tokenizer=policy.tokenizer)
        data = iter([start(Uneven())])
        version = policy.get_new_version(input_mode=way)
        whole = {"yield_completed_trajectories": True}
        played = LLMCollector(env, policy=version, dataloader=data, **whole)
        ids[way] = [[row.tolist() for row in chat.get(FULL, as_list=True)] for chat in played]
    turns = (0, -1) if mode == "tokens" else (0,)  # texts of later turns are tokenised again
    for turn in turns:
        assert [chat[turn] for chat in ids[mode]] == [chat[turn] for chat in ids["history"]]


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
    turns = list(LLMCollector(env, policy=make_policy(), dataloader=iter(batches), **LAST))
    assert [int(b["group_id"]) for b in turns] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [b["row"][0]["answer"] for b in turns[::2]] == [r["answer"] for r in ROWS]


@pytest.mark.parametrize(
    "data", [[["Hi", "Ho"], "Hey"], [[{"query": "Hi", "n": 3}, {"query": "Ho", "n": 4}]]]
)
def test_texts_and_columns_are_data_and_a_batch_that_they_cannot_fill_is_dropped(data):
    env = partial(ChatEnv, max_turns=1)
    settings = {"policy_factory": make_policy, "dialog_turns_per_batch": 2}
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
    batch = next(iter(LLMCollector(env, policy=make_policy(), dialog_turns_per_batch=8)))
    assert batch[TRAJ].tolist() == [[0, 0, 2, 2], [1, 1, 3, 3]]
    assert [row["answer"] for row in batch[0].unbind(0)] == ["eno"] * 2 + ["owt"] * 2
    assert batch["group_id"].tolist() == [[0, 0, 1, 1]] * 2


def test_new_weights_of_any_form_are_loaded_and_count_a_version():
    policy, other = make_policy.__wrapped__(), make_policy.__wrapped__()
    with torch.no_grad():
        for p in other.model.parameters():
            p.mul_(1.1)
    collector = LLMCollector(ChatEnv(Words()), policy=policy, dataloader=[prompts(1)],
                             dialog_turns_per_batch=1, track_policy_version=True)  # fmt: skip
    name = "model.norm.weight"
    assert int(collector.rollout()["policy_version"]) == collector.policy_version == 0
    state = other.model.state_dict()
    ways = [(other,), (state,), (TensorDict(state).unflatten_keys("."),), ()]
    for version, weights in enumerate(ways, start=1):
        with torch.no_grad():
            policy.model.model.norm.weight.zero_() if weights else None
        collector.update_policy_weights_(*weights)
        assert torch.equal(policy.model.state_dict()[name], state[name])
        row = collector.rollout()
        assert int(row["policy_version"]) == collector.policy_version == version
    untracked = uneven(policy, dialog_turns_per_batch=1)  # the policy's own
    assert untracked.rollout()["policy_version"].tolist() == [[len(ways)]] * 3
    assert untracked.policy_version is None


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({}, ValueError, "dialog_turns_per_batch"),
        ({"policy": None}, TypeError, "policy_factory"),
        ({**LAST, "dataloader": [3]}, TypeError, "got 3"),
        ({**LAST, "dataloader": [{"text": "Hi"}]}, TypeError, "'query'"),
        ({**LAST, "policy": {"num_samples": 2}}, ValueError, "num_samples"),
    ],
)
def test_what_cannot_be_collected_is_named(kwargs, error, match):
    kwargs = {"policy": {}, **kwargs}
    if kwargs["policy"] is not None:
        kwargs["policy"] = make_policy().get_new_version(**kwargs["policy"])
    with pytest.raises(error, match=match):
        LLMCollector(ChatEnv(Words()), **kwargs).rollout()
