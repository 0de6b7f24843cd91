"""Trajectories: exact ids of all turns, with masks, log-probs and rewards in their places."""

import pytest
import torch
from contracts import G, Words, make_policy, prompts, rollout
from tensordict import TensorDict
from uneven_chats import FEW_SHOT, Uneven, start

from envs.chat_env import ChatEnv
from trainer.collect import collect
from trainer.transcripts import transcript


def uneven(max_turns: int = 3, samples: int = 6) -> TensorDict:
    env = ChatEnv(Uneven(), group_size=samples, max_turns=max_turns)
    return collect(start(Uneven()), env, make_policy())


def runs(mask: list[bool]) -> list[tuple[int, int]]:
    """Return (first, last) of each run of True."""
    edges = [i for i in range(1, len(mask)) if mask[i] != mask[i - 1]]
    edges = [0, *edges] if mask[0] else edges
    edges = [*edges, len(mask)] if len(edges) % 2 else edges
    return [(a, b - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def test_each_turns_reward_stands_on_its_last_sampled_token():
    batch = uneven()
    for i in range(18):
        places = runs(batch["masks", "all_response_mask"][i].tolist())
        turns = i // 6 + 1
        want = torch.zeros(batch["reward_raw"].shape[1])
        for k, (_, last) in enumerate(places[:turns], start=1):
            want[last] = k
        assert len(places) == turns
        assert torch.equal(batch["reward_raw"][i], want)
        assert batch["reward_part", "turn"][i] == sum(range(turns + 1))
        assert batch["success"][i]
    assert batch["group_id"].tolist() == [g for g in range(3) for _ in range(6)]


def test_assistant_turns_of_the_prompt_are_the_assistants_but_not_sampled():
    batch = uneven()
    policy = make_policy()
    shown = policy.renderer.render(FEW_SHOT, add_generation_prompt=True)
    size = len(shown.ids)
    assert any(shown.assistant)
    assert batch["tokens", "full"][:, :size].tolist() == [shown.ids] * 18
    assert batch["masks", "all_assistant_mask"][:, :size].tolist() == [shown.assistant] * 18
    assert not batch["masks", "all_response_mask"][:, :size].any()
    assert torch.equal(batch["loss_mask"], batch["masks", "all_response_mask"])


def test_a_cut_reply_is_closed_by_a_token_nobody_sampled():
    policy, batch = make_policy(), uneven()
    end = policy.tokenizer.eos_token_id
    between = policy.renderer.text(
        [{"role": "user", "content": "again"}], add_generation_prompt=True
    )
    between = policy.tokenizer("\n" + between, add_special_tokens=False)["input_ids"]
    closed = kept = 0
    for i in range(6, 18):
        ids = batch["tokens", "full"][i].tolist()
        response = batch["masks", "all_response_mask"][i].tolist()
        assistant = batch["masks", "all_assistant_mask"][i].tolist()
        for (_, last), (following, _) in zip(runs(response), runs(response)[1:], strict=False):
            cut = ids[last] != end
            gap = ids[last + 1 : following]
            assert gap == ([end] if cut else []) + between
            assert assistant[last + 1 : following] == [cut] + [False] * (len(gap) - 1)
            assert not any(response[last + 1 : following])
            closed, kept = closed + cut, kept + (not cut)
    assert closed
    assert kept


def test_rows_are_padded_right():
    batch = rollout(make_policy())
    attention = batch["masks", "all_attention_mask"]
    index = torch.arange(attention.shape[1])
    assert torch.equal(attention, index < attention.sum(-1, keepdim=True))
    assert not attention[:, -1].all(), "the rows should differ in length"
    assert batch["temperature"].tolist() == [1.0] * 4 * G
    assert batch["prompt"][0] == Words().rows("train")[0]["answer"]


def test_transcripts_show_the_system_message_where_there_is_one():
    class Own(Words):
        def rows(self, split):
            rows = super().rows(split)
            rows[0]["messages"].insert(0, {"role": "system", "content": "Own."})
            return rows

    for prompt, wanted in (("Be brief.", ["Own.", "Be brief."]), (None, ["Own.", None])):
        env = ChatEnv(Own(), group_size=G, system_prompt=prompt)
        batch = collect(start(Own(), 2), env, make_policy())
        assert [transcript(batch, i * G, 1, kind="").get("system") for i in range(2)] == wanted


def test_replies_of_one_token_and_empty_ones_are_whole_trajectories():
    policy = make_policy().get_new_version(generate_kwargs={"max_new_tokens": 1})
    env = ChatEnv(Words(3), group_size=80, max_turns=3)
    batch = collect(start(Words(3), 1), env, policy)
    sampled = batch["masks", "all_response_mask"]
    assert (sampled.sum(-1) == 3).all()
    assert set(batch["reward_raw"][~sampled].tolist()) == {0.0}
    ends = policy.stop_ids
    first = sampled.int().argmax(-1)
    empty = [i for i in range(80) if int(batch["tokens", "full"][i, first[i]]) in ends]
    assert empty, "the seed should bring a reply that ends at once"
    assert batch["response"][empty[0]].split("\n")[0] == ""
    for i in empty:  # Words pays the length of the text modulo 3
        assert batch["reward_raw"][i, first[i]] == 0.0


def test_a_policy_with_other_outputs_collects_the_same():
    ragged = make_policy().get_new_version(pad_output=False, inplace=False, return_log_probs=False)
    other = collect(prompts(1), ChatEnv(Words(), group_size=G), ragged)
    assert (rollout(make_policy(), count=1) == other).all()


@pytest.mark.parametrize(
    "changes", [{"num_samples": 2}, {"input_mode": "text"}, {"generate": False}]
)
def test_a_policy_that_does_not_generate_one_reply_to_a_history_is_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        collect(prompts(1), ChatEnv(Words()), make_policy().get_new_version(**changes))


def test_a_row_keeps_the_version_of_the_weights_that_sampled_it():
    policy = make_policy().get_new_version()
    policy.version = 7
    batch = collect(start(Uneven()), ChatEnv(Uneven(), group_size=2, max_turns=2), policy)
    assert batch["policy_version"].dtype == torch.int64
    assert batch["policy_version"].tolist() == [7] * 6
    policy.version = 8
    assert rollout(policy)["policy_version"].tolist() == [8] * 4 * G


def test_a_chat_that_nobody_ends_or_answers_is_an_error():
    # without a task an env only keeps the conversation: the policy would talk to itself for ever
    with pytest.raises(ValueError, match="max_turns=1"):
        collect(prompts(1), ChatEnv(group_size=2), make_policy())
    assert collect(prompts(1), ChatEnv(group_size=2, max_turns=1), make_policy()).shape == (2,)
