"""Batches: where they come from, a function of (seed, iteration), and what they hold.

Exact ids of all turns, with masks, log-probs and rewards in their places; the table of the keys.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.chats import start
from support.policies import (
    G,
    dynamic_rollouts,
    leash,
    make_policy,
    make_wrapper,
    one_process,
    prompts,
    rollout,
)
from support.tasks import FEW_SHOT, Flat, Many, Uneven, Words
from tensordict import NonTensorStack, TensorDict, TensorDictBase

import envs
import trainer
from envs.chat_env import ChatEnv
from policies.critic import Critic
from policies.load import load_reference
from policies.random import fold
from trainer.batch import KEYS
from trainer.collect import collect
from trainer.demonstrations import Demonstrations
from trainer.evaluation import Evaluate
from trainer.kl.reference import Reference
from trainer.metrics import summarize
from trainer.runtime import Runtime
from trainer.sources import Rollouts, pick_rows
from trainer.transcripts import transcript


@pytest.fixture(scope="module")
def uneven() -> TensorDict:
    """Return six trajectories each of one, two and three turns."""
    policy = make_policy().get_new_version()
    policy.version = 7
    return collect(start(Uneven()), ChatEnv(Uneven(), group_size=6, max_turns=3), policy)


def runs(mask: list[bool]) -> list[tuple[int, int]]:
    """Return (first, last) of each run of True."""
    edges = [i for i in range(1, len(mask)) if mask[i] != mask[i - 1]]
    edges = [0, *edges] if mask[0] else edges
    edges = [*edges, len(mask)] if len(edges) % 2 else edges
    return [(a, b - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def test_a_chat_without_room_for_its_next_prompt_ends_as_truncated(uneven):
    places = [runs(row.tolist()) for row in uneven["masks", "all_response_mask"]]
    seconds = sorted(turns[1][0] for turns in places if len(turns) > 1)
    room = seconds[len(seconds) // 2]
    policy = make_policy()
    policy = policy.get_new_version(limits=replace(policy.limits, max_prompt_tokens=room))
    batch = collect(start(Uneven()), ChatEnv(Uneven(), group_size=6, max_turns=3), policy)
    ends = [[last for first, last in turns if first <= room][-1] for turns in places]
    assert batch["masks", "all_attention_mask"].sum(-1).tolist() == [end + 1 for end in ends]
    for i, end in enumerate(ends):
        ids = batch["tokens", "full"][i][: end + 1]
        assert torch.equal(ids, uneven["tokens", "full"][i][: end + 1])
        assert batch["truncated"][i] == (end < places[i][-1][1] or uneven["truncated"][i])
    assert 0 < sum(end < turns[-1][1] for end, turns in zip(ends, places, strict=True)) < len(ends)


def test_rows_at_a_time_change_nothing_but_memory():
    policy = make_policy()
    few = policy.get_new_version(limits=replace(policy.limits, max_rows=7))
    want, got = map(rollout, (policy, few))
    assert len(want) > 7
    for key in (("tokens", "full"), ("masks", "all_response_mask"), "truncated"):
        assert torch.equal(got[key], want[key])
    torch.testing.assert_close(got["log_probs", "full"], want["log_probs", "full"])


def test_each_turns_reward_stands_on_its_last_sampled_token(uneven):
    for i in range(18):
        places = runs(uneven["masks", "all_response_mask"][i].tolist())
        turns = i // 6 + 1
        want = torch.zeros(uneven["reward_raw"].shape[1])
        for k, (_, last) in enumerate(places[:turns], start=1):
            want[last] = k
        assert len(places) == turns
        assert torch.equal(uneven["reward_raw"][i], want)
        assert uneven["reward_part", "turn"][i] == sum(range(turns + 1))
        assert uneven["success"][i]
    assert uneven["group_id"].tolist() == [g for g in range(3) for _ in range(6)]
    assert uneven["policy_version"].tolist() == [7] * 18, "of the weights that sampled"


def test_a_transcript_of_several_turns_has_all_messages(uneven):
    for i in range(18):
        record = transcript(uneven, i, 1, kind="train")
        chat = record.get("messages", [])
        assert len(chat) == (0, 6, 8)[i // 6]
        assert chat[:3] == FEW_SHOT[: len(chat)]
        assert all(m == {"role": "user", "content": "again"} for m in chat[4::2])
        said = [m["content"] for m in chat[3::2]] or [record["response"]]
        assert "\n".join(said) == record["response"]
        assert {m["role"] for m in chat[3::2]} <= {"assistant"}


def test_assistant_turns_of_the_prompt_are_the_assistants_but_not_sampled(uneven):
    shown = make_policy().renderer.render(FEW_SHOT, add_generation_prompt=True)
    size = len(shown.ids)
    assert any(shown.assistant)
    assert uneven["tokens", "full"][:, :size].tolist() == [shown.ids] * 18
    assert uneven["masks", "all_assistant_mask"][:, :size].tolist() == [shown.assistant] * 18
    assert not uneven["masks", "all_response_mask"][:, :size].any()
    assert torch.equal(uneven["loss_mask"], uneven["masks", "all_response_mask"])


def test_a_cut_response_is_closed_by_a_token_nobody_sampled(uneven):
    policy = make_policy()
    end = policy.tokenizer.eos_token_id
    between = policy.renderer.text(
        [{"role": "user", "content": "again"}], add_generation_prompt=True
    )
    between = policy.tokenizer("\n" + between, add_special_tokens=False)["input_ids"]
    found = set()
    for i in range(6, 18):
        ids = uneven["tokens", "full"][i].tolist()
        assistant = uneven["masks", "all_assistant_mask"][i].tolist()
        places = runs(uneven["masks", "all_response_mask"][i].tolist())
        for (_, last), (following, _) in pairwise(places):
            cut = ids[last] != end
            gap = ids[last + 1 : following]
            assert gap == ([end] if cut else []) + between
            assert assistant[last + 1 : following] == [cut] + [False] * (len(gap) - 1)
            found.add(cut)
    assert found == {True, False}


def test_rows_are_padded_right_and_those_of_a_policy_with_other_outputs_are_the_same():
    batch = rollout(make_wrapper())
    attention = batch["masks", "all_attention_mask"]
    index = torch.arange(attention.shape[1])
    assert torch.equal(attention, index < attention.sum(-1, keepdim=True))
    assert not attention[:, -1].all(), "the rows should differ in length"
    assert batch["temperature"].tolist() == [1.0] * 4 * G
    ragged = make_wrapper().get_new_version(pad_output=False, inplace=False, return_log_probs=False)
    assert (batch == collect(prompts(), ChatEnv(Words(), group_size=G), ragged)).all()


def test_responses_of_one_token_and_empty_ones_are_whole_trajectories():
    policy = make_policy()
    policy = policy.get_new_version(limits=replace(policy.limits, max_new_tokens=1))
    batch = collect(start(Words(3), 1), ChatEnv(Words(3), group_size=80, max_turns=3), policy)
    sampled = batch["masks", "all_response_mask"]
    assert (sampled.sum(-1) == 3).all()
    assert not batch["reward_raw"][~sampled].any()
    first = sampled.int().argmax(-1)
    empty = [i for i in range(80) if int(batch["tokens", "full"][i, first[i]]) in policy.stop_ids]
    assert empty, "the seed should bring a response that ends at once"
    assert batch["response"][empty[0]].split("\n")[0] == ""
    for i in empty:  # Words pays the length of the text modulo 3
        assert batch["reward_raw"][i, first[i]] == 0.0


def test_a_policy_that_does_not_generate_and_a_chat_that_nobody_ends_are_refused():
    with pytest.raises(ValueError, match="generate"):
        collect(prompts(1), ChatEnv(Words()), make_policy().get_new_version(generate=False))
    # without a task an env only keeps the conversation: the policy would talk to itself for ever
    with pytest.raises(ValueError, match="max_turns=1"):
        collect(prompts(1), envs.ChatEnv(group_size=2), make_policy())
    assert collect(prompts(1), envs.ChatEnv(group_size=2, max_turns=1), make_policy()).shape == (2,)


# The table of the batch's keys (trainer/batch.py).


OPTIONAL = ("<name>", "<metric>")


def entry_of(path: tuple[str, ...]) -> object:
    """Return the key of the table that stands for a path in a batch, None if there is none."""
    names = (path[0] if len(path) == 1 else path, *((path[0], name) for name in OPTIONAL))
    return next((key for key in names if key in KEYS), None)


def leaves(td: TensorDictBase, prefix: tuple[str, ...] = ()):
    """Yield key and value of every entry that holds one, through containers."""
    for name, value in td.items():
        if hasattr(value, "to_tensordict") and not isinstance(value, NonTensorStack):
            yield from leaves(value.to_tensordict(), (*prefix, name))
        elif value is not None:
            yield (*prefix, name), value


@pytest.fixture(scope="module")
def made() -> list[TensorDict]:
    """Return a batch of GRPO with all verbs there are, and one of PPO, as the update gets them."""
    policy, task, runtime = make_policy.__wrapped__(), Words(turns=2), one_process()
    parts = {"task": task, "generator": policy, "runtime": runtime, "prompts_per_iteration": 4}
    parts["env"] = ChatEnv(task, group_size=G, max_turns=2)
    verbs = [
        trainer.OverlongPenalty(max_tokens=12, buffer=4),
        trainer.DropTruncated(),
        trainer.ImportanceSampling(policy=policy),
    ]
    retrieve = Reference(policy, load_reference(policy))
    source = trainer.DynamicRollouts(**parts, after_rollout=verbs, rounds=1)
    scored = retrieve(source(0), keep_states=True)
    grpo = trainer.GroupAdvantage(group_size=G, leash=leash())(scored)
    policy.scorer.critic = Critic(policy.scorer)
    paid = leash(where="reward")
    paid = replace(paid, teacher=replace(paid, name="teacher"))
    teacher = Reference(policy, load_reference(policy), name="teacher")
    gae = trainer.GAEAdvantage(policy=policy, runtime=runtime, leash=paid)
    ppo = gae(teacher(retrieve(trainer.Rollouts(**parts)(0))))
    return [grpo, ppo]


def test_every_entry_of_a_batch_is_in_the_table_with_its_shape_and_dtype(made) -> None:
    seen = set()
    for batch in made:
        shapes = {"[B, T]": batch["loss_mask"].shape, "[B]": batch.batch_size}
        shapes["[B, T, H]"] = (*batch["loss_mask"].shape, 64)
        for path, value in leaves(batch):
            key = entry_of(path)
            assert key is not None, f"{path} is not in trainer/batch.py"
            seen.add(key)
            shape, _, dtype = KEYS[key].kind.rpartition(" ")
            if dtype in ("text", "list", "dict"):
                assert isinstance(value, NonTensorStack), path
                continue
            assert value.shape in [shapes[s] for s in shape.split(" or ")], path
            assert dtype in ("any", str(value.dtype).removeprefix("torch.")), path
    of_updates = {"weight", "later_kl"}
    assert set(KEYS) - seen == of_updates | {("teachers", "<name>")}, "rollouts add the others"


def test_the_parts_of_a_reward_still_add_up_after_the_verbs(made):
    batch = made[0]
    assert set(batch["reward_part"].keys()) == {"length", "overlong"}
    total = sum(batch["reward_part"].values())
    torch.testing.assert_close(batch["reward_raw"].sum(-1), total)
    assert (batch["reward_part", "overlong"] < 0).any()
    assert not batch["loss_mask"][batch["truncated"]].any()


# Where batches come from.


def rollouts(runtime, size: int = 2) -> Rollouts:
    env = ChatEnv(Words(), group_size=3)
    return Rollouts(
        task=Words(), env=env, generator=make_policy(), runtime=runtime, prompts_per_iteration=size
    )


@given(size=st.integers(1, 9), count=st.integers(1, 12), seed=st.integers(0, 99))
def test_every_epoch_holds_each_row_once(size, count, seed):
    """Epochs begin inside an iteration, or several times in one."""
    taken = [p for i in range(2 * size) for p in pick_rows(i, size=size, count=count, seed=seed)]
    epochs = [taken[k : k + size] for k in range(0, len(taken), size)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)


def every_epoch_has_an_order_of_its_own() -> None:
    """Raise AssertionError if two epochs, or two seeds, take the rows in one order."""
    task, policy = Many(), make_policy()
    played, shown = set(), set()
    for seed in range(3):
        parts = {"task": task, "env": ChatEnv(task), "runtime": Runtime("/tmp", seed=seed)}
        source = Rollouts(**parts, generator=policy, prompts_per_iteration=8)  # every row
        data = Demonstrations(**parts, policy=policy, prompts_per_iteration=8)
        for epoch in range(3):
            played.add(tuple(row["answer"] for row in source.prompts(epoch).get("row").tolist()))
            shown.add(str(data(epoch)["tokens", "full"].tolist()))
    assert len(played) == len(shown) == 9


def test_every_epoch_has_an_order_of_its_own():
    every_epoch_has_an_order_of_its_own()


def test_prompts_are_a_function_of_seed_and_iteration(tmp_path):
    source, later = rollouts(Runtime(tmp_path, seed=3)), rollouts(Runtime(tmp_path, seed=3))
    first = source.prompts(5)
    source.prompts(0)
    torch.rand(3)
    assert (first == later.prompts(5)).all()
    want = [int(fold(3, 5, i)) for i in range(2)]
    assert first["stream"].tolist() == want
    other = rollouts(Runtime(tmp_path, seed=4)).prompts(5)
    assert not set(other["stream"].tolist()) & set(want)
    assert not set(source.prompts(6)["stream"].tolist()) & set(want)


class Writing(Words):
    """Its reward writes into the row that it is given."""

    def reward(self, row, response):
        row["messages"].append({"role": "user", "content": "and again"})
        row["answer"] = "seen"
        return super().reward(row, response)


def test_what_a_reward_writes_into_its_row_is_in_no_later_prompt():
    found = {}
    for task in (Words(), Writing()):
        parts = {"task": task, "generator": make_policy(), "runtime": one_process()}
        source = Rollouts(**parts, env=ChatEnv(task, group_size=2), prompts_per_iteration=4)
        texts = [list(map(str, source(i).get("prompt").tolist())) for i in (0, 0)]
        evaluate = Evaluate(**parts, env=ChatEnv(task), num_samples=2)
        found[type(task)] = texts, evaluate(0), evaluate(0)
    assert found[Writing] == found[Words]


# Dynamic sampling.


def rows_of(batch) -> list[tuple]:
    """Return what each row is, without padding."""
    names = ("reward_raw", "loss_mask", ("log_probs", "full"), ("tokens", "full"))
    return [
        (str(row["prompt"]), int(row["group_id"]), *(row[name][real].tolist() for name in names))
        for row in batch
        for real in [row["masks", "all_attention_mask"]]
    ]


def test_idle_places_are_drawn_again_with_other_rows_and_the_rest_stays(tmp_path):
    source = dynamic_rollouts(Runtime(tmp_path, seed=1), Many())
    redrawn = 0
    for iteration in range(2):
        before, batch = Rollouts.sample(source, iteration), source(iteration)
        after, draws = rows_of(batch), batch["logged", "group/resampled"].tolist()
        for k, row in enumerate(rows_of(before)):
            if row[0] in Many.flat:
                redrawn += 1
                assert after[k][0] not in Many.flat
                assert draws[k] > 0
                assert after[k][1] == row[1] == k // 3, "it keeps its place"
            else:
                assert (after[k], draws[k]) == (row, 0)
        assert batch["loss_mask"].any(-1).all()
        assert rows_of(source(iteration)) == after
    assert redrawn > 3


def test_what_stays_idle_had_a_row_of_its_own_each_time_and_leaves_the_loss(tmp_path):
    source = dynamic_rollouts(Runtime(tmp_path), Flat(), rounds=9)
    batch = source(0)
    assert not batch["loss_mask"].any()
    rows = [[r["answer"] for r in source.prompts(0, k).get("row").tolist()] for k in range(10)]
    for place in range(4):
        assert sorted(r[place] for r in rows[:8]) == sorted(Flat.flat), "each row comes once"
    streams = {int(s) for k in range(10) for s in source.prompts(0, k)["stream"]}
    assert len(streams) == 40
    metrics = summarize(batch.set("reward", batch["reward_raw"]), source.runtime)
    assert (metrics["group/zero_variance_fraction"], metrics["group/resampled"]) == (1, 9)


# Demonstrations.


class Chat(Words):
    """A demonstration of two turns."""

    def demonstrations(self) -> list[dict]:
        texts = [("user", "Sort 2 1"), ("assistant", "1 2"), ("user", "8 7"), ("assistant", "7 8")]
        return [{"messages": [{"role": r, "content": c} for r, c in texts]}]


@pytest.mark.parametrize("mask", ["assistant", "prompt"])
def test_the_mask_says_which_turns_are_learnt(mask):
    policy, task = make_policy(), Chat()
    env = ChatEnv(task, system_prompt="Be brief.")
    parts = {"task": task, "env": env, "policy": policy, "runtime": one_process()}
    batch = Demonstrations(**parts, prompts_per_iteration=1, mask=mask)(0)
    masks = batch["masks", "all_attention_mask"], batch["loss_mask"]
    whole, learnt = (policy.tokenizer.decode(batch["tokens", "full"][keep]) for keep in masks)
    system = {"role": "system", "content": "Be brief."}
    assert whole == policy.renderer.text([system, *task.demonstrations()[0]["messages"]])
    assert learnt == {"assistant": "1 2<|im_end|>", "prompt": ""}[mask] + "7 8<|im_end|>"
