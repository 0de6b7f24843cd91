"""Trajectories: exact ids of all turns, with masks, log-probs and rewards in their places."""

from itertools import pairwise

import pytest
import torch
from contracts import G, Words, make_policy, prompts, rollout
from tensordict import TensorDict
from uneven_chats import FEW_SHOT, Uneven, start

from envs.chat_env import ChatEnv
from trainer.collect import collect
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


def test_assistant_turns_of_the_prompt_are_the_assistants_but_not_sampled(uneven):
    shown = make_policy().renderer.render(FEW_SHOT, add_generation_prompt=True)
    size = len(shown.ids)
    assert any(shown.assistant)
    assert uneven["tokens", "full"][:, :size].tolist() == [shown.ids] * 18
    assert uneven["masks", "all_assistant_mask"][:, :size].tolist() == [shown.assistant] * 18
    assert not uneven["masks", "all_response_mask"][:, :size].any()
    assert torch.equal(uneven["loss_mask"], uneven["masks", "all_response_mask"])


def test_a_cut_reply_is_closed_by_a_token_nobody_sampled(uneven):
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
    batch = rollout(make_policy())
    attention = batch["masks", "all_attention_mask"]
    index = torch.arange(attention.shape[1])
    assert torch.equal(attention, index < attention.sum(-1, keepdim=True))
    assert not attention[:, -1].all(), "the rows should differ in length"
    assert batch["temperature"].tolist() == [1.0] * 4 * G
    ragged = make_policy().get_new_version(pad_output=False, inplace=False, return_log_probs=False)
    assert (batch == collect(prompts(), ChatEnv(Words(), group_size=G), ragged)).all()


def test_transcripts_show_the_system_message_where_there_is_one():
    class Own(Words):
        def rows(self, split):
            rows = super().rows(split)
            rows[0]["messages"].insert(0, {"role": "system", "content": "Own."})
            return rows

    env = ChatEnv(Own(), group_size=G, system_prompt="Be brief.")
    batch = collect(start(Own(), 2), env, make_policy())
    shown = [transcript(batch, i, 1, kind="")["system"] for i in (0, G)]
    assert shown == ["Own.", "Be brief."]
    assert "system" not in transcript(rollout(make_policy()), 0, 1, kind="")


def test_replies_of_one_token_and_empty_ones_are_whole_trajectories():
    policy = make_policy().get_new_version(generate_kwargs={"max_new_tokens": 1})
    batch = collect(start(Words(3), 1), ChatEnv(Words(3), group_size=80, max_turns=3), policy)
    sampled = batch["masks", "all_response_mask"]
    assert (sampled.sum(-1) == 3).all()
    assert not batch["reward_raw"][~sampled].any()
    first = sampled.int().argmax(-1)
    empty = [i for i in range(80) if int(batch["tokens", "full"][i, first[i]]) in policy.stop_ids]
    assert empty, "the seed should bring a reply that ends at once"
    assert batch["response"][empty[0]].split("\n")[0] == ""
    for i in empty:  # Words pays the length of the text modulo 3
        assert batch["reward_raw"][i, first[i]] == 0.0


def test_a_policy_that_does_not_generate_and_a_chat_that_nobody_ends_are_refused():
    with pytest.raises(ValueError, match="generate"):
        collect(prompts(1), ChatEnv(Words()), make_policy().get_new_version(generate=False))
    # without a task an env only keeps the conversation: the policy would talk to itself for ever
    with pytest.raises(ValueError, match="max_turns=1"):
        collect(prompts(1), ChatEnv(group_size=2), make_policy())
    assert collect(prompts(1), ChatEnv(group_size=2, max_turns=1), make_policy()).shape == (2,)
