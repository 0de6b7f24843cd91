"""MATH and mixtures: rows, splits, replies that are right or look so."""

import json
import math
from collections import Counter

import pytest
import torch
from contracts import make_policy, one_process
from tensordict import NonTensorData, NonTensorStack, TensorDict

from envs.chat_env import ChatEnv
from envs.tasks import Calculator, Facts, MathProblems, Mix, Reply, Reward, SortDigits, Task
from policies.random import fold
from trainer.collect import collect
from trainer.evaluation import Evaluate
from trainer.metrics import summarize


def reply(text: str) -> Reply:
    return Reply(text=text, complete=True, messages=[])


# MATH


@pytest.fixture(scope="module")
def problems(tmp_path_factory) -> MathProblems:
    """Return a task that asks math-verify."""
    rows = [
        ("What is $2+3$?", r"Clearly $\boxed{5}$."),
        ("Simplify $\\sqrt{8}$.", r"It is \boxed{2\sqrt{2}}."),
        ("Which interval?", r"\boxed{[1,2)}"),
    ]
    path = tmp_path_factory.mktemp("math") / "math.jsonl"
    path.write_text("\n".join(json.dumps({"problem": q, "solution": a}) for q, a in rows))
    columns = {"question": "problem", "answer": "solution"}
    return MathProblems(str(path), eval_dataset=str(path), columns=columns, timeout=30.0)


@pytest.mark.parametrize(
    ("index", "text", "right"),
    [
        (0, r"first \boxed{4}, no, \boxed{5}", True),
        (0, r"<think>\boxed{5}</think>", False),
        (0, r"\boxed{2+3}", False),
        (1, r"\boxed{\sqrt{2} \cdot 2}", True),
        (1, r"\boxed{\sqrt{8}}", False),
        (2, r"\boxed{[1,2]}", False),
    ],
)
def test_math_reward_is_for_the_boxed_answer_in_any_form(problems, index, text, right):
    """But not for a piece of the question."""
    done = problems.reward(problems.rows("train")[index], reply(text))
    assert (done.total, done.success, done.errors) == (float(right), right, 0)
    assert done.parts["format"] == float("think" not in text)


def test_a_comparison_that_takes_too_long_is_wrong_and_counted(problems, monkeypatch):
    rows = problems.rows("train")
    problems.rewards(rows[2:3], [reply(r"\boxed{x}")])  # the worker is there
    monkeypatch.setattr(problems._workers, "timeout", 1.0)
    (slow,) = problems.rewards(rows[1:2], [reply(r"\boxed{9^{9^{9^{9^{9}}}}}")])
    assert (slow.total, slow.errors, slow.success) == (0, 1, False)


# Mixtures


class Turns(Task):
    """A task of one row a split, with a second turn."""

    def rows(self, split):
        return [{"messages": [{"role": "user", "content": f"{split}?"}]}]

    def reward(self, row, reply):
        return Reward(2.0, {"said": 2.0}, success=False)

    def respond(self, row, reply):
        said = sum(m["role"] == "assistant" for m in reply.messages)
        return [] if said > 1 else [{"role": "user", "content": "Again."}]


def mixed(**options) -> Mix:
    tasks = {"digits": SortDigits(num_rows=60), "facts": Facts(), "turns": Turns()}
    return Mix(tasks, weights={"digits": 5, "facts": 2.5, "turns": 2.5}, **options)


def test_train_rows_come_in_the_proportions_of_the_weights_in_every_stretch():
    rows = mixed(num_rows=400).rows("train")
    names = [row["task"] for row in rows]
    for end in range(1, 401):
        count = Counter(names[:end])
        for name, share in (("digits", 0.5), ("facts", 0.25), ("turns", 0.25)):
            assert abs(count[name] - share * end) <= 1, (name, end)
    digits = [row["digits"] for row in rows if row["task"] == "digits"]
    every = [row["digits"] for row in SortDigits(num_rows=60).rows("train")]
    assert Counter(digits[:60]) == Counter(digits[60:120]) == Counter(every), "each once a round"
    task = Mix({"digits": SortDigits(num_rows=9), "sums": Calculator(num_rows=9)})
    demonstrations = task.demonstrations()
    assert Counter(row["task"] for row in demonstrations) == {"digits": 9, "sums": 9}
    assert all(row["messages"][-1]["role"] == "assistant" for row in demonstrations)


def test_train_rows_follow_the_seed_and_eval_rows_are_those_of_all_tasks_in_turn():
    one, same, other = (mixed(seed=s) for s in (1, 1, 2))
    assert list(one.rows("train")) == list(same.rows("train")) != list(other.rows("train"))
    rows = one.rows("eval")
    assert rows == other.rows("eval")
    assert [row["task"] for row in rows[:3]] == ["digits", "facts", "turns"]
    counts = {"digits": len(SortDigits().rows("eval")), "facts": len(Facts().rows("eval"))}
    assert Counter(row["task"] for row in rows) == counts | {"turns": 1}


def test_each_reply_is_judged_by_its_own_task_and_other_parts_do_not_apply():
    task = mixed()
    rows = {row["task"]: row for row in task.rows("eval")[:3]}
    digits = rows["digits"]["answer"]
    order = [rows["turns"], rows["digits"], rows["facts"], rows["digits"]]
    got = task.rewards(order, [reply(t) for t in ("x", digits, "Nowhere.", "no")])
    assert [(r.total, r.success) for r in got] == [(2, False), (1, True), (0, False), (0, False)]
    names = ["digits/exact", "digits/format", "facts/ended", "facts/named", "facts/single"]
    assert task.part_names() == sorted(got[0].parts) == [*names, "turns/said"]
    assert {n for n, v in got[1].parts.items() if not math.isnan(v)} == set(names[:2])
    assert task.respond(rows["digits"], reply("a")) == []


def test_mixed_batches_keep_the_tasks_parts_and_accuracies_apart():
    task, policy = mixed(), make_policy()
    rows = task.rows("train")[:4]  # digits, facts, turns, digits
    td = TensorDict({"stream": fold(0, torch.arange(4))}, batch_size=[4])
    td.set("row", NonTensorStack(*[NonTensorData(row) for row in rows]))
    env = ChatEnv(task, group_size=2, max_turns=2)
    batch = collect(td, env, policy)
    batch["reward"] = batch["reward_raw"]
    got = summarize(batch, one_process())
    values = batch["reward_part", "facts/ended"]
    assert values.isnan().tolist() == [rows[i // 2]["task"] != "facts" for i in range(8)]
    assert got["reward_part/facts/ended"] == pytest.approx(float(values.nanmean()))
    assert got["reward_part/turns/said"] == 4.0, "two turns of 2"
    evaluate = Evaluate(
        task=task, num_samples=1, max_rows=9, generator=policy, runtime=one_process(), env=env
    )
    scores, _ = evaluate(0)
    counts = Counter(row["task"] for row in evaluate.rows)
    for kind in ("sampled", "greedy"):
        total = sum(scores[f"eval/{kind}_accuracy/{name}"] * n for name, n in counts.items())
        assert scores[f"eval/{kind}_accuracy"] == pytest.approx(total / 9)
