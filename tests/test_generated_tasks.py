"""Arithmetic, Countdown, MATH and mixtures: rows, splits, replies that are right or look so."""

import itertools
import json
import math
import re
from collections import Counter
from fractions import Fraction

import pytest
import torch
from contracts import make_policy, one_process
from tensordict import NonTensorData, NonTensorStack, TensorDict

from conf.build import make_task
from envs.chat_env import ChatEnv
from envs.tasks import (
    Arithmetic,
    Countdown,
    Facts,
    MathProblems,
    Mix,
    Reply,
    Reward,
    SortDigits,
    Task,
)
from envs.tasks.countdown import is_held_out as countdown_held_out
from policies.random import fold
from trainer.collect import collect
from trainer.evaluation import Evaluate
from trainer.metrics import summarize


def reply(text: str, *, complete: bool = True) -> Reply:
    return Reply(text=text, complete=complete, messages=[])


def asked(row: dict) -> str:
    return row["messages"][-1]["content"]


# Arithmetic


@pytest.mark.parametrize("operators", ["+", "-", "*", "+-*"])
def test_arithmetic_rows_are_right_and_no_eval_problem_is_trained_on(operators):
    task = Arithmetic(operators=operators, max_digits=3, num_rows=3000)
    problems = {}
    for split in ("train", "eval"):
        problems[split] = set()
        for row in task.rows(split):
            found = re.fullmatch(r"What is (\d+) ([-+*]) (\d+)\?", asked(row))
            left, sign, right = int(found[1]), found[2], int(found[3])
            assert sign in operators
            assert max(left, right) <= 999
            value = {"+": left + right, "-": left - right, "*": left * right}[sign]
            assert row["answer"] == str(value)
            assert value >= 0
            problems[split].add((frozenset((left, right)), sign))
            assert task.reward(row, reply(row["answer"])).total == 1
    assert not problems["train"] & problems["eval"]
    assert len(problems["eval"]) == len(task.rows("eval")) == 200
    assert len(task.rows("train")) == 3000


def test_arithmetic_keeps_to_the_digits_asked_for_and_to_its_seed():
    rows = Arithmetic(operators="*", min_digits=2, max_digits=2, num_rows=500).rows("train")
    numbers = [int(n) for row in rows for n in re.findall(r"\d+", asked(row))]
    assert (min(numbers), max(numbers)) == (10, 99)
    one, same, other = (Arithmetic(seed=s, num_rows=50) for s in (1, 1, 2))
    assert one.rows("train") == same.rows("train") != other.rows("train")
    assert one.rows("eval") == other.rows("eval")
    for operators in "+-*":  # 55 problems of one digit
        assert 2 <= len(Arithmetic(max_digits=1, operators=operators).rows("eval")) <= 14


@pytest.mark.parametrize(
    ("text", "total", "success"),
    [
        ("132", 1.0, True),
        (" 132\n", 1.0, True),
        ("The answer is 132.", 0.9, True),
        ("47 + 85 = 132", 0.9, True),
        ("<think>47 + 85 is 131, no</think> 132", 0.9, True),
        (r"5 and 7 make 12, so \boxed{132}", 0.9, True),
        ("<answer>132</answer>", 0.9, True),
        ("131", 0.1, False),
        ("", 0.0, False),
        ("What is 47 + 85?", 0.0, False),
        ("131, 132", 0.0, False),
        ("1320", 0.1, False),
        ("132.5", 0.0, False),
        ("-132", 0.1, False),
        ("\u0661\u0663\u0662", 0.0, False),
        ("9" * 5000, 0.1, False),
    ],
)
def test_arithmetic_reward_wants_the_right_number_and_no_other(text, total, success):
    task = Arithmetic(num_rows=1)
    done = task.reward(task.row(47, "+", 85), reply(text))
    assert (done.total, done.success) == (pytest.approx(total), success)
    cut = task.reward(task.row(47, "+", 85), reply(text, complete=False))
    assert not cut.success
    assert cut.total == pytest.approx(0.9 * done.parts["exact"])


def test_repeating_the_question_is_no_answer_even_where_it_holds_one():
    task = Arithmetic(num_rows=1)
    for left, sign, right in ((5, "-", 0), (7, "*", 1), (0, "+", 9), (4, "+", 4)):
        row = task.row(left, sign, right)
        for text in (asked(row), row["problem"], f"{left}, {right}" if left != right else ""):
            assert task.reward(row, reply(text)).total < 0.9, text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"operators": "/"}, "operators among"),
        ({"operators": ""}, "operators among"),
        ({"min_digits": 3}, "3 and 2"),
        ({"num_rows": 0}, "num_rows"),
    ],
)
def test_arithmetic_that_cannot_be_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        Arithmetic(**options)


# Countdown


def reachable(numbers: list[int]) -> set[Fraction]:
    """Return all values that some of the numbers make, by trying everything."""
    found = set()
    for size in range(1, len(numbers) + 1):
        for chosen in itertools.combinations(range(len(numbers)), size):
            found |= _made(tuple(Fraction(numbers[i]) for i in chosen))
    return found


def _made(values: tuple[Fraction, ...]) -> set[Fraction]:
    if len(values) == 1:
        return {values[0]}
    out = set()
    for i, j in itertools.permutations(range(len(values)), 2):
        rest = tuple(v for k, v in enumerate(values) if k not in (i, j))
        a, b = values[i], values[j]
        for value in (a + b, a - b, a * b, *([a / b] if b else [])):
            out |= _made((*rest, value))
    return out


def test_countdown_rows_can_be_solved_and_eval_numbers_are_never_trained_on():
    task = Countdown(num_rows=400)
    kinds = {}
    for split in ("train", "eval"):
        kinds[split] = {tuple(sorted(row["numbers"])) for row in task.rows(split)}
        for row in task.rows(split):
            target = int(re.search(r"Make (\d+) from", asked(row))[1])
            assert str(row["numbers"])[1:-1] in asked(row)
            assert 1 <= target <= 100
            assert target not in row["numbers"]
            assert eval(row["answer"]) == target
            assert Counter(map(int, re.findall(r"\d+", row["answer"]))) == Counter(row["numbers"])
            assert task.reward(row, reply(row["answer"])).total == 1
        for row in task.rows(split)[:12]:
            assert int(row["problem"][7:].split(",")[0]) in reachable(row["numbers"][:4])
    assert not kinds["train"] & kinds["eval"]
    assert {len(k) for k in kinds["train"]} == {3, 4}
    every = list(itertools.combinations_with_replacement(range(1, 26), 3))
    assert sum(map(countdown_held_out, every)) / len(every) == pytest.approx(1 / 8, abs=0.02)


@pytest.mark.parametrize(
    ("text", "solved", "formed"),
    [
        ("(2 * 3) * 4", 1, 1),
        ("2 * 3 * 4 = 24", 1, 1),
        ("<think>6 * 4</think><answer>4 * 6 / 1</answer>", 0, 0),
        ("<think>hm</think><answer>4 * 3 * 2</answer>", 1, 1),
        (r"\boxed{2 * 3 * 4}", 1, 1),
        ("2 * 3 * 4 = 25", 0, 0),
        ("", 0, 0),
        ("24", 0, 0),
        ("2 * 3 * 4 or 4 * 3 * 2", 0, 0),
        ("2 * 3 * 4, 2 + 3", 0, 0),
        ("2 * 2 * 3 * 2", 0, 0),
        ("4 ** 2 + 2 ** 3", 0, 0),
        ("__import__('os').getpid()", 0, 0),
        ("(" * 5000, 0, 0),
        ("2 * 3 * 4 #", 1, 1),
        ("Make 24 from the numbers 2, 3, 4", 0, 0),
    ],
)
def test_countdown_reward_checks_the_expression(text, solved, formed):
    task = Countdown(num_rows=1)
    row = task.row([2, 3, 4], 24, "2 * 3 * 4")
    done = task.reward(row, reply(text))
    assert done.parts == {"solved": solved, "expression": formed}
    assert done.total == pytest.approx(0.9 * solved + 0.1 * formed)
    assert done.success == bool(solved)
    assert not task.reward(row, reply(text, complete=False)).success
    assert task.reward(row, reply(asked(row))).total == 0


# MATH


@pytest.fixture(scope="module")
def problems(tmp_path_factory) -> MathProblems:
    """Return a task that asks math-verify, as env=math makes it of data with MATH's columns."""
    rows = [
        ("What is $2+3$?", r"Clearly $\boxed{5}$."),
        ("Simplify $\\sqrt{8}$.", r"It is \boxed{2\sqrt{2}}."),
        ("Expand $(x+1)^2$.", r"\boxed{x^2+2x+1}"),
        ("Which interval?", r"\boxed{[1,2)}"),
    ]
    path = tmp_path_factory.mktemp("math") / "math.jsonl"
    rows = [{"problem": q, "solution": a, "level": "Level 1"} for q, a in rows]
    path.write_text("\n".join(map(json.dumps, rows)))
    columns = {"messages": None, "question": "problem", "answer": "solution"}
    node = {"_target_": "envs.tasks.MathProblems", "symbolic": True, "timeout": 30.0}
    data = {"dataset": str(path), "eval_dataset": str(path), "columns": columns}
    return make_task({**data, "split": "train", "eval_split": None, "task": node})


@pytest.mark.parametrize(
    ("index", "text", "right"),
    [
        (0, r"\boxed{5}", True),
        (0, r"first \boxed{4}, no, \boxed{5}", True),
        (0, r"\boxed{\frac{10}{2}}", True),
        (0, r"<think>\boxed{5}</think>", False),
        (0, "", False),
        (0, "What is $2+3$?", False),
        (0, r"\boxed{2+3}", False),
        (0, r"\boxed{What is 2+3?}", False),
        (0, r"\boxed{4, 5}", False),
        (1, r"\boxed{\sqrt{2} \cdot 2}", True),
        (1, r"\boxed{2^{3/2}}", True),
        (1, r"\boxed{\sqrt{8}}", False),
        (2, r"\boxed{1 + 2x + x^2}", True),
        (2, r"\boxed{(x+1)^2}", False),
        (3, r"\boxed{[1,2)}", True),
        (3, r"\boxed{[1,2]}", False),
    ],
)
def test_math_reward_is_for_the_boxed_answer_in_any_form(problems, index, text, right):
    row = problems.rows("train")[index]
    done = problems.reward(row, reply(text))
    assert (done.total, done.success, done.errors) == (float(right), right, 0)
    assert done.parts["format"] == float("\\boxed" in text.split("</think>")[-1])


def test_a_comparison_that_takes_too_long_is_wrong_and_counted(problems):
    rows = problems.rows("train")
    problems.rewards(rows[2:3], [reply(r"\boxed{x}")])  # the worker is there
    kept, problems._workers.timeout = problems._workers.timeout, 4.0
    try:
        slow = reply(r"\boxed{9^{9^{9^{9^{9}}}}}")
        first, second = problems.rewards(rows[1:3], [slow, reply(r"\boxed{x^2+1+2x}")])
    finally:
        problems._workers.timeout = kept
    assert (first.total, first.errors, first.success) == (0, 1, False)
    assert (second.total, second.errors) == (1, 0)


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
    assert len(rows) == 400
    names = [row["task"] for row in rows]
    for end in range(1, 401):
        count = Counter(names[:end])
        for name, share in (("digits", 0.5), ("facts", 0.25), ("turns", 0.25)):
            assert abs(count[name] - share * end) <= 1, (name, end)
    digits = [row["digits"] for row in rows if row["task"] == "digits"]
    every = [row["digits"] for row in SortDigits(num_rows=60).rows("train")]
    assert Counter(digits[:60]) == Counter(digits[60:120]) == Counter(every), "each once a round"


def test_mixed_rows_are_a_function_of_seed_and_index():
    one, same, other = (mixed(seed=s).rows("train") for s in (1, 1, 2))
    assert list(one) == list(same)
    assert [r["task"] for r in one] == [r["task"] for r in other]
    assert list(one) != list(other)
    assert one[:3] == [one[0], one[1], one[2]]
    assert len(one) == max(60 / 0.5, len(Facts().rows("train")) / 0.25, 1 / 0.25)
    assert mixed(seed=1).rows("eval") == mixed(seed=2).rows("eval")


def test_eval_rows_are_all_of_all_tasks_and_begin_with_one_of_each():
    rows = mixed().rows("eval")
    assert [row["task"] for row in rows[:3]] == ["digits", "facts", "turns"]
    assert Counter(row["task"] for row in rows) == {
        "digits": len(SortDigits().rows("eval")), "facts": len(Facts().rows("eval")), "turns": 1,
    }  # fmt: skip


def test_each_reply_is_judged_by_its_own_task_and_other_parts_do_not_apply():
    task = mixed()
    rows = {row["task"]: row for row in task.rows("eval")[:3]}
    digits = rows["digits"]["answer"]
    order = [rows["turns"], rows["digits"], rows["facts"], rows["digits"]]
    got = task.rewards(order, [reply(t) for t in ("x", digits, "Nowhere.", "no")])
    assert [r.total for r in got] == [2, 1, 0, 0]
    assert [r.success for r in got] == [False, True, False, False]
    names = ["digits/exact", "digits/format", "facts/ended", "facts/named", "facts/single",
             "turns/said"]  # fmt: skip
    assert task.part_names() == sorted(got[0].parts) == names
    assert {n for n, v in got[1].parts.items() if not math.isnan(v)} == set(names[:2])
    assert task.respond(rows["turns"], Reply("a", True, [{"role": "assistant"}]))
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
    which = [row["task"] for row in rows for _ in range(2)]
    assert Counter(which) == {"digits": 4, "facts": 2, "turns": 2}
    own = [i for i, name in enumerate(which) if name == "facts"]
    alone = collect(td[[which[i * 2] == "facts" for i in range(4)]],
                    ChatEnv(Facts(), group_size=2, max_turns=2), policy)  # fmt: skip
    for part in ("ended", "single", "named"):
        assert torch.equal(batch["reward_part", f"facts/{part}"][own], alone["reward_part", part])
        mean = float(alone["reward_part", part].mean())
        assert got[f"reward_part/facts/{part}"] == pytest.approx(mean)
    assert got["reward_part/turns/said"] == 4.0, "two turns of 2"
    evaluate = Evaluate(task=task, generator=policy, runtime=one_process(), env=env, num_samples=1,
                        max_rows=9)  # fmt: skip
    scores, _ = evaluate(0)
    names = {f"eval/{kind}_accuracy{task}" for kind in ("sampled", "greedy")
             for task in ("", "/digits", "/facts", "/turns")}  # fmt: skip
    assert set(scores) == names | {"eval/reward"}
    counts = Counter(row["task"] for row in evaluate.rows)
    for kind in ("sampled", "greedy"):
        total = sum(scores[f"eval/{kind}_accuracy/{name}"] * n for name, n in counts.items())
        assert scores[f"eval/{kind}_accuracy"] == pytest.approx(total / 9)


def test_mixture_that_cannot_be_is_refused():
    tasks = {"a": SortDigits(), "b": Facts()}
    for weights, says in (({"a": 1}, "weight for each"), ({"a": 1, "b": 0}, "weights > 0")):
        with pytest.raises(ValueError, match=says):
            Mix(tasks, weights=weights)
    row = {**SortDigits().rows("train")[0], "task": "c"}
    with pytest.raises(ValueError, match="of a task among a, b, got 'c'; give"):
        Mix(tasks).reward(row, Reply("1", True, []))


def test_demonstrations_are_mixed_in_the_same_proportions():
    task = Mix({"digits": SortDigits(num_rows=9), "sums": Arithmetic(num_rows=9)})
    rows = task.demonstrations()
    assert Counter(row["task"] for row in rows) == {"digits": 9, "sums": 9}
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows)


@pytest.mark.parametrize("name", ["arithmetic", "countdown", "mix"])
def test_shipped_tasks_show_an_example_with_the_parts_they_name(name):
    from conf.compose import compose_checked

    task = make_task(compose_checked([f"env={name}"])["env"])
    example = task.make_example()
    assert example == task.rows("train")[0]
    assert task.part_names() == sorted(task.rewards([example], [reply("")])[0].parts)
    assert task.rewards([example], [reply("")])[0].total == 0
