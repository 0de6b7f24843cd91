"""What a user's reward does wrong: one line with the task, and the user's file and line."""

import inspect

import numpy as np
import pytest
import torch
from reward_cases import needs_level

from envs.chat_env import ChatEnv
from envs.rewards import Function, InProcess, Judge, Rewarded, RewardModel
from envs.rewards.validate import rewards_of, try_reward
from envs.tasks.mix import Mix
from envs.tasks.task import Reply, Reward, Task
from trainer.runs.failures import headline

ROW = {"messages": [{"role": "user", "content": "a"}], "columns": {"level": 3}, "task": "x"}
REPLIES = [Reply("a", True, []), Reply("b", True, [])]
wrapped = pytest.mark.parametrize(
    "wrap", [lambda t: t, lambda t: Mix({"x": t}), lambda t: Rewarded(t, {})]
)


class Plain(Task):
    """A task whose reward is what a function returns; keeps what it was asked."""

    def __init__(self, do=lambda row: 0.5, **more) -> None:
        self.do, self.asked, self.first = do, [], ROW | more

    def rows(self, split):
        return [self.first, {"messages": []}]

    def reward(self, row, reply):
        self.asked.append((row, reply))
        return self.do(row)


class Many(Plain):
    def rewards(self, rows, replies):
        return self.do(rows)


def line_of(function) -> str:
    return f"{inspect.getfile(function)}, line {inspect.getsourcelines(function)[1] + 1}"


def of_level(row):
    return Reward(row["level"], {}, True)


def divide(row):
    return Reward(1 / 0, {}, True)


@wrapped
def test_a_reward_that_is_neither_reward_nor_number_is_one_line(wrap):
    for value in (None, "1", np.zeros(1), float("nan"), Reward(np.inf, {}, True)):
        task = wrap(Plain(lambda row, value=value: value))
        with pytest.raises(ValueError, match="Plain, got") as caught:
            ChatEnv(task)._rewards([ROW] * 2, REPLIES)
        text = headline(caught.value)
        assert type(value).__name__ in text
        assert "\n" not in text
    few = wrap(Many(lambda rows: [Reward(0, {}, True)]))
    with pytest.raises(ValueError, match=r"2 rewards of Many, .* got 1"):
        ChatEnv(few)._rewards([ROW] * 2, REPLIES)


@wrapped
@pytest.mark.parametrize("value", [0.5, True, np.int64(2), torch.tensor(0.25)])
def test_a_plain_number_is_a_reward_without_parts(wrap, value):
    for task in (wrap(Plain(lambda row: value)), wrap(Many(lambda rows: [value] * len(rows)))):
        assert task.part_names() == []
        got = ChatEnv(task)._rewards([ROW] * 2, REPLIES)
        assert got == [Reward(float(value), {}, True)] * 2
        assert type(got[0].total) is float


def test_an_error_names_the_file_and_line_of_the_user_and_where_the_cells_are():
    for do, error in ((of_level, KeyError), (divide, ZeroDivisionError)):
        with pytest.raises(error) as caught:
            rewards_of(Plain(do), [ROW] * 2, REPLIES)
        text = headline(caught.value)
        assert f"(in the reward of Plain, {line_of(do)}" in text
        assert ('row["columns"]: level' in text) is (do is of_level)
    for function in (Function(needs_level), InProcess(needs_level, timeout=60, processes=1)):
        with pytest.raises(RuntimeError, match="reward own: KeyError: 'level'") as caught:
            Rewarded(Plain(), {"own": function}).rewards([ROW] * 2, REPLIES)
        assert line_of(needs_level) in headline(caught.value)
        assert 'row["columns"]: level' in headline(caught.value)


def test_a_trial_asks_once_with_the_answer_of_the_first_row():
    for more, said in (({"answer": "four"}, "four"), ({"answer": 4}, ""), ({}, "")):
        task = Plain(**more)
        try_reward(task)
        ((row, reply),) = task.asked
        assert row == ROW | more
        assert (reply.text, reply.complete) == (said, True)
        assert reply.messages == [*ROW["messages"], {"role": "assistant", "content": said}]
    with pytest.raises(ZeroDivisionError) as caught:
        try_reward(Plain(divide, answer="yes"))
    assert "the reply 'yes'" in headline(caught.value)
    try_reward(Task())  # a task for SFT: no rows, no reward


def test_a_trial_asks_no_judge_and_no_model():
    asked = []
    rewards = {
        "own": Function(lambda row, reply: asked.append("own") or 0.5),
        "judge": Judge(url="http://127.0.0.1:9", model="none", tries=1, on_error="raise"),
        "model": RewardModel("experiment:rm_tiny"),
    }
    task = Rewarded(Plain(), rewards)
    for whole, times in ((task, 1), (Rewarded(Mix({"x": task}), rewards), 2)):
        asked.clear()
        try_reward(whole)
        assert asked == ["own"] * times
    assert set(task.functions) == set(rewards), "the task itself is left as it is"
