"""trainer.train(model, reward, rows) runs, and refuses what are no rows in one line."""

import pytest

import trainer


def short(row, reply):
    return float(len(reply.text) < 12)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (5, "expected rows as a list, got int"),
        ("abc", "expected rows as a list, got str"),
        ([], "expected rows, got none"),
        (["a", None], "dataset, row 1: expected a text or a dict, got None"),
        ([{"prompt": "a", "x": {1}}], r"row 0: expected what JSON can hold, got .*'x': \{1\}"),
        ([{("a",): 1}], "row 0: expected what JSON can hold"),
        ([{"q": "a"}] * 9, "expected a column 'prompt', got q"),
        (["a", {"question": "b"}], r"row 1, prompt: expected a text .* remove the row$"),
    ],
)
def test_what_are_no_rows_is_refused_in_one_line(tmp_path, rows, says):
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match=says):
        trainer.train("tiny", short, rows, output_dir=folder)
    assert not (folder / "dataset.jsonl").exists()


def test_a_call_runs_to_its_end(tmp_path):
    run = trainer.train(
        "tiny",
        short,
        [f"Say {i}" for i in range(20)],
        output_dir=tmp_path / "run",
        trainer={"num_iterations": 1, "prompts_per_iteration": 2},
        algorithm={"group_size": 2},
        policy={"max_new_tokens": 2},
        eval={"max_rows": 2, "num_samples": 1},
    )
    assert run.state == "finished"
    assert 0 <= run.metrics[-1]["reward/mean"] <= 1
