"""Rewards by composition: plain, async and in worker processes; weights, errors, dropped groups."""

import asyncio
import contextlib
import functools
import math
import os
import subprocess
import sys
import time

import psutil
import pytest
import torch
from contracts import Words, make_policy, one_process, prompts
from processes import gone
from reward_cases import behave
from runs import ROOT, environment

from envs.chat_env import ChatEnv
from envs.rewards import Function, Judge, Rewarded, RewardFunction, SubprocessReward
from envs.rewards.workers import Workers
from envs.tasks import Reply, SortDigits
from trainer.collect import collect
from trainer.evaluation import Evaluate
from trainer.metrics import summarize
from trainer.transcripts import transcripts


def replies(*texts: str) -> list[Reply]:
    return [Reply(text, True, [{"role": "assistant", "content": text}]) for text in texts]


def judged(function: RewardFunction, *texts: str) -> list:
    """Return the scores, errors by the name of their type."""
    found = function.scores([{}] * len(texts), replies(*texts))
    return [type(s).__name__ if isinstance(s, Exception) else s for s in found]


@pytest.mark.parametrize("fault", [OSError("no"), SystemExit(3), asyncio.CancelledError()])
def test_a_function_fails_for_its_own_reply_alone(fault):
    def plain(row: dict, reply: Reply) -> float:
        if reply.text == "x":
            raise fault
        return float(reply.text)

    async def waiting(row: dict, reply: Reply) -> float:
        return plain(row, reply)

    name = "OSError" if isinstance(fault, OSError) else "RuntimeError"
    for function in (plain, waiting):
        assert judged(Function(function), "1", "x", "nan", "2") == [1, name, "ValueError", 2]


def test_async_functions_run_together_so_many_at_once_and_each_has_its_own_time():
    now, most = 0, 0

    async def wait(row: dict, reply: Reply) -> float:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        try:
            await asyncio.sleep(float(reply.text))
        finally:
            now -= 1
        return float(reply.text)

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
        (lambda: Judge("http://localhost", "m", prompt="Good?"), "prompt"),
        (lambda: Rewarded(SortDigits(num_rows=1), {"a": behave}), r"env\.rewards\.a"),
    ],
)
def test_wrong_settings_are_named(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_worker_that_hangs_crashes_or_leaves_is_replaced_and_costs_its_reply_alone(tmp_path):
    behaving = functools.partial(behave, folder=str(tmp_path))
    function = SubprocessReward(behaving, timeout=2, processes=2)
    want = {
        "1": 1, "crash": "RuntimeError", "2": 2, "exit": "RuntimeError", "no": "ValueError",
        "odd": "RuntimeError", "spawn": "TimeoutError", "3": 3,
    }  # fmt: skip
    assert judged(function, *want) == list(want.values())
    assert gone(int((tmp_path / "child").read_text()))
    function.workers.close()


def test_workers_are_few_live_on_and_end_with_their_owner():
    with contextlib.closing(Workers(behave, timeout=20, processes=2)) as workers:
        calls = [({}, reply) for reply in replies(*["pid"] * 8)]
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
    with pytest.raises(RuntimeError, match=r"no worker for .*pickle"):
        judged(SubprocessReward(lambda row, reply: 1.0), "a")


def test_workers_of_a_killed_owner_end_also_when_they_hang():
    code = """
from envs.rewards.workers import Workers
from envs.tasks import Reply
from reward_cases import behave
workers = Workers(behave, timeout=99, processes=1)
print(*workers.map([({}, Reply("pid", True, []))]), flush=True)
workers.map([({}, Reply("hang", True, []))])
"""
    env = environment(PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env) as owner:
        worker = int(owner.stdout.readline())
        time.sleep(0.3)  # it hangs by now
        owner.kill()
    assert gone(worker)


def test_rewards_are_weighed_summed_and_logged_by_name():
    length = Function(lambda row, reply: len(reply.text), weight=-0.25)
    five = Function(lambda *_: 5, weight=2)
    task = Rewarded(SortDigits(), {"length": length, "five": five}, task_weight=0.5)
    row = SortDigits().row("312")
    first, second = task.rewards([row] * 2, replies("123", "321"))
    assert first.total == pytest.approx(0.5 * 1.0 - 0.25 * 3 + 2 * 5)
    assert second.total == pytest.approx(0.5 * 0.1 - 0.25 * 3 + 2 * 5)
    assert first.parts == {"exact": 1.0, "format": 1.0, "length": 3, "five": 5}
    assert (first.success, second.success) == (True, False), "success is the task's own"
    assert task.part_names() == sorted(first.parts)
    with pytest.raises(ValueError, match=r"env\.rewards .* got exact"):
        Rewarded(SortDigits(), {"exact": length}).part_names()


def test_an_error_ends_the_run_or_counts_with_one_warning():
    def odd(row: dict, reply: Reply) -> float:
        return 1 / (len(reply.text) % 2)

    row, said = SortDigits().row("312"), replies("123", "12", "1234")
    with pytest.raises(RuntimeError, match=r"reward odd: ZeroDivisionError.*on_error"):
        Rewarded(SortDigits(), {"odd": Function(odd)}).rewards([row] * 3, said)
    for on_error, dropped in (("zero", False), ("drop_group", True)):
        task = Rewarded(SortDigits(), {"odd": Function(odd, weight=3, on_error=on_error)})
        with pytest.warns(UserWarning, match="reward odd: ZeroDivisionError") as warned:
            got = task.rewards([row] * 3, said)
        assert len(warned) == 1
        assert [r.total for r in got] == [pytest.approx(1 + 3), 0, 0]
        assert [r.errors for r in got] == [0, 1, 1]
        assert [r.dropped for r in got] == [False, dropped, dropped]
        assert [math.isnan(r.parts["odd"]) for r in got] == [False, True, True]


class Failing(RewardFunction):
    """The n-th reply of all, of those in `fails`, cannot be judged."""

    def __init__(self, *fails: int, **options) -> None:
        super().__init__(**options)
        self.fails, self.seen = fails, 0

    def scores(self, rows, replies):
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
    _, env, policy = whole.plans[0][:3]
    batch = collect(whole._prompts(list(range(len(whole.rows)))), env, policy)
    rewards, right = batch["reward_raw"].sum(-1)[2:], batch["success"][2:].float()
    assert scores["eval/reward"] == pytest.approx(float(rewards.mean()) + 1.0)
    assert scores["eval/sampled_accuracy"] == pytest.approx(float(right.mean()))
