"""What a user's reward does wrong: one line with the task, and the user's file and line."""

import inspect
import warnings

import numpy as np
import pytest
import torch

from envs.chat_env import ChatEnv
from envs.rewards import Function, InProcess, Judge, Rewarded, RewardModel
from envs.rewards.validate import rewards_of, try_reward
from envs.tasks.mix import Mix
from envs.tasks.task import Reply, Reward, Task
from trainer.runs.failures import headline

ROW = {"messages": [{"role": "user", "content": "a"}], "columns": {"level": 3}}
REPLIES = [Reply("a", True, []), Reply("b", True, [])]


class Faulty(Task):
    """A task whose reward does what it is told."""

    def __init__(self, do) -> None:
        self.do = do

    def rows(self, split):
        return [ROW]

    def reward(self, row, reply):
        return self.do(row)


class Many(Faulty):
    def rewards(self, rows, replies):
        return self.do(rows)


def line_of(function) -> str:
    return f"{__file__}, line {inspect.getsourcelines(function)[1] + 1}"


def of_level(row):
    return Reward(row["level"], {}, True)


def divide(row):
    return Reward(1 / 0, {}, True)


def told(error: BaseException) -> str:
    text = headline(error)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: Mix({"x": t}), lambda t: Rewarded(t, {})])
def test_a_reward_that_is_neither_reward_nor_number_is_one_line(wrap):
    for value in (None, "good", "1", (1, 2), np.zeros(1), 1j):
        task = wrap(Faulty(lambda row, value=value: value))
        rows = [{**ROW, "task": "x"}] * 2
        with pytest.raises(ValueError, match=r"Reward of Faulty, got .*; return Reward") as e:
            ChatEnv(task)._rewards(rows, REPLIES)
        assert type(value).__name__ in told(e.value)
    for count in (1, 3):
        task = wrap(Many(lambda rows, n=count: [Reward(0, {}, True)] * n))
        with pytest.raises(ValueError, match=f"2 rewards of Many, .* got {count}"):
            ChatEnv(task)._rewards(rows, REPLIES)


def test_an_error_names_the_file_and_line_of_the_user_and_where_the_cells_are():
    for do, says in (
        (of_level, "KeyError: 'level'"),
        (divide, "ZeroDivisionError: division by zero"),
    ):
        with pytest.raises((KeyError, ZeroDivisionError)) as caught:
            rewards_of(Faulty(do), [ROW] * 2, REPLIES)
        text = told(caught.value)
        assert text.startswith(f"{says} (in the reward of Faulty, {line_of(do)}")
        assert ('row["columns"]: level' in text) is (do is of_level)


def nested(row, reply):
    return {"a": row["level"]}


def test_an_error_in_an_added_reward_names_its_place_in_every_process():
    for made in (Function(nested), InProcess(nested, timeout=60, processes=1)):
        task = Rewarded(Faulty(lambda row: Reward(0, {}, True)), {"own": made})
        with pytest.raises(RuntimeError, match="reward own: KeyError: 'level'") as caught:
            task.rewards([ROW] * 2, REPLIES)
        assert line_of(nested) in told(caught.value)


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: Mix({"x": t}), lambda t: Rewarded(t, {})])
@pytest.mark.parametrize("value", [0.5, 1, True, np.float32(0.5), np.int64(2), torch.tensor(0.25)])
def test_a_plain_number_is_a_reward_without_parts(wrap, value):
    for task in (wrap(Faulty(lambda row: value)), wrap(Many(lambda rows: [value] * len(rows)))):
        assert task.part_names() == []
        got = ChatEnv(task)._rewards([{**ROW, "task": "x"}] * 2, REPLIES)
        assert got == [Reward(float(value), {}, True)] * 2
        assert type(got[0].total) is float
    assert not ChatEnv(Faulty(lambda row: -value * 1))._rewards([ROW], REPLIES[:1])[0].success


def test_a_function_in_env_rewards_that_fails_says_where_the_cells_are():
    task = Rewarded(Faulty(lambda row: 0.5), {"own": Function(lambda row, reply: float("nan"))})
    with pytest.raises(RuntimeError, match=r"reward own: .*a finite number.*got nan"):
        task.rewards([ROW] * 2, REPLIES)
    task = Rewarded(Faulty(lambda row: 0.5), {"own": Function(nested)})
    with pytest.raises(RuntimeError, match=r'row\["columns"\]: level'):
        task.rewards([ROW] * 2, REPLIES)


class Seen(Task):
    """Rewards by a function, and keeps what it was asked."""

    def __init__(self, do=lambda: 0.5, **more) -> None:
        self.do, self.asked, self.more = do, [], more

    def rows(self, split):
        return [{**ROW, **self.more}, {"messages": []}]

    def reward(self, row, reply):
        self.asked.append((row, reply))
        return self.do()


def test_a_trial_asks_once_with_the_answer_of_the_first_row():
    for more, said in (({"answer": "four"}, "four"), ({"answer": 4}, ""), ({}, "")):
        task = Seen(**more)
        try_reward(task)
        ((row, reply),) = task.asked
        assert row == ROW | more
        assert (reply.text, reply.complete) == (said, True)
        assert reply.messages == [*ROW["messages"], {"role": "assistant", "content": said}]


def test_a_trial_asks_no_judge_and_no_model():
    class Costly(Function):
        tried = False

    asked = []
    rewards = {
        "own": Function(lambda row, reply: asked.append("own") or 0.5),
        "judge": Judge(url="http://127.0.0.1:9", model="none", tries=1, on_error="raise"),
        "model": RewardModel("experiment:rm_tiny"),
        "costly": Costly(lambda row, reply: asked.append("costly") or 0.0),
    }
    task = Rewarded(Seen(), rewards)
    try_reward(task)
    assert asked == ["own"]
    assert set(task.functions) == set(rewards)
    assert len(task.task.asked) == 1
    for whole in (Mix({"x": task}), Rewarded(Mix({"x": Rewarded(task, {})}), rewards)):
        asked.clear()
        try_reward(whole)
        assert asked == ["own"] * (1 + isinstance(whole, Rewarded))
    assert set(task.functions) == set(rewards)
    try_reward(Task())  # a task for SFT: no rows, no reward


def test_a_fault_in_a_trial_is_told_as_on_error_says():
    def offline(row, reply):
        raise OSError("no such host: judge.example")

    for on_error in ("zero", "drop_group"):
        task = Rewarded(Seen(), {"own": Function(offline, on_error=on_error)})
        with pytest.warns(UserWarning, match="no such host"):
            try_reward(task)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            task.rewards([ROW], REPLIES[:1])  # it is told once
    with pytest.raises(RuntimeError, match="no such host") as caught:
        try_reward(Rewarded(Seen(answer="yes"), {"own": Function(offline)}))
    assert told(caught.value).endswith("(tried on the first row with the reply 'yes')")
