"""Rewards by composition: plain, async, in processes, of TRL; weights, errors, dropped groups.

Also what a user's reward returns wrong, and the trial before a run.
"""

import asyncio
import contextlib
import functools
import inspect
import math
import os

import numpy as np
import psutil
import pytest
import torch
from support.policies import make_policy, one_process, prompts
from support.runs import gone
from support.tasks import Words
from support.workers import behave, needs_level

from conf.build import make_task
from conf.compose import compose_checked
from envs.chat_env import ChatEnv
from envs.rewards import (
    Function,
    Judge,
    Rewarded,
    RewardFunction,
    RewardModel,
    SubprocessReward,
    TRLFunction,
)
from envs.rewards.compute import compute_rewards
from envs.rewards.validate import try_reward
from envs.rewards.workers import Workers
from envs.tasks import Response, SortDigits
from envs.tasks.mix import Mix
from envs.tasks.task import Reward, Task, assistant, user
from trainer.collect import collect
from trainer.evaluation import Evaluate
from trainer.metrics import summarize
from trainer.runs.failures import headline
from trainer.transcripts import transcripts


def responses(*texts: str) -> list[Response]:
    return [Response(text, True, [{"role": "assistant", "content": text}]) for text in texts]


def judged(function: RewardFunction, *texts: str) -> list:
    """Return the scores, errors by the name of their type."""
    found = function.scores([{}] * len(texts), responses(*texts))
    return [type(s).__name__ if isinstance(s, Exception) else s for s in found]


@pytest.mark.parametrize("fault", [OSError("no"), SystemExit(3), asyncio.CancelledError()])
def test_a_function_fails_for_its_own_response_alone(fault):
    def plain(row: dict, response: Response) -> float:
        if response.text == "x":
            raise fault
        return float(response.text)

    async def waiting(row: dict, response: Response) -> float:
        return plain(row, response)

    name = "OSError" if isinstance(fault, OSError) else "RuntimeError"
    for function in (plain, waiting):
        assert judged(Function(function), "1", "x", "nan", "2") == [1, name, "ValueError", 2]


def test_async_functions_run_together_so_many_at_once_and_each_has_its_own_time():
    now, most = 0, 0

    async def wait(row: dict, response: Response) -> float:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        try:
            await asyncio.sleep(float(response.text))
        finally:
            now -= 1
        return float(response.text)

    async def notebook() -> list:
        return judged(Function(functools.partial(wait)), "0", "0")

    got = judged(Function(wait, timeout=1, at_once=3), *["0.01"] * 8, "60")
    assert got == [0.01] * 8 + ["TimeoutError"]
    assert most == 3
    assert asyncio.run(notebook()) == [0, 0], "also inside a running loop"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Function(behave, timeout=3), "SubprocessReward"),
        (lambda: Judge("localhost:8000", "m"), "url"),
        (lambda: Rewarded(SortDigits(num_rows=1), {"a": behave}), r"env\.rewards\.a"),
    ],
)
def test_wrong_settings_are_named(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_worker_that_hangs_crashes_or_leaves_is_replaced_and_costs_its_response_alone(tmp_path):
    function = SubprocessReward(
        functools.partial(behave, folder=str(tmp_path)), timeout=2, processes=2
    )
    want = {
        "1": 1, "crash": "RuntimeError", "2": 2, "exit": "RuntimeError", "no": "ValueError",
        "odd": "RuntimeError", "spawn": "TimeoutError", "3": 3,
    }  # fmt: skip
    assert judged(function, *want) == list(want.values())
    assert gone(int((tmp_path / "child").read_text()))
    function.workers.close()


def test_workers_are_few_live_on_and_end_with_their_owner():
    with contextlib.closing(Workers(behave, timeout=20, processes=2)) as workers:
        calls = [({}, response) for response in responses(*["pid"] * 8)]
        pids = set(workers.map(calls))
        assert set(workers.map(calls)) <= pids
        assert len(pids) <= 2
        assert os.getpid() not in pids
        os.kill(min(pids), 9)  # behind its owner's back
        psutil.wait_procs([psutil.Process(min(pids))], timeout=5)
        pids |= set(workers.map(calls))
        unsent = workers.map([({"f": lambda: 1}, calls[0][1]), *calls[:1]])
        assert [isinstance(value, Exception) for value in unsent] == [True, False]
    assert all(map(gone, pids))
    with pytest.raises(RuntimeError, match="pickle"):
        judged(SubprocessReward(lambda row, response: 1.0), "a")


def test_rewards_are_weighed_summed_and_logged_by_name():
    length = Function(lambda row, response: len(response.text), weight=-0.25)
    five = Function(lambda *_: 5, weight=2)
    task = Rewarded(SortDigits(), {"length": length, "five": five}, task_weight=0.5)
    row = SortDigits().row("312")
    first, second = task.rewards([row] * 2, responses("123", "321"))
    assert first.total == pytest.approx(0.5 * 1.0 - 0.25 * 3 + 2 * 5)
    assert second.total == pytest.approx(0.5 * 0.1 - 0.25 * 3 + 2 * 5)
    assert first.parts == {"exact": 1.0, "format": 1.0, "length": 3, "five": 5}
    assert (first.success, second.success) == (True, False), "success is the task's own"
    assert task.part_names() == sorted(first.parts)
    with pytest.raises(ValueError, match=r"env\.rewards .* got exact"):
        Rewarded(SortDigits(), {"exact": length}).part_names()


def test_an_error_ends_the_run_or_counts_with_one_warning():
    def odd(row: dict, response: Response) -> float:
        return 1 / (len(response.text) % 2)

    row, said = SortDigits().row("312"), responses("123", "12", "1234")
    with pytest.raises(RuntimeError, match=r"reward odd: .*on_error"):
        Rewarded(SortDigits(), {"odd": Function(odd)}).rewards([row] * 3, said)
    for on_error, dropped in (("zero", False), ("drop_group", True)):
        task = Rewarded(SortDigits(), {"odd": Function(odd, weight=3, on_error=on_error)})
        with pytest.warns(UserWarning, match="reward odd") as warned:
            got = task.rewards([row] * 3, said)
        assert len(warned) == 1
        assert [r.total for r in got] == [pytest.approx(1 + 3), 0, 0]
        assert [r.errors for r in got] == [0, 1, 1]
        assert [r.dropped for r in got] == [False, dropped, dropped]
        assert [math.isnan(r.parts["odd"]) for r in got] == [False, True, True]


class Failing(RewardFunction):
    """The n-th response of all, of those in `fails`, cannot be judged."""

    def __init__(self, *fails: int, **options) -> None:
        super().__init__(**options)
        self.fails, self.seen = fails, 0

    def scores(self, rows, responses):
        first, self.seen = self.seen, self.seen + len(rows)
        return [OSError("gone") if first + i in self.fails else 1.0 for i in range(len(rows))]


def played(*fails: int, on_error: str = "raise"):
    """Return a batch of 3 prompts x 4 samples."""
    task = Rewarded(Words(), {"judge": Failing(*fails, on_error=on_error)})
    batch = collect(prompts(3), ChatEnv(task, group_size=4), make_policy())
    return batch.set("reward", batch["reward_raw"])


@pytest.mark.filterwarnings("ignore:reward judge")
@pytest.mark.parametrize("on_error", ["drop_group", "zero"])
def test_dropped_group_leaves_loss_mask_and_reward_metrics_and_no_other_does(on_error):
    batch, whole = played(5, 6, on_error=on_error), played()
    out = (torch.arange(12) // 4 == 1) & (on_error == "drop_group")
    assert torch.equal(batch["dropped"], out)
    assert torch.equal(batch["loss_mask"], whole["loss_mask"] & ~out[:, None])
    assert torch.equal(batch["masks", "all_response_mask"], whole["loss_mask"])
    lost = (whole["reward_raw"] - batch["reward_raw"]).sum(-1).round(decimals=4)[~out]
    assert lost.nonzero().flatten().tolist() == ([] if out.any() else [5, 6])
    got, kept = summarize(batch, one_process()), batch["reward_raw"].sum(-1)[~out]
    assert (got["reward/errors"], got["reward/dropped_fraction"]) == (2, int(out.sum()) / 12)
    assert got["reward/raw_mean"] == got["reward/mean"] == pytest.approx(float(kept.mean()))
    assert got["reward/std"] == pytest.approx(float(kept.std(correction=0)))
    assert got["reward_part/judge"] == 1.0
    shown = {row["prompt"] for row in transcripts(batch, 0, count=12, kind="train")}
    assert shown == {batch.get("prompt").tolist()[i] for i in (0, 4, 8) if not out[i]}


@pytest.mark.filterwarnings("ignore:reward judge")
def test_evaluation_leaves_dropped_rows_out():
    options = {"generator": make_policy(), "runtime": one_process(), "num_samples": 2}
    task = Rewarded(Words(), {"judge": Failing(0, on_error="drop_group")})
    scores, _ = Evaluate(task=task, env=ChatEnv(task), greedy=False, **options)(0)
    whole = Evaluate(task=Words(), env=ChatEnv(Words()), greedy=False, **options)
    _, size, policy = whole.plans[0]
    prompts, env = whole._prompts([*range(len(whole.rows))]), whole.env.with_group_size(size)
    batch = collect(prompts, env, policy)
    rewards, right = batch["reward_raw"].sum(-1)[2:], batch["success"][2:].float()
    assert scores["eval/reward"] == pytest.approx(float(rewards.mean()) + 1.0)
    assert scores["eval/sampled_accuracy"] == pytest.approx(float(right.mean()))


# What a user's reward does wrong, and functions that were written for TRL.

ROW = {"messages": [user("a")], "columns": {"level": 3}, "task": "x"}
TWO = [Response("a", True, []), Response("b", True, [])]
wrapped = pytest.mark.parametrize(
    "wrap", [lambda t: t, lambda t: Mix({"x": t}), lambda t: Rewarded(t, {})]
)


class Plain(Task):
    """A task whose reward is what a function returns; keeps what it was asked."""

    def __init__(self, do=lambda row: 0.5, **more) -> None:
        self.do, self.asked, self.first = do, [], ROW | more

    def rows(self, split):
        return [self.first, {"messages": []}]

    def reward(self, row, response):
        self.asked.append((row, response))
        return self.do(row)


class Many(Plain):
    def rewards(self, rows, responses):
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
        with pytest.raises(ValueError, match="Plain") as caught:
            ChatEnv(task)._rewards([ROW] * 2, TWO)
        text = headline(caught.value)
        assert type(value).__name__ in text
        assert "\n" not in text
    few = wrap(Many(lambda rows: [Reward(0, {}, True)]))
    with pytest.raises(ValueError, match="Many"):
        ChatEnv(few)._rewards([ROW] * 2, TWO)


@wrapped
@pytest.mark.parametrize("value", [0.5, True, np.int64(2), torch.tensor(0.25)])
def test_a_plain_number_is_a_reward_without_parts(wrap, value):
    for task in (wrap(Plain(lambda row: value)), wrap(Many(lambda rows: [value] * len(rows)))):
        assert task.part_names() == []
        got = ChatEnv(task)._rewards([ROW] * 2, TWO)
        assert got == [Reward(float(value), {}, True)] * 2
        assert type(got[0].total) is float


def test_an_error_names_the_file_and_line_of_the_user_and_where_the_cells_are():
    for do, error in ((of_level, KeyError), (divide, ZeroDivisionError)):
        with pytest.raises(error) as caught:
            compute_rewards(Plain(do), [ROW] * 2, TWO)
        text = headline(caught.value)
        assert f"(in the reward of Plain, {line_of(do)}" in text
        assert ('row["columns"]: level' in text) is (do is of_level)
    for function in (Function(needs_level), SubprocessReward(needs_level, timeout=60, processes=1)):
        with pytest.raises(RuntimeError, match="reward own") as caught:
            Rewarded(Plain(), {"own": function}).rewards([ROW] * 2, TWO)
        assert line_of(needs_level) in headline(caught.value)
        assert 'row["columns"]: level' in headline(caught.value)


def test_a_trial_asks_once_with_the_answer_of_the_first_row():
    for more, said in (({"answer": "four"}, "four"), ({"answer": 4}, ""), ({}, "")):
        task = Plain(**more)
        try_reward(task)
        ((row, response),) = task.asked
        assert row == ROW | more
        assert (response.text, response.complete) == (said, True)
        assert response.messages == [*ROW["messages"], assistant(said)]
    with pytest.raises(ZeroDivisionError) as caught:
        try_reward(Plain(divide, answer="yes"))
    assert "the response 'yes'" in headline(caught.value)
    try_reward(Task())  # a task for SFT: no rows, no reward


def test_a_trial_asks_no_judge_and_no_model():
    asked = []
    rewards = {
        "own": Function(lambda row, response: asked.append("own") or 0.5),
        "judge": Judge(url="http://127.0.0.1:9", model="none", tries=1, on_error="raise"),
        "model": RewardModel("experiment:rm_tiny"),
    }
    task = Rewarded(Plain(), rewards)
    try_reward(Rewarded(Mix({"x": task}), rewards))
    assert asked == ["own"] * 2
    assert set(task.functions) == set(rewards), "the task itself is left as it is"


ASKED, FOUR = user("Half of 8?"), assistant("4")
FIRST = {"role": "system", "content": "Be brief."}


def chat(text: str, *before: dict) -> Response:
    return Response(text, True, [*(before or (ASKED,)), assistant(text)])


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

    rows, responses = [row("a", answer="4"), row("b", answer="5")], [chat("4")] * 2
    for function in (functools.partial(waiting, scale=3), lambda **k: waiting(**k, scale=3)):
        assert TRLFunction(function).scores(rows, responses) == [3.0, 0.0]


def test_an_error_costs_its_own_response_alone_unless_it_ends_the_run():
    def number(completions, **kwargs):
        return [float(text) for text in completions]

    rows, responses = [row("a")] * 4, [chat("1"), chat("x"), chat("nan"), chat("3")]
    got = TRLFunction(number, on_error="zero").scores(rows, responses)
    assert [type(s).__name__ for s in got] == ["float", "ValueError", "ValueError", "float"]
    assert {type(s) for s in TRLFunction(number).scores(rows, responses)} == {ValueError}
    for function, says in (
        (lambda **_: 0.5, "expected 2 rewards, got 0.5"),
        (lambda **_: [1.0], "expected 2 rewards, got 1"),
        (lambda completions, truth, **_: [1.0], "needs truth"),
    ):
        task = Rewarded(SortDigits(), {"odd": TRLFunction(function, on_error="zero")})
        with pytest.raises(ValueError, match=rf"env\.rewards\.odd: .*{says}"):
            task.rewards([SortDigits().row("12")] * 2, [chat("12")] * 2)


def test_none_is_left_out_of_the_sum_and_a_response_that_nobody_judges_is_dropped():
    def sums(completions, kind, **kwargs):
        return [2.0 if k == "sum" else None for k in kind]

    rows, responses = [row("a", kind="sum"), row("b", kind="word")], [chat("1")] * 2
    alone = Rewarded(Task(), {"sums": TRLFunction(sums, weight=0.5)})
    first, second = alone.rewards(rows, responses)
    assert (first.total, first.dropped, first.success, first.parts) == (1, False, True, {"sums": 2})
    assert (second.total, second.dropped, second.errors) == (0, True, 0)
    assert math.isnan(second.parts["sums"])
    both = Rewarded(Task(), {"sums": TRLFunction(sums), "one": Function(lambda *_: 1)})
    assert [(r.total, r.dropped) for r in both.rewards(rows, responses)] == [(3, False), (1, False)]


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_the_weight_of_the_tasks_reward_holds_without_other_rewards(weight):
    task = make_task(compose_checked(["experiment=grpo_tiny", f"env.task_weight={weight}"])["env"])
    row = task.rows("train")[0]
    right = Response(row["answer"], True, [])
    assert task.reward(row, right).total == weight * SortDigits().reward(row, right).total
