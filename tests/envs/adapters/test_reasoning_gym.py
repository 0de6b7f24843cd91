"""reasoning-gym as tasks: names, settings, curricula, splits that are apart, scores."""

import pytest

from conf.build import make_task
from conf.compose import compose_checked
from envs.tasks import ReasoningGym, Response


def tagged(text: str, *, complete: bool = True) -> Response:
    return Response(f"<think>so</think><answer>{text}</answer>", complete, [])


@pytest.mark.parametrize("name", ["chain_sum", "leg_counting"])
def test_the_librarys_answer_earns_all_and_no_answer_or_the_question_nothing(name):
    task = make_task(compose_checked(["env=reasoning_gym", f"env.task.name={name}"])["env"])
    rows = list(task.rows("train")[:4])
    entries = [row["entry"] for row in rows]
    for responses, total in (
        ([tagged(row["answer"]) for row in rows], 1),
        ([tagged("") for _ in rows], 0),
        ([Response(entry["question"], True, []) for entry in entries], 0),
        ([tagged(f"{entry['question']} {entry['answer']}") for entry in entries], 0),
    ):
        got = task.rewards(rows, responses)
        assert [(r.total, r.success, r.errors) for r in got] == [(total, total == 1, 0)] * len(rows)


def test_a_response_without_tags_is_taken_whole_and_a_cut_one_has_no_form():
    task = ReasoningGym("chain_sum", eval_rows=3)
    row = task.rows("eval")[0]
    right = row["answer"]
    responses = [Response(right, True, []), tagged(right), tagged(right, complete=False)]
    got = task.rewards([row] * 4, [*responses, tagged(f"{right}1")])
    assert [r.success for r in got] == [True, True, True, False]
    assert 0 < got[3].total < 1, "the library's share for an answer that holds the right one"
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


@pytest.mark.parametrize(
    ("options", "says"),
    [({"name": "chain_sun"}, r"env\.task\.name"), ({"config": {"min_term": 1}}, "'min_term'")],
)
def test_names_and_settings_that_are_not_there_are_named(options, says):
    with pytest.raises(ValueError, match=says):
        ReasoningGym(**{"name": "chain_sum", **options})
