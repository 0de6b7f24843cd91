"""LLMCollector: the turns of chats side by side, whole chats, and who asks whom for the policy."""

import gc

import pytest
import torch
from contracts import Words, make_policy, prompts
from tensordict import TensorDict
from uneven_chats import Uneven, start

from envs.chat_env import ChatEnv, DatasetChatEnv
from envs.env import EnvBase, TransformedEnv
from envs.transforms import RetrieveKL
from envs.transforms.policy_version import PolicyVersion
from envs.transforms.step_counter import StepCounter
from envs.transforms.transform import Transform
from policies.load import load_reference
from trainer.collect import collect
from trainer.torchrl.collector import LLMCollector

TRAJ = ("collector", "traj_ids")
FULL = ("tokens", "full")


def uneven(policy=None, **kwargs) -> LLMCollector:
    """Return a collector over chats of one, two and three turns, again and again."""
    env = ChatEnv(Uneven(), max_turns=3)
    data = kwargs.pop("dataloader", [start(Uneven())])
    return LLMCollector(env, policy=policy or make_policy(), dataloader=data, **kwargs)


def masked(row: TensorDict, name: str, length: int) -> torch.Tensor:
    """Return a mask or the log-probs of a turn, filled to the length of the whole chat."""
    value = row[("log_probs", "full") if name == "log_probs" else ("masks", f"all_{name}_mask")]
    return torch.nn.functional.pad(value, (0, length - len(value)))


def test_a_chat_that_ends_makes_room_for_the_next_prompt():
    batch = next(iter(uneven(dialog_turns_per_batch=10)))
    assert batch.batch_size == (3, 4)  # 12 turns are the least that fill four columns
    # Chat n has n % 3 + 1 turns; the chats of the next reset wait for the places that get free.
    assert batch[TRAJ].tolist() == [[0, 3, 4, 4], [1, 1, 5, 5], [2, 2, 2, 6]]
    assert batch["next", "done"].squeeze(-1).int().tolist() == [
        [1, 1, 0, 1],
        [0, 1, 0, 0],
        [0, 0, 1, 1],
    ]
    flat = next(iter(uneven(dialog_turns_per_batch=10, flatten_data=True)))
    assert flat[TRAJ].tolist() == [0, 3, 4, 4, 1, 1, 5, 5, 2, 2, 2, 6]
    ids = flat.get(FULL, as_list=True)
    assert ids[11][: len(ids[10])].tolist() != ids[10].tolist()  # another chat
    assert ids[10][: len(ids[9])].tolist() == ids[9].tolist()  # the same, one turn later


@pytest.mark.parametrize("padded", [True, False])
def test_whole_chats_are_those_of_collect_turn_by_turn(padded):
    policy = make_policy().get_new_version(pad_output=padded)
    whole = collect(start(Uneven()), ChatEnv(Uneven(), max_turns=3), policy)
    chats = {}
    data = iter([start(Uneven())])
    for chat in uneven(policy, yield_completed_trajectories=True, dataloader=data):
        chats[int(chat[TRAJ][0])] = list(chat.unbind(0))
    assert sorted(chats) == [0, 1, 2]
    for number, turns in chats.items():
        assert len(turns) == number + 1
        real = whole["masks", "all_attention_mask"][number]
        size = int(real.sum())
        want = whole[number]
        assert turns[-1][FULL].tolist() == want[FULL][real].tolist()
        marks = [masked(t, "response", size) for t in turns]
        assert torch.stack(marks).sum(0).tolist() == want["loss_mask"][real].int().tolist()
        values = sum(masked(t, "log_probs", size) for t in turns)
        torch.testing.assert_close(values, want["log_probs", "full"][real], atol=1e-5, rtol=0)
        last = masked(turns[-1], "assistant", size)
        assert last.tolist() == want["masks", "all_assistant_mask"][real].tolist()
        reward = sum(float(t["next", "reward"]) for t in turns)
        assert reward == float(want["reward_raw"].sum())


@pytest.mark.parametrize("mode", ["tokens", "text"])
def test_other_input_modes_say_the_same(mode):
    policy = make_policy()
    said = {}
    for way in ("history", mode):
        env = ChatEnv(Uneven(), max_turns=3, input_mode=way, tokenizer=policy.tokenizer)
        data = iter([start(Uneven())])
        played = LLMCollector(env, policy=policy.get_new_version(input_mode=way), dataloader=data,
                              yield_completed_trajectories=True)  # fmt: skip
        said[way] = [chat.get(FULL, as_list=True) for chat in played]
    first = [chat[0].tolist() for chat in said["history"]]
    assert [chat[0].tolist() for chat in said[mode]] == first
    if mode == "tokens":  # texts of later turns are tokenised again
        assert [c[-1].tolist() for c in said[mode]] == [c[-1].tolist() for c in said["history"]]


def test_only_the_last_turns_are_kept_and_all_are_counted():
    collector = uneven(yield_only_last_steps=True, dialog_turns_per_batch=2, total_dialog_turns=6)
    first, second = list(collector)
    # In the order in which they end: chats 0 and 3 of one turn, then 1 and 2: 2 + 5 turns ran.
    assert first[TRAJ].tolist() == [0, 3]
    assert second[TRAJ].tolist() == [1, 2]
    assert second["turn"].tolist() == [1, 2]
    assert second["next", "done"].all()


def test_data_are_rows_texts_or_tensordicts_and_an_iterator_ends():
    rows = Words().rows("train")
    policy = make_policy()
    for data in (iter(rows), iter([rows[:3], rows[3:]]), iter([prompts(4)])):
        env = ChatEnv(Words(), group_size=2)
        done = LLMCollector(env, policy=policy, dataloader=data, yield_only_last_steps=True)
        got = list(done)
        assert [int(b["group_id"]) for b in got] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert [b["row"][0]["answer"] for b in got[::2]] == [r["answer"] for r in rows]
    talk = LLMCollector(
        lambda: ChatEnv(max_turns=1),
        policy_factory=make_policy,
        dialog_turns_per_batch=2,
        dataloader=iter([["Hi", "Ho"], "Hey"]),
    )
    last = {"yield_only_last_steps": True}
    rows = [{"query": "Hi", "answer": 3, "more": 1}, {"query": "Ho", "answer": 4}]
    asked = list(LLMCollector(ChatEnv(max_turns=1), policy=policy, dataloader=iter([rows]), **last))
    assert [(row["query"], row["answer"]) for b in asked for row in b.unbind(0)] == [
        ("Hi", 3),
        ("Ho", 4),
    ]
    assert [b["history"].full.chats()[0][0]["content"] for b in asked] == ["Hi", "Ho"]
    (batch,) = talk  # the second cannot be filled
    said = [row["history"].full.messages() for row in batch.view(-1).unbind(0)]
    assert [chat[0] for chat in said] == [{"role": "user", "content": t} for t in ("Hi", "Ho")]
    assert {chat[1]["role"] for chat in said} == {"assistant"}
    with pytest.raises(TypeError, match=r"dicts with 'messages'.*got 3"):
        next(iter(LLMCollector(env, policy=policy, dataloader=[3], dialog_turns_per_batch=1)))
    with pytest.raises(TypeError, match=r"'messages' or 'query'.*'text'"):
        next(iter(LLMCollector(env, policy=policy, dataloader=[{"text": "Hi"}], **last)))
    with pytest.raises(RuntimeError, match="reset expected a td"):
        next(iter(LLMCollector(env, policy=policy, dialog_turns_per_batch=1)))


def test_a_reset_gives_up_running_chats():
    collector = uneven(dialog_turns_per_batch=3, reset_at_each_iter=True)
    assert [collector.rollout()[TRAJ].flatten().tolist() for _ in range(2)] == [
        [0, 1, 2],
        [3, 4, 5],
    ]
    going = uneven(dialog_turns_per_batch=3)
    assert [going.rollout()[TRAJ].flatten().tolist() for _ in range(2)] == [[0, 1, 2], [3, 1, 2]]


def test_postproc_maps_batches_and_may_skip_them():
    seen = []

    def every_second(batch):
        seen.append(batch)
        return None if len(seen) % 2 else batch.set("seen", torch.full(batch.shape, len(seen)))

    collector = uneven(dialog_turns_per_batch=3, total_dialog_turns=12)
    collector.set_postproc(every_second)
    assert [int(b["seen"][0, 0]) for b in collector] == [2, 4]


def test_an_environment_may_have_its_own_data():
    rows = [{"query": text, "answer": text[::-1]} for text in ("one", "two", "three")]
    env = DatasetChatEnv.from_dataloader(rows, batch_size=2, repeats=2)
    env = env.append_transform(StepCounter(max_steps=2))
    batch = next(iter(LLMCollector(env, policy=make_policy(), dialog_turns_per_batch=8)))
    assert batch.batch_size == (2, 4)
    assert batch[TRAJ].tolist() == [[0, 0, 2, 2], [1, 1, 3, 3]]
    assert [row["answer"] for row in batch[0].unbind(0)] == ["eno"] * 2 + ["owt"] * 2
    assert batch["group_id"].tolist() == [[0, 0, 1, 1]] * 2


class Plain(EnvBase):
    """Count to two by a policy that is no language model."""

    def _reset(self, td):
        return TensorDict({"count": torch.zeros(2, 1)}, batch_size=[2])

    def _step(self, td):
        count = td["count"] + td["action"]
        return TensorDict({"count": count, "done": count >= 2, "reward": count}, batch_size=[2])


def test_any_environment_and_any_policy_can_be_collected_from():
    collector = LLMCollector(Plain(), policy=lambda td: td.set("action", torch.ones(2, 1)),
                             dialog_turns_per_batch=6)  # fmt: skip
    batch = next(iter(collector))
    assert batch["count"].squeeze(-1).tolist() == [[0, 1, 0]] * 2
    assert collector.get_policy_model() is collector.policy


def retrieved(gen_model, **kwargs) -> list[torch.Tensor]:
    """Return the KL penalties of all turns, from one or the other generation model."""
    policy = make_policy().get_new_version(return_log_probs=False)
    reference = load_reference(make_policy()).get_new_version(pad_output=False, score_mask_key=None)
    with torch.no_grad():
        for p in reference.model.parameters():
            p.mul_(0.9)
    kl = RetrieveKL(gen_model, ref_model=reference, add_to_reward=False)
    env = TransformedEnv(TransformedEnv(ChatEnv(Uneven(), max_turns=3), kl), Transform([]))
    data = [start(Uneven())]
    collector = LLMCollector(env, policy=policy, dataloader=data, dialog_turns_per_batch=9)
    return next(iter(collector)).view(-1).get(("next", "kl_penalty"), as_list=True)


def test_the_kl_transform_gets_the_policy_from_the_collector():
    scoring = make_policy().get_new_version(generate=False, return_log_probs=True, pad_output=False)
    asked, told = retrieved("from_collector"), retrieved(scoring)
    assert len(asked) == len(told) == 9
    for a, b in zip(asked, told, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
        assert a.abs().sum() > 0.01


def test_the_collector_is_known_by_weak_references():
    policy, base = make_policy.__wrapped__(), ChatEnv(Words())
    env = TransformedEnv(base, Transform([]))
    collector = LLMCollector(env, policy=policy, dataloader=[prompts(1)], dialog_turns_per_batch=1)
    collector.rollout()
    assert env.collector is base.collector is policy.collector is collector
    del collector
    gc.collect()
    assert (env.collector, base.collector, policy.collector) == (None, None, None)


def test_new_weights_count_a_version():
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
    for version, given in enumerate(ways, start=1):
        with torch.no_grad():
            policy.model.model.norm.weight.zero_() if given else None
        collector.update_policy_weights_(*given)
        assert torch.equal(policy.model.state_dict()[name], state[name])
        row = collector.rollout()
        assert int(row["policy_version"]) == collector.get_policy_version() == version
    assert policy.version == len(ways)
    texts = PolicyVersion("uuid")
    named = uneven(policy, dialog_turns_per_batch=1, track_policy_version=texts)
    row = named.rollout()[0, 0]
    assert row["policy_version"] == row["next", "policy_version"] == texts.version
    untracked = uneven(policy, dialog_turns_per_batch=1)
    assert untracked.rollout()["policy_version"].tolist() == [[len(ways)]] * 3  # the policy's own
    untracked.increment_version()
    assert untracked.policy_version is None


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({}, ValueError, "dialog_turns_per_batch >= 1, got None"),
        ({"policy": None}, TypeError, "exactly one of policy and policy_factory"),
        ({"yield_only_last_steps": True, "yield_completed_trajectories": False}, TypeError,
         "requires yield_completed_trajectories=True"),
        ({"yield_only_last_steps": True, "reset_at_each_iter": True}, TypeError, "excludes"),
    ],
)  # fmt: skip
def test_wrong_combinations_are_named(kwargs, error, match):
    kwargs = {"policy": make_policy(), **kwargs}
    with pytest.raises(error, match=match):
        LLMCollector(ChatEnv(Words()), **kwargs)
    for changes in ({"num_samples": 2}, {"generate": False}):
        with pytest.raises(ValueError, match="collect expects a policy"):
            uneven(make_policy().get_new_version(**changes), dialog_turns_per_batch=1)
