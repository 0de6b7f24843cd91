"""Rewards by composition: plain, async and in worker processes; weights, errors, dropped groups."""

import asyncio
import contextlib
import functools
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from contracts import Words, make_policy, one_process, prompts
from processes import gone
from reward_cases import behave

from envs.chat_env import ChatEnv
from envs.rewards import Function, InProcess, Rewarded, RewardFunction, RewardModel
from envs.rewards.functions import Given
from envs.rewards.trl_function import hold
from envs.rewards.workers import Workers
from envs.tasks import Reply, SortDigits, Task
from trainer.collect import collect
from trainer.evaluation import Evaluate
from trainer.metrics import summarize
from trainer.transcripts import transcript, transcripts

ROOT = Path(__file__).parents[1]


def replies(*texts: str) -> list[Reply]:
    return [Reply(text, True, [{"role": "assistant", "content": text}]) for text in texts]


def judged(function: RewardFunction, *texts: str) -> list:
    """Return the scores, errors by the name of their type."""
    found = function.scores([{}] * len(texts), replies(*texts))
    return [type(s).__name__ if isinstance(s, Exception) else s for s in found]


def length(row: dict, reply: Reply) -> float:
    return len(reply.text)


# Functions


def test_plain_function_fails_for_its_own_reply_alone():
    function = Function(lambda row, reply: 6 / int(reply.text))
    assert judged(function, "3", "0", "x", "2") == [2, "ZeroDivisionError", "ValueError", 3]
    for value in (math.nan, math.inf, None, "high", [1, 2]):
        assert judged(Function(lambda row, reply, v=value: v), "a") == ["ValueError"]
    assert judged(Function(lambda row, reply: True), "a") == [1.0]


def test_async_functions_run_together_and_each_has_its_own_time():
    async def wait(row: dict, reply: Reply) -> float:
        await asyncio.sleep(float(reply.text))
        return float(reply.text)

    start = time.monotonic()
    times = [*["0.3"] * 20, "60", "-x"]
    got = judged(Function(wait, timeout=2), *times)
    assert got == [0.3] * 20 + ["TimeoutError", "ValueError"]
    assert time.monotonic() - start < 5, "20 waits of 0.3 s one after the other take 6 s"


@pytest.mark.parametrize("fault", [SystemExit(3), asyncio.CancelledError()])
def test_function_that_would_end_the_program_fails_for_its_own_reply_alone(fault):
    def plain(row: dict, reply: Reply) -> float:
        if reply.text == "x":
            raise fault
        return float(reply.text)

    async def waiting(row: dict, reply: Reply) -> float:
        await asyncio.sleep(0)
        return plain(row, reply)

    for function in (Function(plain), Function(waiting), Function(waiting, timeout=60)):
        first, second, third = function.scores([{}] * 3, replies("1", "x", "2"))
        assert (first, repr(second), third) == (1, f"RuntimeError({repr(fault)!r})", 2)


def test_ctrl_c_in_a_function_stops_the_run():
    def plain(row: dict, reply: Reply) -> float:
        os.kill(os.getpid(), signal.SIGINT)
        return 1.0

    async def waiting(row: dict, reply: Reply) -> float:
        plain(row, reply)
        await asyncio.sleep(60)
        return 1.0

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for function in (Function(plain), Function(waiting, timeout=60)):
            with pytest.raises(KeyboardInterrupt):
                function.scores([{}] * 2, replies("1", "2"))
    finally:
        signal.signal(signal.SIGINT, before)


def test_async_functions_run_so_many_at_once():
    now, most = 0, 0

    async def count(row: dict, reply: Reply) -> float:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return most

    judged(Function(count, at_once=3), *"abcdefgh")
    assert most == 3


def test_async_functions_work_inside_a_running_loop():
    async def one(row: dict, reply: Reply) -> float:
        return 1.0

    async def notebook() -> list:
        return judged(Function(functools.partial(one)), "a", "b")

    assert asyncio.run(notebook()) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Function(length, on_error="ignore"), "on_error in raise, zero, drop_group"),
        (lambda: Function(length, weight=math.nan), "finite weight"),
        (lambda: Function(length, timeout=3), "InProcess"),
        (lambda: InProcess(length, timeout=0), "timeout > 0"),
        (lambda: RewardModel("nowhere"), "folder with reward_model.safetensors"),
        (lambda: Rewarded(SortDigits(), {"a": length}), "env.rewards.a: .*RewardFunction"),
    ],
)
def test_wrong_settings_are_refused_where_they_are_given(make, says):
    with pytest.raises(ValueError, match=says):
        make()


# Worker processes


def test_worker_that_hangs_crashes_or_leaves_is_replaced_and_costs_its_reply_alone(tmp_path):
    function = InProcess(functools.partial(behave, folder=str(tmp_path)), timeout=4, processes=2)
    said = ["1", "hang", "crash", "2", "exit", "raise no", "odd", "a b"]
    said += ["huge", "spawn", "print", "3"]
    start = time.monotonic()
    got = judged(function, *said)
    assert got == [1, "TimeoutError", "RuntimeError", 2, "RuntimeError", "ValueError",
                   "RuntimeError", "ValueError", "OverflowError", "TimeoutError",
                   1, 3]  # fmt: skip
    assert time.monotonic() - start < 90, "two time-outs of 4 s, and starts of processes"
    child = int((tmp_path / "child").read_text())
    assert gone(child)
    errors = function.scores([{}] * 3, replies("crash", "exit", "close"))
    assert [str(e) for e in errors] == [
        "the worker died (exit code -11)",
        "the worker died (exit code 3)",
        "the worker died (exit code -9)",
    ]
    function.workers.close()


def test_workers_are_few_live_on_and_end_with_their_owner():
    others = {p.pid for p in psutil.Process().children()}  # of other tests
    with contextlib.closing(Workers(behave, timeout=20, processes=2)) as workers:
        pids = set(workers.map([({}, reply) for reply in replies(*["pid"] * 8)]))
        assert set(workers.map([({}, reply) for reply in replies(*["pid"] * 8)])) <= pids
        assert len(pids) <= 2
        assert os.getpid() not in pids
        assert workers.map([]) == []
        os.kill(min(pids), 9)  # behind its owner's back
        psutil.wait_procs([psutil.Process(min(pids))], timeout=5)
        assert workers.map([({}, reply) for reply in replies("1", "2")]) == [1, 2]
        late = {p.pid for p in psutil.Process().children()} - others
    assert all(map(gone, pids | late))


def test_workers_of_a_killed_owner_end_also_when_they_hang():
    code = (
        "import os; from envs.rewards.workers import Workers; from envs.tasks import Reply; "
        "from reward_cases import behave; workers = Workers(behave, timeout=99, processes=1); "
        "print(*workers.map([({}, Reply('pid', True, []))]), flush=True); "
        "workers.map([({}, Reply('hang', True, []))])"
    )
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    with owner:
        worker = psutil.Process(int(owner.stdout.readline()))
        time.sleep(0.3)  # it hangs by now
        owner.kill()
    _, alive = psutil.wait_procs([worker], timeout=10)
    assert not alive


def test_arguments_that_cannot_be_sent_fail_for_their_own_reply_alone():
    with contextlib.closing(Workers(behave, timeout=20, processes=1)) as workers:
        first, second = workers.map([({"f": lambda: 1}, replies("1")[0]), ({}, replies("2")[0])])
    assert isinstance(first, Exception)
    assert second == 2


def test_function_that_cannot_be_sent_or_loaded_is_an_error_of_the_run():
    with pytest.raises(RuntimeError, match=r"no worker for .*pickle"):
        judged(InProcess(lambda row, reply: 1.0), "a")


# Sums


def test_rewards_are_weighed_summed_and_logged_by_name():
    task = Rewarded(
        SortDigits(),
        {"length": Function(length, weight=-0.25), "five": Function(lambda *_: 5, weight=2)},
        task_weight=0.5,
    )
    row = SortDigits().row("312")
    first, second = task.rewards([row] * 2, replies("123", "321"))
    assert first.total == pytest.approx(0.5 * 1.0 - 0.25 * 3 + 2 * 5)
    assert second.total == pytest.approx(0.5 * 0.1 - 0.25 * 3 + 2 * 5)
    assert first.parts == {"exact": 1.0, "format": 1.0, "length": 3, "five": 5}
    assert (first.success, second.success) == (True, False), "success is the task's own"
    assert task.part_names() == sorted(first.parts)
    assert task.rows("eval") == SortDigits().rows("eval")


def test_task_without_a_reward_is_judged_by_the_functions_alone():
    class Asked(Task):
        def rows(self, split):
            return [{"messages": [{"role": "user", "content": "Hi"}]}]

    task = Rewarded(Asked(), {"sign": Function(lambda row, reply: float(reply.text))})
    good, bad = task.rewards([{}] * 2, replies("2", "-1"))
    assert (good.total, good.success, good.parts) == (2.0, True, {"sign": 2.0})
    assert (bad.total, bad.success) == (-1.0, False)
    assert task.part_names() == ["sign"]


def test_name_of_a_reward_that_the_task_has_already_is_refused():
    task = Rewarded(SortDigits(), {"exact": Function(length)})
    with pytest.raises(ValueError, match="own parts exact, format, got exact"):
        task.part_names()


def test_error_ends_the_run_or_counts_and_is_told_once():
    def odd(row: dict, reply: Reply) -> float:
        return 1 / (len(reply.text) % 2)

    row, said = SortDigits().row("312"), replies("123", "12", "1234")
    hold("odd", odd)
    for made in (Function(odd), Given("odd")):
        task = Rewarded(SortDigits(), {"odd": made})
        with pytest.raises(RuntimeError, match=r"reward odd: ZeroDivisionError.*on_error to zero"):
            task.rewards([row] * 3, said)
    for on_error, dropped in (("zero", False), ("drop_group", True)):
        task = Rewarded(SortDigits(), {"odd": Function(odd, weight=3, on_error=on_error)})
        with pytest.warns(UserWarning, match="reward odd: ZeroDivisionError") as told:
            got = task.rewards([row] * 3, said)
        assert len(told) == 1
        assert [r.total for r in got] == [pytest.approx(1 + 3), 0, 0]
        assert [r.errors for r in got] == [0, 1, 1]
        assert [r.dropped for r in got] == [False, dropped, dropped]
        assert [math.isnan(r.parts["odd"]) for r in got] == [False, True, True]


# What a dropped group does to a batch


class Failing(RewardFunction):
    """The n-th reply of all, of those in `fails`, cannot be judged."""

    def __init__(self, fails: set[int], **options) -> None:
        super().__init__(**options)
        self.fails, self.seen = fails, 0

    def scores(self, rows, replies):
        self.seen += len(rows)
        first = self.seen - len(rows)
        return [OSError("gone") if first + i in self.fails else 1.0 for i in range(len(rows))]


def played(fails: set[int], on_error: str):
    """Return a batch of 3 prompts x 4 samples with failures, and the same without."""
    batches = []
    for which in (fails, set[int]()):
        task = Rewarded(Words(), {"judge": Failing(which, on_error=on_error)})
        batches.append(collect(prompts(3), ChatEnv(task, group_size=4), make_policy()))
    return batches


@pytest.mark.filterwarnings("ignore:reward judge")
def test_dropped_group_leaves_loss_mask_and_reward_metrics_and_no_other_does():
    batch, whole = played({5, 6}, "drop_group")
    out = torch.arange(12) // 4 == 1
    assert torch.equal(batch["dropped"], out)
    assert torch.equal(batch["loss_mask"], whole["loss_mask"] & ~out[:, None])
    assert torch.equal(batch["masks", "all_response_mask"], whole["loss_mask"])
    assert torch.equal(batch["reward_raw"], whole["reward_raw"] * ~out[:, None])
    for each in (batch, whole):
        each["reward"] = each["reward_raw"]
        each["kl_penalty"] = torch.ones_like(each["reward_raw"])
        each["ref_log_probs", "full"] = each["log_probs", "full"]
    got, kept = summarize(batch, one_process()), whole["reward_raw"].sum(-1)[~out]
    assert got["reward/errors"] == 2
    assert got["reward/dropped_fraction"] == pytest.approx(4 / 12)
    assert got["reward/raw_mean"] == got["reward/mean"] == pytest.approx(float(kept.mean()))
    assert got["reward/std"] == pytest.approx(float(kept.std(correction=0)))
    assert got["reward_part/judge"] == 1.0
    assert got["kl/ref_sequence"] == pytest.approx(float(whole["loss_mask"][~out].sum()) / 8)
    shown = {row["prompt"] for row in transcripts(batch, 0, count=12, kind="train")}
    assert shown == {batch.get("prompt").tolist()[i] for i in (0, 8)}
    healthy = summarize(whole, one_process())
    assert (healthy["reward/errors"], healthy["reward/dropped_fraction"]) == (0, 0)


@pytest.mark.filterwarnings("ignore:reward judge")
def test_zero_keeps_the_group_and_its_part_is_the_mean_of_those_judged():
    batch, whole = played({5, 6}, "zero")
    assert torch.equal(batch["loss_mask"], whole["loss_mask"])
    lost = (whole["reward_raw"] - batch["reward_raw"]).sum(-1).round(decimals=4)
    assert lost.nonzero().flatten().tolist() == [5, 6]
    batch["reward"] = batch["reward_raw"]
    got = summarize(batch, one_process())
    assert (got["reward/errors"], got["reward/dropped_fraction"]) == (2, 0)
    assert got["reward_part/judge"] == 1.0
    parts = [transcript(batch, i, 0, kind="train")["parts"] for i in range(12)]
    assert [i for i, part in enumerate(parts) if "judge" not in part] == [5, 6]


@pytest.mark.filterwarnings("ignore:reward judge")
def test_batch_that_nobody_could_judge_has_no_mean_of_the_part():
    batch, _ = played(set(range(12)), "drop_group")
    batch["reward"] = batch["reward_raw"]
    got = summarize(batch, one_process())
    assert (got["reward/errors"], got["reward/dropped_fraction"]) == (12, 1)
    assert not {"reward_part/judge", "reward/raw_mean", "reward/mean", "reward/std"} & set(got)
    assert not batch["loss_mask"].any()


@pytest.mark.filterwarnings("ignore:reward judge")
def test_evaluation_leaves_dropped_rows_out():
    task = Rewarded(Words(), {"judge": Failing({0}, on_error="drop_group")})
    parts = {"task": task, "generator": make_policy(), "runtime": one_process()}
    parts["env"] = ChatEnv(task)
    made = Evaluate(**parts, num_samples=2, greedy=False)
    assert made.about == f"{len(made.rows)} prompts x 2 samples"
    assert Evaluate(**parts, num_samples=1, max_rows=1).about == "1 prompts x 1 samples, greedy"
    scores, _ = made(0)
    whole = Evaluate(**{**parts, "task": Words(), "env": ChatEnv(Words())}, num_samples=2,
                     greedy=False, max_rows=None)  # fmt: skip
    batch = collect(whole._prompts(list(range(len(whole.rows)))), whole.plans[0][1],
                    whole.plans[0][2])  # fmt: skip
    rewards, right = batch["reward_raw"].sum(-1)[2:], batch["success"][2:].float()
    assert scores["eval/reward"] == pytest.approx(float(rewards.mean()) + 1.0)
    assert scores["eval/sampled_accuracy"] == pytest.approx(float(right.mean()))
