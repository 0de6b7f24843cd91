"""What a user's reward does wrong: one line with the task, and the user's file and line."""

import inspect
import os
import sys

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
    for value in (None, "1", (1, 2), np.zeros(1), 1j, float("nan"), Reward(np.inf, {}, True)):
        task = wrap(Plain(lambda row, value=value: value))
        with pytest.raises(ValueError, match="Plain, got") as caught:
            ChatEnv(task)._rewards([ROW] * 2, REPLIES)
        text = headline(caught.value)
        assert type(value).__name__ in text
        assert "\n" not in text
    for count in (1, 3):
        task = wrap(Many(lambda rows, n=count: [Reward(0, {}, True)] * n))
        with pytest.raises(ValueError, match=f"2 rewards of Many, .* got {count}"):
            ChatEnv(task)._rewards([ROW] * 2, REPLIES)


@wrapped
@pytest.mark.parametrize("value", [0.5, True, np.int64(2), torch.tensor(0.25)])
def test_a_plain_number_is_a_reward_without_parts(wrap, value):
    for task in (wrap(Plain(lambda row: value)), wrap(Many(lambda rows: [value] * len(rows)))):
        assert task.part_names() == []
        got = ChatEnv(task)._rewards([ROW] * 2, REPLIES)
        assert got == [Reward(float(value), {}, True)] * 2
        assert type(got[0].total) is float
    assert not ChatEnv(Plain(lambda row: -value * 1))._rewards([ROW], REPLIES[:1])[0].success


def test_an_error_names_the_file_and_line_of_the_user_and_where_the_cells_are():
    for do, error in ((of_level, KeyError), (divide, ZeroDivisionError)):
        with pytest.raises(error) as caught:
            rewards_of(Plain(do), [ROW] * 2, REPLIES)
        text = headline(caught.value)
        assert f"(in the reward of Plain, {line_of(do)}" in text
        assert ('row["columns"]: level' in text) is (do is of_level)


def test_an_error_in_an_added_reward_names_its_place_in_every_process():
    for function in (Function(needs_level), InProcess(needs_level, timeout=60, processes=1)):
        task = Rewarded(Plain(), {"own": function})
        with pytest.raises(RuntimeError, match="reward own: KeyError: 'level'") as caught:
            task.rewards([ROW] * 2, REPLIES)
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
    try_reward(Task())  # a task for SFT: no rows, no reward


def test_a_fault_in_a_trial_is_a_warning_or_an_error_as_on_error_says():
    def offline(row, reply):
        raise OSError("no such host")

    for on_error in ("zero", "drop_group"):
        task = Rewarded(Plain(), {"own": Function(offline, on_error=on_error)})
        with pytest.warns(UserWarning, match="no such host"):
            try_reward(task)
        task.rewards([ROW], REPLIES[:1])  # one warning is enough
    with pytest.raises(RuntimeError, match="no such host") as caught:
        try_reward(Rewarded(Plain(answer="yes"), {"own": Function(offline)}))
    assert "the reply 'yes'" in headline(caught.value)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_child_that_a_reward_forks_goes_no_further_than_the_reward():
    children = []

    def forks(code):
        if pid := os.fork():
            children.append(pid)
        elif code is not None:
            sys.exit(code)
        return 0.5

    for code in (None, 0, 3):
        assert rewards_of(Plain(lambda row, code=code: forks(code)), [ROW], REPLIES[:1])
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert ends == [0, 0, 1]


def test_a_trial_leaves_the_working_directory_where_it_was(tmp_path):
    before = os.getcwd()
    try_reward(Plain(lambda row: os.chdir(tmp_path) or 0.5))
    assert os.getcwd() == before
