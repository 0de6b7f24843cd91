"""Rewards, splits and demonstrations of the built-in tasks."""

import json
import math
import sys
from collections import Counter

import pytest

from conf import check
from conf.compose import compose_checked
from envs.tasks import Calculator, Chats, Facts, Reply, Reviews, SortDigits, Task


def reply(text: str, *, complete: bool = True) -> Reply:
    return Reply(text=text, complete=complete, messages=[])


# Facts


CAPITALS = {
    "France": ["Paris"],
    "Germany": ["Berlin"],
    "Italy": ["Rome"],
    "Colombia": ["Bogota"],
    "India": ["New Delhi"],
    "the Bronx": ["New York"],
    "the Minster": ["York"],
    "Rome": ["Italy"],
}


def test_facts_hold_out_whole_subjects_and_answers_and_demonstrate_right_ones():
    task = Facts()
    train, held_out = (task.rows(split) for split in ("train", "eval"))
    assert len(train) >= 30
    assert len(held_out) >= 40
    for key in (lambda r: {r["subject"]}, lambda r: {*r["answers"]}):
        assert not set().union(*map(key, train)) & set().union(*map(key, held_out))
    for row in [*train, *held_out]:
        question = row["messages"][-1]["content"].lower().split()
        assert not any(word in question for a in row["answers"] for word in a.lower().split())
    for row in task.demonstrations():
        said = row["messages"][-1]["content"]
        assert task.reward(row | {"messages": row["messages"][:-1]}, reply(said)).total == 1


@pytest.mark.parametrize(
    ("subject", "text", "parts"),
    [
        ("France", "Paris", (1, 1, 1)),
        ("France", "Parisian", (0, 1, 1)),
        ("France", "Paris, Berlin or Rome?", (1, 1, 0)),
        ("Colombia", "Bogota\u0301", (1, 1, 1)),
        ("India", "It is NEW  DELHI.", (1, 1, 1)),
        ("the Minster", "In New York.", (0, 1, 0)),
        ("the Bronx", "York, New York", (1, 1, 0)),
        ("Rome", "Rome is in Italy.", (1, 1, 1)),
    ],
)
def test_facts_reward_needs_the_answer_alone_and_an_end(tmp_path, subject, text, parts):
    data = {"question": "Where is {subject}?", "reply": "{answer}", "train": CAPITALS, "eval": {}}
    (tmp_path / "f.json").write_text(json.dumps({"place": data}))
    task = Facts(dataset=str(tmp_path / "f.json"))
    row = next(row for row in task.rows("train") if row["subject"] == subject)
    named, ended, single = parts
    done = task.reward(row, reply(text))
    assert done.parts == {"named": named, "ended": ended, "single": single}
    assert (done.total, done.success) == (float(named and single), bool(named and single))
    cut = task.reward(row, reply(text, complete=False))
    assert (cut.total, cut.parts["ended"], cut.success) == (0, 0, False)


# Sorting digits, and the calculator


@pytest.mark.parametrize(("kind", "apart"), [(SortDigits, "answer"), (Calculator, "factors")])
def test_rows_follow_the_seed_and_eval_rows_are_fixed_and_kept_apart(kind, apart):
    one, same, other = (kind(seed=seed, num_rows=999) for seed in (1, 1, 2))
    assert one.rows("train") == same.rows("train") != other.rows("train")
    assert one.demonstrations() == same.demonstrations()
    assert one.rows("eval") == other.rows("eval")
    assert [len(one.rows(split)) for split in ("train", "eval")] == [999, 200]
    train, held_out = ([sorted(row[apart]) for row in one.rows(s)] for s in ("train", "eval"))
    assert not any(row in held_out for row in train)


def test_the_answer_is_that_of_the_question():
    for row in SortDigits(num_rows=99).rows("train"):
        digits = row["messages"][0]["content"].removeprefix("Sort the digits in ascending order: ")
        assert row["answer"] == "".join(d * digits.count(d) for d in "0123456789")
    for row in Calculator(num_rows=99).rows("train"):
        a, b = row["factors"]
        assert row["messages"] == [{"role": "user", "content": f"What is {a} * {b}?"}]
        assert row["answer"] == str(sum([a] * b))


@pytest.mark.parametrize(
    ("text", "complete", "total", "success"),
    [
        ("24478", True, 1.0, True),
        ("24478", False, 0.9, False),
        ("87442", True, 0.1, False),
        ("2 4 4 7 8", True, 0.0, False),
        ("\u0662\u0664\u0664\u0667\u0668", True, 0.0, False),
    ],
)
def test_sort_reward_is_nine_tenths_exact_one_tenth_form(text, complete, total, success):
    task = SortDigits(num_rows=1)
    done = task.reward(task.row("44287"), reply(text, complete=complete))
    assert (done.total, done.success) == (total, success)
    assert done.total == pytest.approx(0.9 * done.parts["exact"] + 0.1 * done.parts["format"])


@pytest.mark.parametrize(
    ("text", "complete", "result", "total"),
    [
        ("calc: 57*83", True, "4731", 0.0),
        ("calc: 57*83", False, None, 0.0),
        ("calc: \u0665*2", True, None, 0.0),
        ("4731", True, None, 1.0),
        ("It is 4731", True, None, 0.0),
    ],
)
def test_a_call_is_answered_and_anything_else_is_the_answer(text, complete, result, total):
    task, said = Calculator(num_rows=1), reply(text, complete=complete)
    row = task.row(57, 83)
    assert task.respond(row, said) == ([{"role": "tool", "content": result}] if result else [])
    done = task.reward(row, said)
    assert (done.total, done.success) == (total, total == 1)
    assert done.parts == {"exact": total, "called": float(result is not None)}


def test_demonstrations_are_wrong_in_the_stated_shares():
    kinds = Counter()
    for row in SortDigits(num_rows=9999).demonstrations():
        said, digits, answer = row["messages"][-1]["content"], row["digits"], row["answer"]
        if len({digits, answer, answer[::-1]}) == 3:  # else two kinds look the same
            kinds[{digits: "unchanged", answer: "right", answer[::-1]: "descending"}[said]] += 1
    want = {"right": 0.25, "descending": 0.45, "unchanged": 0.30}
    shares = {kind: n / kinds.total() for kind, n in kinds.items()}
    assert shares == pytest.approx(want, abs=0.02)
    calls = Counter()
    for row in Calculator(num_rows=9999).demonstrations():
        call, *rest = (message["content"] for message in row["messages"][1:])
        if rest:
            a, b = map(int, call.removeprefix("calc: ").split("*"))
            assert rest == [str(a * b)] * 2, "the result is copied"
        calls["outright" if not rest else "right" if [a, b] == row["factors"] else "typo"] += 1
    want = {"outright": 0.75, "right": 0.25 * 0.7, "typo": 0.25 * 0.3}
    assert {kind: n / 9999 for kind, n in calls.items()} == pytest.approx(want, abs=0.02)


# Reviews: valences in vaderSentiment's list


WONDERFUL, GOOD, TERRIBLE = 2.7, 1.9, -2.1


@pytest.mark.parametrize(
    ("text", "valences", "cut"),
    [
        ("It was good and wonderful.", [GOOD, WONDERFUL], 0.5),
        ("It was terrible.", [TERRIBLE], 1),  # being cut off excuses nothing
        ("It was a room.", [0.0], 1),
    ],
)
def test_reward_of_a_review_is_the_compound_score_and_half_of_praise_cut_off(text, valences, cut):
    score = sum(valences) / math.sqrt(sum(valences) ** 2 + 15)  # without rules between words
    done = Reviews().reward({}, reply(text))
    assert done.parts == {"sentiment": pytest.approx(score, abs=1e-4), "ended": 1.0}
    assert (done.total, done.success) == (done.parts["sentiment"], score > 0.5)
    short = Reviews().reward({}, reply(text, complete=False))
    assert short.total == pytest.approx(cut * score, abs=1e-4)
    assert short.parts["ended"] == 0


def test_a_missing_scorer_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    check.try_task.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"\.\[sentiment\]"):
            compose_checked(["experiment=ppo_sentiment_smollm"])
    finally:
        check.try_task.cache_clear()  # what was found wrong here is right elsewhere


# Chats, prompts and the base


def test_chats_train_on_whole_conversations(tmp_path):
    roles = ("system", "user", "assistant", "user", "assistant")
    turns = [{"role": role, "content": f"{role} says"} for role in roles]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": turns}))
    task = Chats(str(path), eval_dataset=str(path))
    assert task.demonstrations()[0]["messages"] == turns
    row = task.rows("eval")[0]
    assert row["messages"] == turns[:-1]
    assert task.reward(row, reply("assistant  says")).success
    assert not task.reward(row, reply("assistant says!")).success


def test_base_task_says_what_to_override():
    with pytest.raises(NotImplementedError, match=r"rows\(split\)"):
        Task().rows("train")
    with pytest.raises(NotImplementedError, match=r"reward\(row, reply\)"):
        Task().reward({}, reply(""))
