"""Multiple choice and several right answers: which responses earn, by every task that judges."""

import contextlib
import json
import time

import pytest

from envs.tasks import Answers, Chats, MathProblems, MathWords, Response

OPTIONS = ["Lima", "a city by the sea", "Oslo", "5", "Rome", "Bonn", "Kyiv", "Bern", "I am"]
RIGHT_FORMS = [
    "{k}", "({k})", "{k}.", "{k})", "**{k}**", "The answer is {k}", "The answer is ({k}).",
    "Answer: {k}", "{k}. {v}", "{k}) {v}", "**{k}. {v}**", "{v}", "{v}.", "The answer is {v}.",
    r"\boxed{{{k}}}", r"so \boxed{{\text{{({k})}}}}", "<answer>{k}</answer>", "#### {k}",
    "<think>B. C. Oslo</think>{k}", "It must be option {k}.", "{k} is correct.",
    "The answer is {k} because I know it.", "C is wrong, so the answer is {k}.",
    "Therefore, {k}.", "So it must be ({k})", "{k} - {v}",
]  # fmt: skip
EARN_NOTHING = [
    "", "A city lies by the sea.", "It is a city.", "I think so.", "I am sure.", "I'm not sure",
    "Is it a boat?", "A. B. C.", "A, B or I", "A or I", "The answer is not I.", "A. Oslo",
    "I. Oslo", "A. Lima\nB. a city by the sea\nC. Oslo", "<think>A</think>", "As I said",
    "The answer is a boat", "A is wrong", "A is wrong, I is not sure", "A\nB\nC", "A, or B", "A:B",
    "A.B", "Answer: A\nB", "It is not A.", "It isn't I.",
]  # fmt: skip


def task_of(path, task, answer, **options):
    row = {"question": "Which?", "answer": answer} | options
    path.write_text(json.dumps(row))
    return task(str(path), eval_dataset=str(path))


def earned(task, text):
    return task.reward(task.rows("train")[0], Response(text, True, [])).total


@pytest.mark.parametrize("task", [Answers, Chats])
@pytest.mark.parametrize("right", ["A", "I"])
def test_a_choice_earns_by_its_letter_or_text_and_words_do_not(tmp_path, task, right):
    made = task_of(tmp_path / "d.jsonl", task, right, options=OPTIONS)
    text = OPTIONS[ord(right) - ord("A")]
    for form in RIGHT_FORMS:
        assert earned(made, form.format(k=right, v=text)) == 1, form
        assert earned(made, form.format(k="C", v="Oslo")) == 0, form
    for said in EARN_NOTHING:
        if said.strip(".") != text:
            assert earned(made, said) == 0, said


def test_an_answer_is_an_option_or_the_run_ends(tmp_path):
    for answer, letter in (("1.0", "B"), (1, "B"), ("B) Oslo", "B"), ("oslo.", None), ("AB", None)):
        ends = pytest.raises(ValueError, match=r"row 0, answer.*env\.columns\.options=null")
        with contextlib.nullcontext() if letter else ends:
            made = task_of(tmp_path / "d.jsonl", Answers, answer, options=["Lima", "Oslo"])
            assert made.rows("train")[0]["answer"] == letter


@pytest.mark.parametrize("task", [Answers, MathWords, MathProblems])
def test_each_of_several_right_answers_earns(tmp_path, task):
    made = task_of(tmp_path / "d.jsonl", task, ["<think>13</think>7", "12", None])
    said = r"\boxed{{{}}}" if task is MathProblems else "{}"
    assert [earned(made, said.format(n)) for n in (7, 12, 13)] == [1, 1, 0]


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("So 30 + 4.\n\nAnswer: 34", 1),
        ("**Answer:** 34", 1),
        ("Answer: 34\nor 35", 0),
        ("34 or 35", 0),
    ],
)
def test_the_last_line_states_an_answer(tmp_path, said, right):
    assert earned(task_of(tmp_path / "d.jsonl", Answers, "34"), said) == right


@pytest.mark.parametrize(
    "answer", ['{"inputs": ["1"], "outputs": ["2"]}', [{"role": "assistant", "tool_calls": []}]]
)
def test_what_no_text_equals_is_refused_by_tasks_that_compare_texts(tmp_path, answer):
    if isinstance(answer, list):
        call = {"function": {"name": "w", "arguments": {}}}
        answer[0]["tool_calls"].append(call)
    for task in (Answers, MathWords):
        with pytest.raises(ValueError, match="row 0, answer"):
            task_of(tmp_path / "d.jsonl", task, answer)


@pytest.mark.parametrize(
    "piece", ["B. A. ", "is A ", " (A", "*", "answer is ", "Answer:\n", "it's "]
)
def test_endless_choices_cost_little(tmp_path, piece):
    task, start = task_of(tmp_path / "d.jsonl", Answers, "A", options=OPTIONS), time.process_time()
    assert earned(task, piece * 10_000 + "x") == 0
    assert time.process_time() - start < 3
