"""Two ranks do what one does: prompts, samples, the whole gradient, the metrics of a run."""

import json
from pathlib import Path

import pytest
from contracts import one_process
from first_step import CASES, HALF, TENSORS, first_step
from runs import SMALL, Finished, lines, metrics, on_two_ranks, train
from safetensors.torch import load_file

pytestmark = pytest.mark.runs


@pytest.fixture(scope="module")
def one() -> dict:
    return first_step(one_process())


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("two")
    on_two_ranks("first_step.py", folder)
    tensors = {name: load_file(folder / f"{name}.safetensors") for name in TENSORS}
    return json.loads((folder / "rows.json").read_text()) | tensors


def test_two_ranks_have_the_prompts_and_samples_of_one(one, two) -> None:
    assert len(set(one["prompts"])) == 4
    assert two["prompts"] == one["prompts"]
    assert two["rows"] == one["rows"]
    lengths = [sum(map(len, part)) for part in (two["rows"][:8], two["rows"][8:])]
    assert lengths[0] != lengths[1], "the ranks should have different lengths"
    assert len(set(two["micro_batches"])) == 2, "and different numbers of micro-batches"


def test_two_ranks_draw_again_what_one_does_in_as_many_rounds_each(one, two) -> None:
    assert two["drawn"] == one["drawn"]
    draws = [draws for *_, draws in two["drawn"]]
    assert (max(draws[:6]), max(draws[6:])) == (1, 3), "only one rank should have had idle places"
    assert one["rounds"] * 2 == two["rounds"] == [3, 3]


def test_the_whole_gradient_of_two_ranks_is_that_of_one(one, two) -> None:
    mine, theirs = ([run["gradients"][case].double() for case in CASES] for run in (one, two))
    for a, b in zip(mine, theirs, strict=True):
        assert a.norm() > 1e-4
        assert (a - b).norm() / a.norm() < 1e-5
    assert (mine[0] - mine[1]).norm() / mine[0].norm() > 1e-2, "the cases differ"


@pytest.mark.parametrize("case", HALF)
def test_ranks_stay_together_in_half_precision(case, one, two) -> None:
    """Gradients are reduced in every step, not in the first alone."""
    first, second = two["norms"][case]
    assert first == second
    assert two["sums"][case][0] == two["sums"][case][1]
    assert two["sums"][case][0], "nothing is trained"
    assert first == pytest.approx(one["norms"][case][0], rel=0.05)
    mine, theirs = one["moved"][case], two["moved"][case]
    assert mine.norm() > 0.1
    assert (mine - theirs).norm() / mine.norm() < 0.2, "rounding of the one against the other"


def test_one_bit_on_one_rank_is_told(one, two) -> None:
    assert one["drift"] == ""
    assert "the ranks have drifted apart: after iteration 4, 1 of " in two["drift"]


def test_a_run_on_two_ranks_logs_what_one_logs(small_run: Finished, tmp_path: Path) -> None:
    words = [word for word in SMALL if not word.startswith("trainer.num_iterations")]
    ranks = ("trainer.num_iterations=2", "launch.num_processes=2")
    done = train(*words, *ranks, f"output_dir={tmp_path}")
    assert done.code == 0, done.text
    rows, straight = metrics(tmp_path), metrics(small_run.folder)[:3]
    assert [row["progress/iteration"] for row in rows] == [0, 1, 2]
    for row, want in zip(rows, straight, strict=True):
        assert want.keys() <= row.keys()
        assert {name: row[name] for name in want} == pytest.approx(want, rel=1e-3, abs=1e-4)
    assert (tmp_path / "model" / "model.safetensors").is_file()
    replies = [row for row in lines(tmp_path / "transcripts.jsonl") if row["kind"] == "train"]
    assert {row["group"] < 4 for row in replies} == {True, False}, "of both ranks' prompts"
