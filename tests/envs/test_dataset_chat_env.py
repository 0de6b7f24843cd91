"""Environments that draw their prompts from data, and what answers earn in them."""

import json

import pytest
import torch
from support.policies import make_wrapper
from tensordict import TensorDict
from torch.utils.data import DataLoader

from envs import ChatEnv, DatasetChatEnv, GSM8KEnv, check_env_specs
from envs.rewards import MATHRewardParser
from envs.tasks.task import assistant, user
from policies.chats.containers import ChatHistory
from policies.chats.history import History
from trainer.collect import collect


@pytest.fixture
def sums(tmp_path):
    rows = [{"question": f"{i} + 1?", "answer": f"It is #### {i + 1}"} for i in range(5)]
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def asked(td: TensorDict) -> list[str]:
    return [chat[-1]["content"] for chat in td["history"].prompt.chats()]


def say(env, td: TensorDict, *texts: str) -> TensorDict:
    """Step with these responses."""
    said = History.from_chats([[assistant(text)] for text in texts])
    td.set(("history", "full"), td["history"].prompt.extend(said, inplace=False, dim=1))
    return env.step(td)["next"]


def test_a_right_answer_earns_its_reward(sums):
    """The system prompt has the tags too: only the response counts."""
    env = GSM8KEnv(dataset=sums, shuffle=False, num_envs=3)
    assert "<answer>" in env.SYSTEM_PROMPT
    td = env.reset()
    assert asked(td) == ["0 + 1?", "1 + 1?", "2 + 1?"]
    think = "<think>one more</think> "
    out = say(env, td, think + "<answer>$1.0</answer>", "<answer>7 1</answer> 2", "it is 3")
    for key, want in {
        "reward": [1.0, 0.1, 0.0],
        "reward_right": [1.0, 0.1, 0.0],
        "reward_answer": [1.0, 1.0, 0.0],
        "reward_think": [1.0, 0.0, 0.0],
        "success": [True, False, False],
        "terminated": [True, False, False],
        "done": [True, True, True],  # one step, by default
    }.items():
        assert out[key].flatten().tolist() == pytest.approx(want), key


@pytest.mark.parametrize(
    ("ends", "done"),
    [("right", [True, False, False]), (True, [True, True, False]), (False, [False] * 3)],
)
def test_a_wrong_answer_ends_the_episode_only_where_asked(sums, ends, done):
    env = GSM8KEnv(dataset=sums, shuffle=False, num_envs=3, max_steps=2, set_done_if_answer=ends)
    responses = ("<answer>1</answer>", "<answer>7</answer>", "hm")
    out = say(env, env.reset(), *responses)
    assert out["done"].flatten().tolist() == done
    out = say(env, out, *responses)
    assert out["done"].all()
    assert out["truncated"].all()
    assert len(out["history"].prompt.chats()[0]) == 4, "system, user and two responses"


def test_the_env_keeps_to_its_specs_and_the_trainer_plays_it(sums):
    for mode in ("text", "tokens", "history"):
        options = {"input_mode": mode, "tokenizer": make_wrapper().tokenizer}
        env = GSM8KEnv(dataset=sums, num_envs=4, repeats=2, **options)
        check_env_specs(env)
    assert asked(env.reset()) != asked(env.reset()), "asking for specs takes no row away"
    groups = collect(None, env.reset_dataloader(), make_wrapper())["group_id"].tolist()
    assert groups[0] == groups[1] != groups[2] == groups[3]


@pytest.mark.parametrize("options", [{"num_envs": 4}, {"num_envs": 2, "group_repeats": True}])
def test_a_group_never_comes_from_two_resets(sums, options):
    env = DatasetChatEnv(dataset=sums, shuffle=False, repeats=2, data_key="question", **options)
    seen = []
    for _ in range(3):
        td = env.reset()
        assert asked(td)[::2] == asked(td)[1::2]
        seen += list(zip(td["group_id"].tolist(), asked(td), strict=True))[::2]
    assert seen == [(i, f"{i % 5} + 1?") for i in range(6)], "epochs follow each other"


def test_the_order_is_that_of_the_seed(sums):
    def drawn(seed: int, **options) -> list[list[str]]:
        env = GSM8KEnv(dataset=sums, seed=seed, num_envs=5, **options)
        epochs = [asked(env.reset()) for _ in range(2)]
        assert epochs == [asked(env.reset_dataloader().reset()), asked(env.reset())]
        return epochs

    first, second = drawn(1)
    assert drawn(1) == [first, second] != drawn(2)
    assert sorted(first) == sorted(second) == drawn(1, shuffle=False)[0]
    assert first != second, "each epoch has an order of its own"


ROWS = [{"query": f"{i}?", "weight": torch.tensor(float(i))} for i in range(4)]
STACKED = TensorDict({"query": ["0?", "1?"], "weight": torch.arange(2.0)}, batch_size=[2])


@pytest.mark.parametrize("loader", [ROWS, DataLoader(ROWS, batch_size=3), [STACKED, ROWS[2:]]])
def test_any_loader_of_rows_will_do(loader):
    env = ChatEnv.from_dataloader(loader, batch_size=2, system_prompt="Go.")
    td = env.reset()
    assert asked(td) == ["0?", "1?"]
    assert td["weight"].tolist() == [0.0, 1.0]
    assert asked(env.reset()) == ["2?", "3?"]
    td = env.reset(TensorDict({"query": "Mine?"}, batch_size=[2]))
    assert asked(td) == ["Mine?"] * 2, "a query of the caller's own"


def test_what_gives_no_rows_or_is_left_out_is_named(sums):
    with pytest.raises(TypeError, match="got str"):
        ChatEnv.from_dataloader(["a text"]).reset()
    env = ChatEnv.from_dataloader(iter(ROWS[:1]))
    env.reset()
    with pytest.raises(ValueError, match="read again"):
        env.reset()
    with pytest.raises(ValueError, match="a multiple of repeats"):
        DatasetChatEnv(dataset=sums, num_envs=3, repeats=2)


def test_the_parser_of_math_shares_the_rewards():
    chat = [user("?"), assistant("<answer>3*8</answer>")]
    td = TensorDict({"solution": [r"\boxed{24}"], "score": torch.ones(1, 1)}, batch_size=[1])
    td["history"] = ChatHistory(full=History.from_chats([chat]), batch_size=[1])
    keys, names = [("history", "full"), "solution"], ["a", "t", "r", "score", "ok"]
    out = MATHRewardParser(in_keys=keys, out_keys=names, format_reward=0.25)(td)
    assert out["score"].tolist() == [[1.25]], "added to what is there"
    assert not out["ok"].any()
