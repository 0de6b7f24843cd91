"""reasoning-gym as tasks: names, settings, curricula, splits that are apart, scores."""

import pytest

from conf.build import make_task
from conf.compose import compose_checked
from envs.tasks import ReasoningGym, Reply
from envs.tasks.reasoning_gym import make_scorer

SOME = ["chain_sum", "leg_counting", "propositional_logic"]


class Judges:
    """Score in this process, or fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.score, self.error = make_scorer(), error

    def map(self, calls):
        return [self.error or self.score(*call) for call in calls]


def said(text: str, *, complete: bool = True) -> Reply:
    return Reply(f"<think>so</think><answer>{text}</answer>", complete, [])


@pytest.mark.parametrize("name", SOME)
def test_the_librarys_answer_earns_all_and_no_answer_or_the_question_nothing(name):
    task = make_task(compose_checked(["env=reasoning_gym", f"env.task.name={name}"])["env"])
    rows = [row for row in task.rows("train")[:8] if row["answer"] is not None][:4]
    entries = [row["entry"] for row in rows]
    task._judges = Judges()
    for texts, total in (
        ([said(row["answer"]) for row in rows], 1),
        ([said("") for _ in rows], 0),
        ([Reply("", True, []) for _ in rows], 0),
        ([Reply(entry["question"], True, []) for entry in entries], 0),
        ([said(f"{entry['question']} {entry['answer']}") for entry in entries], 0),
    ):
        got = task.rewards(rows, texts)
        assert [(r.total, r.success, r.errors) for r in got] == [(total, total == 1, 0)] * len(rows)
    assert task.part_names() == ["format", "score"]
    assert "<answer>" in task.make_example()["messages"][-1]["content"]


def test_a_reply_without_tags_is_taken_whole_and_a_cut_one_has_no_form():
    task = ReasoningGym("chain_sum", eval_rows=3)
    row = task.rows("eval")[0]
    right = row["answer"]
    texts = [Reply(right, True, []), said(right), said(right, complete=False), said(f"{right}1")]
    got = task.rewards([row] * 4, texts)
    assert [r.total for r in got[:3]] == [1, 1, 1]
    assert 0 < got[3].total < 1, "the library's share for an answer that holds the right one"
    assert [r.success for r in got] == [True, True, True, False]
    assert [r.parts["format"] for r in got] == [0, 1, 0, 1]


def test_no_train_row_asks_what_is_held_out():
    options = {"config": {"min_terms": 2, "max_terms": 2, "max_digits": 1}, "eval_rows": 40}
    task = ReasoningGym("chain_sum", num_rows=300, **options)
    train, held_out = ({r["entry"]["question"] for r in task.rows(s)} for s in ("train", "eval"))
    assert not train & held_out
    assert len(train) > 80
    assert len(held_out) == len(task.rows("eval")) > 30
    again = ReasoningGym("chain_sum", num_rows=300, seed=1, **options)
    assert again.rows("eval") == task.rows("eval")
    assert again.rows("train")[5] != task.rows("train")[5]
    options["config"] = {"min_terms": 1, "max_terms": 1, "max_digits": 1}
    with pytest.raises(ValueError, match=r"env\.task\.eval_rows below 10"):
        list(ReasoningGym("chain_sum", **options).rows("train"))


def test_settings_and_levels_reach_the_dataset():
    def most(**options) -> tuple[int, int]:
        rows = ReasoningGym("chain_sum", **options).rows("train")[:60]
        found = [row["entry"]["metadata"] for row in rows]
        return max(f["num_terms"] for f in found), max(f["num_digits"] for f in found)

    # level k of the library's curriculum: 2 to 2 + k terms, 1 to 1 + k digits
    assert most(level=0) == (2, 1)
    assert most(level=4) == (6, 5)
    assert most(level={"num_digits": 4}) == (2, 5)
    assert most(level=4, config={"max_digits": 2, "min_digits": 2}) == (6, 2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "chain_sun"}, r"env\.task\.name"),
        ({"name": "chain_sum", "config": {"min_term": 1}}, "'min_term'"),
        ({"name": "chain_sum", "level": {"digits": 1}}, "digits"),
    ],
)
def test_names_and_settings_that_are_not_there_are_named(options, says):
    with pytest.raises(ValueError, match=says):
        ReasoningGym(**options)


def test_a_reply_that_the_judge_fails_on_is_wrong_and_counted():
    task = ReasoningGym("chain_sum", num_rows=9)
    task._judges = Judges(TimeoutError("late"))
    got = task.reward(task.rows("eval")[0], said("1"))
    assert (got.total, got.success, got.errors) == (0, False, 1)
