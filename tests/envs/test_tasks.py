"""Rewards, splits and demonstrations of the built-in tasks, of MATH and of mixtures."""

import json
import math
from collections import Counter

import pytest
from support.chats import data
from support.policies import make_policy, one_process
from support.tasks import Words
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from envs.chat_env import ChatEnv
from envs.tasks import (
    Calculator,
    Facts,
    MathProblems,
    Mix,
    Response,
    Reviews,
    Reward,
    SortDigits,
)
from envs.tasks.facts import plain_text
from trainer.collect import collect
from trainer.evaluation import Evaluate
from trainer.metrics import summarize


def response(text: str, *, complete: bool = True) -> Response:
    return Response(text=text, complete=complete, messages=[])


CAPITALS = {
    "France": ["Paris"],
    "Germany": ["Berlin"],
    "Italy": ["Rome"],
    "Colombia": ["Bogota"],
    "the Bronx": ["New York"],
    "the Minster": ["York"],
}


def test_facts_hold_out_facts_in_both_directions_and_demonstrate_right_ones():
    task = Facts()
    train, held_out = (task.rows(split) for split in ("train", "eval"))
    assert len(train) >= 120
    assert len(held_out) >= 80

    def facts(rows):  # "the capital of France" and "the country of Paris" are one fact
        return {frozenset((row["subject"], answer)) for row in rows for answer in row["answers"]}

    assert not facts(train) & facts(held_out)
    for row in [*train, *held_out]:
        question = f" {plain_text(row['messages'][-1]['content'])} "
        assert not any(f" {plain_text(answer)} " in question for answer in row["answers"])
    for row in task.demonstrations():
        said = row["messages"][-1]["content"]
        assert task.reward(row | {"messages": row["messages"][:-1]}, response(said)).total == 1


@pytest.mark.parametrize(
    "kinds", [[], {"place": []}, {"place": {"question": "Where?", "train": {}}}]
)
def test_another_file_than_one_of_facts_is_named(tmp_path, kinds):
    (tmp_path / "mine.json").write_text(json.dumps(kinds))
    with pytest.raises(ValueError, match=r"mine\.json"):
        Facts(dataset=str(tmp_path / "mine.json"))


@pytest.mark.parametrize(
    ("subject", "text", "parts"),
    [
        ("France", "Parisian", (0, 1, 1)),
        ("France", "Paris, Berlin or Rome?", (1, 1, 0)),
        ("Colombia", "Bogota\u0301", (1, 1, 1)),
        ("the Minster", "In New York.", (0, 1, 0)),
    ],
)
def test_facts_reward_needs_the_answer_alone_and_an_end(tmp_path, subject, text, parts):
    data = {
        "question": "Where is {subject}?",
        "response": "{answer}",
        "train": CAPITALS,
        "eval": {},
    }
    (tmp_path / "f.json").write_text(json.dumps({"place": data}))
    task = Facts(dataset=str(tmp_path / "f.json"))
    row = next(row for row in task.rows("train") if row["subject"] == subject)
    named, ended, single = parts
    done = task.reward(row, response(text))
    assert done.parts == {"named": named, "ended": ended, "single": single}
    assert (done.total, done.success) == (float(named and single), bool(named and single))
    cut = task.reward(row, response(text, complete=False))
    assert (cut.total, cut.parts["ended"], cut.success) == (0, 0, False)


@pytest.mark.parametrize(("kind", "apart"), [(SortDigits, "answer"), (Calculator, "factors")])
def test_rows_follow_the_seed_and_eval_rows_are_fixed_and_kept_apart(kind, apart):
    one, same, other = (kind(seed=seed, num_rows=999) for seed in (1, 1, 2))
    assert one.rows("train") == same.rows("train") != other.rows("train")
    assert one.demonstrations() == same.demonstrations()
    assert one.rows("eval") == other.rows("eval")
    assert [len(one.rows(split)) for split in ("train", "eval")] == [999, 200]
    train, held_out = ([sorted(row[apart]) for row in one.rows(s)] for s in ("train", "eval"))
    assert not any(row in held_out for row in train)


@pytest.mark.parametrize(
    ("text", "complete", "total", "success"),
    [
        ("24478", True, 1.0, True),
        ("24478", False, 0.9, False),
        ("87442", True, 0.1, False),
        ("\u0662\u0664\u0664\u0667\u0668", True, 0.0, False),
    ],
)
def test_sort_reward_is_nine_tenths_exact_one_tenth_form(text, complete, total, success):
    task = SortDigits(num_rows=1)
    done = task.reward(task.row("44287"), response(text, complete=complete))
    assert (done.total, done.success) == (total, success)
    assert done.total == pytest.approx(0.9 * done.parts["exact"] + 0.1 * done.parts["format"])


def test_half_of_the_demonstrations_call_and_a_third_of_the_calls_have_a_typo():
    calls = typos = 0
    for row in Calculator(num_rows=1000).demonstrations():
        _, *said = row["messages"]
        if len(said) == 3:
            called = said[0]["tool_calls"][0]["function"]["arguments"]
            calls += 1
            typos += [called["a"], called["b"]] != row["factors"]
            assert said[1]["content"] == said[2]["content"] == str(called["a"] * called["b"])
    assert 450 < calls < 550
    assert 0.25 < typos / calls < 0.35


@pytest.mark.parametrize(("text", "cut"), [("It was wonderful.", 0.5), ("It was terrible.", 1)])
def test_a_review_earns_its_sentiment_and_half_of_praise_that_is_cut_off(text, cut):
    score = SentimentIntensityAnalyzer().polarity_scores(text)["compound"]
    for complete, share in ((True, 1), (False, cut)):
        done = Reviews().reward({}, response(text, complete=complete))
        assert done.parts == {"sentiment": score, "ended": complete}
        assert done.total == pytest.approx(share * score)
        assert done.success is (complete and score > 0.5)


@pytest.fixture(scope="module")
def problems(tmp_path_factory) -> MathProblems:
    """Return a task that asks math-verify."""
    rows = [
        ("What is $2+3$?", r"Clearly $\boxed{5}$."),
        ("Simplify $\\sqrt{8}$.", r"It is \boxed{2\sqrt{2}}."),
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
    ],
)
def test_math_reward_is_for_the_boxed_answer_in_any_form(problems, index, text, right):
    """But not for a piece of the question."""
    done = problems.reward(problems.rows("train")[index], response(text))
    assert (done.total, done.success, done.errors) == (float(right), right, 0)
    assert done.parts["format"] == float("think" not in text)


def test_a_comparison_that_takes_too_long_is_wrong_and_counted(problems, monkeypatch):
    rows = problems.rows("train")
    problems.rewards(rows[1:2], [response(r"\boxed{x}")])  # the worker is there
    monkeypatch.setattr(problems._workers, "timeout", 1.0)
    (slow,) = problems.rewards(rows[1:2], [response(r"\boxed{9^{9^{9^{9^{9}}}}}")])
    assert (slow.total, slow.errors, slow.success) == (0, 1, False)


class Turns(Words):
    """A task of one row a split, with a second turn."""

    def __init__(self):
        super().__init__(turns=2)

    def rows(self, split):
        return super().rows(split)[:1]

    def reward(self, row, response):
        return Reward(2.0, {"said": 2.0}, success=False)


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


def test_each_response_is_judged_by_its_own_task_and_other_parts_do_not_apply():
    task = mixed()
    rows = {row["task"]: row for row in task.rows("eval")[:3]}
    digits = rows["digits"]["answer"]
    order = [rows["turns"], rows["digits"], rows["facts"], rows["digits"]]
    got = task.rewards(order, [response(t) for t in ("x", digits, "Nowhere.", "no")])
    assert [(r.total, r.success) for r in got] == [(2, False), (1, True), (0, False), (0, False)]
    names = ["digits/exact", "digits/format", "facts/ended", "facts/named", "facts/single"]
    assert task.part_names() == sorted(got[0].parts) == [*names, "turns/said"]
    assert {n for n, v in got[1].parts.items() if not math.isnan(v)} == set(names[:2])
    assert task.respond(rows["digits"], response("a")) == []


def test_mixed_batches_keep_the_tasks_parts_and_accuracies_apart():
    task, policy = mixed(), make_policy()
    rows = task.rows("train")[:4]  # digits, facts, turns, digits
    env = ChatEnv(task, group_size=2, max_turns=2)
    batch = collect(data(*rows), env, policy)
    batch["reward"] = batch["reward_raw"]
    got = summarize(batch, one_process())
    values = batch["reward_part", "facts/ended"]
    assert values.isnan().tolist() == [rows[i // 2]["task"] != "facts" for i in range(8)]
    assert got["reward_part/facts/ended"] == pytest.approx(float(values.nanmean()))
    assert got["reward_part/turns/said"] == 4.0, "two turns of 2"
    evaluate = Evaluate(task=task, num_samples=1, generator=policy, runtime=one_process(), env=env)
    evaluate.set_rows(task.rows("eval")[:9])  # three of each task
    scores, _ = evaluate(0)
    counts = Counter(row["task"] for row in evaluate.rows)
    for kind in ("sampled", "greedy"):
        total = sum(scores[f"eval/{kind}_accuracy/{name}"] * n for name, n in counts.items())
        assert scores[f"eval/{kind}_accuracy"] == pytest.approx(total / 9)
