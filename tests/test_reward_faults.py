"""What a user's reward does wrong, and reward functions that were written for TRL."""

import functools
import inspect
import math
import os

import numpy as np
import pytest
import torch
from reward_cases import needs_level

from envs.chat_env import ChatEnv
from envs.rewards import Function, Judge, Rewarded, RewardModel, SubprocessReward, TRLFunction
from envs.rewards.validate import compute_rewards, try_reward
from envs.tasks import SortDigits
from envs.tasks.mix import Mix
from envs.tasks.task import Reply, Reward, Task, assistant, user
from trainer.runs.failures import headline

ROW = {"messages": [user("a")], "columns": {"level": 3}, "task": "x"}
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
            compute_rewards(Plain(do), [ROW] * 2, REPLIES)
        text = headline(caught.value)
        assert f"(in the reward of Plain, {line_of(do)}" in text
        assert ('row["columns"]: level' in text) is (do is of_level)
    for function in (Function(needs_level), SubprocessReward(needs_level, timeout=60, processes=1)):
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
        assert reply.messages == [*ROW["messages"], assistant(said)]
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


ASKED, FOUR = user("Half of 8?"), assistant("4")
FIRST = {"role": "system", "content": "Be brief."}


def chat(text: str, *before: dict) -> Reply:
    return Reply(text, True, [*(before or (ASKED,)), assistant(text)])


def row(question, **cells) -> dict:
    """Return a row as `load_chats` reads it from a column `prompt`."""
    messages = [ASKED] if isinstance(question, str) else question
    return {"messages": messages, "question": question, "columns": {"prompt": question, **cells}}


TEXT, MESSAGES = row("Half of 8?", answer="4"), row([ASKED], answer="4", completion="4")


@pytest.mark.parametrize(
    ("conversational", "data", "prompt", "completion"),
    [
        (None, TEXT, "Half of 8?", "4"),
        (None, MESSAGES, [FIRST, ASKED], [FOUR]),
        (True, TEXT, [FIRST, ASKED], [FOUR]),
        (False, MESSAGES, "Half of 8?", "4"),
        (None, SortDigits().row("312"), [FIRST, ASKED], [FOUR]),
    ],
)
def test_prompts_completions_and_columns_are_those_of_trl(conversational, data, prompt, completion):
    def seen(**kwargs) -> list[float]:
        asked.append(kwargs)
        return [0.0] * len(kwargs["completions"])

    asked = []
    function = TRLFunction(seen, conversational=conversational)
    assert function.scores([data] * 2, [chat("4", FIRST, ASKED)] * 2) == [0, 0]
    columns = {"answer": "4"} if "columns" in data else {"digits": "312", "answer": "123"}
    want = {"prompts": prompt, "completions": completion, **columns}
    assert asked == [{name: [value] * 2 for name, value in want.items()}]
    assert function.scores([], []) == []


def test_async_functions_also_behind_a_wrapper():
    async def waiting(completions, answer, *, scale, **kwargs):
        return [scale * (c == a) for c, a in zip(completions, answer, strict=True)]

    rows, replies = [row("a", answer="4"), row("b", answer="5")], [chat("4")] * 2
    for function in (functools.partial(waiting, scale=3), lambda **k: waiting(**k, scale=3)):
        assert TRLFunction(function).scores(rows, replies) == [3.0, 0.0]


def test_an_error_costs_its_own_reply_alone_unless_it_ends_the_run():
    def number(completions, **kwargs):
        return [float(text) for text in completions]

    rows, replies = [row("a")] * 4, [chat("1"), chat("x"), chat("nan"), chat("3")]
    got = TRLFunction(number, on_error="zero").scores(rows, replies)
    assert [type(s).__name__ for s in got] == ["float", "ValueError", "ValueError", "float"]
    assert {type(s) for s in TRLFunction(number).scores(rows, replies)} == {ValueError}
    for function, says in (
        (lambda **_: 0.5, "expected 2 rewards, got 0.5"),
        (lambda **_: [1.0], "expected 2 rewards, got 1"),
        (lambda completions, truth, **_: [1.0], "needs truth"),
    ):
        task = Rewarded(SortDigits(), {"odd": TRLFunction(function, on_error="zero")})
        with pytest.raises(ValueError, match=rf"env\.rewards\.odd: .*{says}"):
            task.rewards([SortDigits().row("12")] * 2, [chat("12")] * 2)


def test_none_is_left_out_of_the_sum_and_a_reply_that_nobody_judges_is_dropped():
    def sums(completions, kind, **kwargs):
        return [2.0 if k == "sum" else None for k in kind]

    rows, replies = [row("a", kind="sum"), row("b", kind="word")], [chat("1")] * 2
    alone = Rewarded(Task(), {"sums": TRLFunction(sums, weight=0.5)})
    first, second = alone.rewards(rows, replies)
    assert (first.total, first.dropped, first.success, first.parts) == (1, False, True, {"sums": 2})
    assert (second.total, second.dropped, second.errors) == (0, True, 0)
    assert math.isnan(second.parts["sums"])
    both = Rewarded(Task(), {"sums": TRLFunction(sums), "one": Function(lambda *_: 1)})
    assert [(r.total, r.dropped) for r in both.rewards(rows, replies)] == [(3, False), (1, False)]


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_child_that_a_reward_forks_goes_no_further_than_the_reward():
    children = []
    assert compute_rewards(Plain(lambda row: children.append(os.fork()) or 0.5), [ROW], REPLIES[:1])
    assert os.waitpid(children[0], 0)[1] == 0


def test_a_trial_leaves_the_working_directory_where_it_was(tmp_path):
    before = os.getcwd()
    try_reward(Plain(lambda row: os.chdir(tmp_path) or 0.5))
    assert os.getcwd() == before
