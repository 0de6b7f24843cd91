"""What a user's reward does wrong: one line with the task, and the user's file and line."""

import inspect
import signal
import time

import pytest

from envs.chat_env import ChatEnv
from envs.places import rewards_of
from envs.rewards import Function, InProcess, Rewarded
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


def interrupt(row):
    raise KeyboardInterrupt


def leave(row):
    raise SystemExit(3)


def told(error: BaseException) -> str:
    text = headline(error)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: Mix({"x": t}), lambda t: Rewarded(t, {})])
def test_a_reward_that_is_none_or_a_number_is_one_line(wrap):
    for value in (0.5, None, "good", (1, 2)):
        task = wrap(Faulty(lambda row, value=value: value))
        rows = [{**ROW, "task": "x"}] * 2
        with pytest.raises(
            ValueError, match=r"Reward of Faulty, got .*; return Reward\(total"
        ) as e:
            ChatEnv(task)._rewards(rows, REPLIES)
        assert type(value).__name__ in told(e.value)
    for count in (1, 3):
        task = wrap(Many(lambda rows, n=count: [Reward(0, {}, True)] * n))
        with pytest.raises(ValueError, match=f"2 rewards of Many.rewards, .* got {count}"):
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


@pytest.mark.parametrize("do", [interrupt, leave])
def test_what_would_end_the_process_ends_the_run_in_one_line(do):
    before = signal.signal(signal.SIGINT, lambda *_: None)  # as in a run
    try:
        with pytest.raises(RuntimeError) as caught:
            rewards_of(Faulty(do), [ROW] * 2, REPLIES)
        assert line_of(do) in told(caught.value)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises((KeyboardInterrupt, SystemExit)):  # in a notebook it may be Ctrl-C
            rewards_of(Faulty(do), [ROW] * 2, REPLIES)
    finally:
        signal.signal(signal.SIGINT, before)


def large(row, reply):
    return "x" * (100 << 20)


def nested(row, reply):
    return {"a": row["level"]}


def test_an_error_in_an_added_reward_names_its_place_in_every_process():
    for made in (Function(nested), InProcess(nested, timeout=60, processes=1)):
        task = Rewarded(Faulty(lambda row: Reward(0, {}, True)), {"own": made})
        with pytest.raises(RuntimeError, match="reward own: KeyError: 'level'") as caught:
            task.rewards([ROW] * 2, REPLIES)
        assert line_of(nested) in told(caught.value)


def test_a_worker_that_returns_too_much_is_told_at_once():
    made = InProcess(large, timeout=60, processes=1)
    start = time.perf_counter()
    (score,) = made.scores([ROW], REPLIES[:1])
    assert isinstance(score, ValueError)
    assert "a str of 100 MiB" in str(score)
    assert time.perf_counter() - start < 50
