"""Which part of a response is its answer, and when it is right: env=answers, gsm8k, math."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.build import make_task
from conf.compose import compose_checked
from envs.answers.comparison import same_answer, same_mathematics
from envs.answers.extraction import marked_answer, tagged
from envs.answers.numbers import last_number
from envs.tasks import Answers, MathProblems, MathWords, Response


def rows(path, *answers) -> str:
    """Write a question with each answer."""
    cells = [{"question": f"{i}?", "answer": answer} for i, answer in enumerate(answers)]
    path.write_text("\n".join(map(json.dumps, cells)))
    return str(path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<think>a</think> <answer>1</answer>", ("a", "1")),
        ("<think>so <answer>1</answer></think> hm", ("so <answer>1</answer>", "")),
        ("<think>so <answer>1</answer>", ("", "")),
        ("<answer>1</answer> <think>or <answer>2</answer>", ("", "1")),
        ("<answer>1<answer>2</answer> </answer>", ("", "2")),
    ],
)
def test_an_answer_stands_outside_of_thoughts(text, found):
    assert tagged(text) == found


@pytest.mark.parametrize("piece", ["<answer>", "<think>", "</think><think>", "<answer><", "9"])
def test_endless_responses_cost_little(piece, tmp_path):
    text, start = piece * 20_000, time.monotonic()
    tagged(text)
    marked_answer(text)
    assert not same_answer(text, "18")
    path = rows(tmp_path / "d.jsonl", "yes " * 50)
    for match in ("exact", "words", "normalised", "fuzzy"):
        task = Answers(path, eval_dataset=path, match=match)
        assert not task.reward(task.rows("train")[0], Response(text, True, [])).success
    assert time.monotonic() - start < 12, "38 s when every tag looked through the rest"


@given(st.fractions(max_denominator=10**6), st.sampled_from(["so {}.", "${}", "{} km", "1, {}"]))
def test_a_number_is_itself_in_every_spelling(number, form):
    assert last_number(form.format(number)) == number
    assert same_answer(form.format(number), str(number))
    assert not same_answer(form.format(number + 1), str(number))


@pytest.mark.parametrize(
    ("said", "right", "same"),
    [
        ("$1,234,567.50", "1234567.5", True),
        ("25%", "25", True),
        ("it is \u22123", "-3", True),
        ("-$5", "-5", True),
        ("1/0", "1", False),
        ("x + 1", "x+1", False),
        ("1e999999999", "1", False),
        ("", "", False),
    ],
)
def test_answers_are_compared_as_numbers(said, right, same):
    assert same_answer(said, right) is same


@pytest.mark.parametrize(
    ("said", "right", "good"),
    [
        (r"\frac{1}{2}", r"\boxed{\dfrac{1}{2}}", True),
        (r"\left( 1, 2 \right)", r"\boxed{(1,2)}", True),
        ("12 cm", r"first \boxed{11}, then \boxed{12}", False),
        ("1 1/2", r"\boxed{1\frac12}", False),
        (r"\frac{-3}{6}", r"\boxed{-0.5}", True),
        ("(1,234)", r"\boxed{(1234)}", False),
        ("25%", r"\boxed{25\%}", True),
    ],
)
def test_plain_mathematics_is_the_same_only_where_it_is_exactly(said, right, good):
    assert same_mathematics(said, right) is good


# right answer, what a response says, and by which matches it is right
CASES = [
    ("yes", " **Yes** ", "words normalised fuzzy"),
    ("yes", "yesterday", ""),
    ("yes", "<think>yes</think> no", ""),
    ("yes", "It may be no. #### yes", "exact words normalised fuzzy"),
    ("New York", "It is New York City", "words"),
    ("Mississippi", "Missisippi", "fuzzy"),
    ("1,000", "1000.0", "normalised fuzzy words"),
]


@pytest.mark.parametrize("match", ["exact", "words", "normalised", "fuzzy"])
def test_what_is_right_by_each_match(tmp_path, match):
    path = rows(tmp_path / "d.jsonl", *[right for right, _, _ in CASES])
    words = ["env=answers", f"env.dataset={path}", f"env.eval_dataset={path}", f"env.match={match}"]
    task = make_task(compose_checked(words)["env"])
    for row, (_, said, matches) in zip(task.rows("train"), CASES, strict=True):
        reward = task.reward(row, Response(said, True, []))
        assert reward.success is (match in matches.split()), (row["finals"], said)
        assert reward.total == reward.parts["correct"] == float(reward.success)


@pytest.mark.parametrize(
    ("text", "complete", "parts"),
    [
        ("42", True, (1, 0)),
        ("#### 42\nNot 8", True, (1, 1)),
        ("#### 8, not 42", True, (1, 1)),  # the mark's line, its last number
        ("#### 8 <answer>42</answer>", True, (1, 1)),
        (r"<answer>8</answer> \boxed{42}", True, (1, 1)),
        ("<think>#### 42</think> #### 8", True, (0, 1)),
        ("<think>#### 8</think> 42", True, (1, 0)),
    ],
)
def test_gsm8k_rewards_the_marked_number_before_the_last_one(tmp_path, text, complete, parts):
    path = rows(tmp_path / "d.jsonl", "six sevens #### 42")
    task = MathWords(path, eval_dataset=path)
    reward = task.reward(task.rows("train")[0], Response(text, complete, []))
    assert (reward.parts["correct"], reward.parts["format"]) == parts
    assert (reward.total, reward.success) == (parts[0], parts[0] == 1)


def test_right_answers_without_a_number_are_refused_from_half_of_the_rows_on(tmp_path):
    path = tmp_path / "a.jsonl"
    for answers in (["cold", "dry", "low"], ["4", "5 km", "dry", "x"]):
        with pytest.raises(ValueError, match="env=answers"):
            MathWords(rows(path, *answers))
        MathProblems(rows(path, *answers), symbolic=False)
    with pytest.warns(UserWarning, match="1 of 3 .*'dry'"):
        MathWords(rows(path, "4", "dry", "6"))
    MathWords(rows(path, "It is #### dry", "<answer>cold</answer>", "6 apples"))
