"""Which number of a reply counts as its answer, and when it is the right one."""

from fractions import Fraction

import pytest

from envs.tasks import MathWords, Reply
from envs.tasks.math_words import last_number, marked_answer, same_answer
from tests.checkpoints import write_easy_jsonl, write_gsm8k_jsonl


def reply(text: str, *, complete: bool = True) -> Reply:
    return Reply(text=text, complete=complete, messages=[])


@pytest.mark.parametrize(
    ("said", "right", "same"),
    [
        ("The answer is 18.", "18", True),
        ("$1,234", "1234", True),
        ("25%", "25", True),
        ("7 - 3 = 4", "4", True),
        ("7-3", "-3", False),
        ("it is -3", "-3", True),
        ("it is \u22123", "-3", True),
        ("-$5", "-5", True),
        ("0.5", "1/2", True),
        ("1/0", "1", False),
        ("first 18, then 19", "18", False),
        ("", "18", False),
        ("9" * 5000, "18", False),
        ("3 apples", "3 apples", True),
        ("Paris", "paris", True),
        ("London", "Paris", False),
        ("x + 1", "x+1", False),
        ("2", "x^2", False),
        ("1e5", "100,000", True),
        ("1e400", "1", False),
        ("1e999999999", "1", False),
        ("", "", False),
    ],
)
def test_answers_are_compared_as_numbers(said, right, same):
    assert same_answer(said, right) is same


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,234,567.5", Fraction(2469135, 2)),
        ("12,34", Fraction(34)),
        ("the 3rd of 4", Fraction(4)),
        ("5.", Fraction(5)),
        ("v2 model", None),
        ("100/4", Fraction(25)),
    ],
)
def test_last_number_of_a_text(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("so\n#### 42\nbye 7", "42"),
        ("<answer> 42 </answer> and 7", " 42 "),
        ("\\boxed{\\frac{1}{2}} and 7", "\\frac{1}{2}"),
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\boxed{1} then #### 3", "3"),
        ("\\boxed{4", "4"),
        ("####", ""),
        ("42", None),
    ],
)
def test_marked_answer_is_the_last_mark(text, marked):
    assert marked_answer(text) == marked


def test_math_rewards_the_marked_number_before_the_last_one(tmp_path):
    task = MathWords(str(write_easy_jsonl(tmp_path / "e.jsonl", 20)))
    row = next(r for r in task.rows("train") if r["final"] == "7")
    right = task.reward(row, reply("7"))
    assert (right.total, right.success, right.parts["format"]) == (1, True, 0)
    assert task.reward(row, reply("#### 7\nNot 8")).parts == {"correct": 1, "format": 1}
    assert task.reward(row, reply("#### 7", complete=False)).parts["format"] == 0
    assert task.reward(row, reply("#### 8, not 7")).total == 1  # the mark's line, its last number
    assert task.reward(row, reply("#### 8")).total == 0
    assert task.reward(row, reply("<think>#### 7</think> #### 8")).total == 0
    assert task.reward(row, reply("<think>#### 7")).parts == {"correct": 0, "format": 0}
    assert task.reward(row, reply("<think>#### 8</think> 7")).total == 1


def test_gsm8k_solutions_earn_their_own_reward(tmp_path):
    task = MathWords(str(write_gsm8k_jsonl(tmp_path / "g.jsonl", 50)))
    assert len(task.rows("eval")) == 5
    for row in [*task.rows("train"), *task.rows("eval")]:
        assert task.reward(row, reply(row["answer"])).success
        assert Fraction(row["final"].replace(",", "")) == last_number(row["answer"])
    first = task.demonstrations()[0]
    assert [m["role"] for m in first["messages"]] == ["user", "assistant"]
    assert first["messages"][1]["content"] == first["answer"]


def test_empty_final_answer_names_its_row(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "a", "answer": "#### 1"}\n{"question": "b", "answer": "x ####"}')
    with pytest.raises(ValueError, match="row 1, answer: expected a final answer"):
        MathWords(str(path))
