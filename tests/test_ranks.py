"""Two ranks do what one does: prompts, samples, the whole gradient, the metrics of a run."""

import json
from pathlib import Path

import pytest
from contracts import one_process
from first_step import CASES, HALF, FirstStep, first_step
from runs import SMALL, Finished, lines, metrics, on_two_ranks, train
from safetensors.torch import load_file

pytestmark = pytest.mark.runs


@pytest.fixture(scope="module")
def one() -> FirstStep:
    return first_step(one_process())


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> FirstStep:
    folder = tmp_path_factory.mktemp("two")
    on_two_ranks("first_step.py", folder)
    found = json.loads((folder / "rows.json").read_text())
    tensors = {n: load_file(folder / f"{n}.safetensors") for n in ("gradients", "moved")}
    return FirstStep(**found, **tensors)


def test_two_ranks_have_the_prompts_and_samples_of_one(one: FirstStep, two: FirstStep) -> None:
    assert len(set(one.prompts)) == 4
    assert two.prompts == one.prompts
    assert two.rows == one.rows
    lengths = [sum(map(len, part)) for part in (two.rows[:8], two.rows[8:])]
    assert lengths[0] != lengths[1], "the ranks should have different lengths"
    assert two.micro_batches[0] != two.micro_batches[1], "and different numbers of micro-batches"


def test_two_ranks_draw_again_what_one_does_in_as_many_rounds_each(one, two) -> None:
    assert two.drawn == one.drawn
    first, second = ([draws for *_, draws in part] for part in (two.drawn[:6], two.drawn[6:]))
    assert (max(first), max(second)) == (1, 3), "only one rank should have had idle places"
    assert one.rounds * 2 == two.rounds == [3, 3]


@pytest.mark.parametrize("case", CASES)
def test_the_whole_gradient_of_two_ranks_is_that_of_one(case, one, two) -> None:
    mine, theirs = one.gradients[case].double(), two.gradients[case].double()
    assert mine.shape == theirs.shape
    assert mine.norm() > 1e-4
    assert (mine - theirs).norm() / mine.norm() < 1e-5
    other = one.gradients["half_empty" if case == "micro_batches" else "micro_batches"]
    assert (mine - other).norm() / mine.norm() > 1e-2, "the cases differ"


@pytest.mark.parametrize("case", HALF)
def test_ranks_stay_together_in_half_precision(case, one: FirstStep, two: FirstStep) -> None:
    """Gradients are reduced in every step, not in the first alone."""
    first, second = two.norms[case]
    assert first == second
    assert two.sums[case][0] == two.sums[case][1]
    assert two.sums[case][0], "nothing is trained"
    assert first == pytest.approx(one.norms[case][0], rel=0.05)
    mine, theirs = one.moved[case], two.moved[case]
    assert mine.norm() > 0.1
    assert (mine - theirs).norm() / mine.norm() < 0.2, "rounding of the one against the other"


def test_one_bit_on_one_rank_is_told(one: FirstStep, two: FirstStep) -> None:
    assert one.drift == ""
    assert "the ranks have drifted apart: after iteration 4, 1 of " in two.drift


def test_a_run_on_two_ranks_logs_what_one_logs(small_run: Finished, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [word for word in SMALL if not word.startswith("trainer.num_iterations")]
    done = train(
        *words, "trainer.num_iterations=2", "launch.num_processes=2", f"output_dir={folder}"
    )
    assert done.code == 0, done.text
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    rows, straight = metrics(folder), metrics(small_run.folder)[:3]
    assert [row["progress/iteration"] for row in rows] == [0, 1, 2]
    for row, want in zip(rows, straight, strict=True):
        assert want.keys() <= row.keys()
        assert {name: row[name] for name in want} == pytest.approx(want, rel=1e-3, abs=1e-4)
    assert (folder / "model" / "model.safetensors").is_file()
    replies = [row for row in lines(folder / "transcripts.jsonl") if row["kind"] == "train"]
    assert {row["group"] < 4 for row in replies} == {True, False}, "of both ranks' prompts"
