"""Whole runs under top-k and top-p: they learn, on two ranks as on one, and resume to the bit."""

import hashlib
from pathlib import Path

import pytest
from runs import lines, metrics, train

WORDS = (
    "experiment=grpo_tiny",
    "seed=1",
    "policy.top_p=0.9",
    "policy.top_k=20",
    "checkpoint.every=2",
    "tracker=none",
    "launch.threads=1",
    "optimizer.schedule=constant",  # else a short run is no beginning of a longer one
)
pytestmark = pytest.mark.reliability


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("filtered") / "run"
    done = train(*WORDS, f"output_dir={folder}", "trainer.num_iterations=4")
    assert done.code == 0, done.text
    return folder


def test_a_filtered_run_learns_with_a_ratio_that_begins_at_one(whole):
    rows = lines(whole / "metrics.jsonl")
    assert rows[-1]["eval/sampled_accuracy"] > rows[0]["eval/sampled_accuracy"] + 0.1
    for row in rows[1:]:
        assert row["kl/mismatch"] < 1e-5
        assert all(value is not None for name, value in row.items() if name.startswith("kl/"))
    assert abs(rows[1]["kl/ref_sequence"]) < 1e-4
    assert rows[-1]["kl/ref_sequence"] > 0.05


def test_a_resumed_filtered_run_is_the_whole_one(whole, tmp_path):
    folder = tmp_path / "run"
    first = train(*WORDS, f"output_dir={folder}", "trainer.num_iterations=2")
    assert first.code == 0, first.text
    rest = train(f"resume={folder}", "trainer.num_iterations=4")
    assert rest.code == 0, rest.text
    assert weights(folder) == weights(whole)
    assert metrics(folder)[-1] == metrics(whole)[-1]


def test_two_ranks_log_what_one_logs(whole, tmp_path):
    folder = tmp_path / "run"
    done = train(
        *WORDS, f"output_dir={folder}", "launch.num_processes=2", "trainer.num_iterations=2"
    )
    assert done.code == 0, done.text
    for mine, theirs in zip(metrics(folder)[1:2], metrics(whole)[1:2], strict=True):
        for name in ("reward/mean", "kl/ref_sequence", "policy/entropy", "optim/grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=ppo_tiny", "policy.min_p=0.05"],
        ["experiment=rloo_tiny", "policy.top_k=8"],
        ["experiment=dapo_tiny", "policy.top_p=0.9"],
        ["experiment=grpo_calculator_tiny", "policy.top_p=0.9", "kl.estimator=full"],
        ["experiment=grpo_tiny", "policy.top_p=0.9", "policy.lora.r=4", "policy.temperature=0.8"],
    ],
    ids=lambda words: words[0].partition("=")[2],
)
def test_every_algorithm_runs_under_a_filter(words, tmp_path):
    few = ("seed=1", "tracker=none", "trainer.num_iterations=2", "eval.max_rows=8")
    done = train(*words, *few, f"output_dir={tmp_path / 'run'}")
    assert done.code == 0, done.text
    for row in lines(tmp_path / "run" / "metrics.jsonl")[1:]:
        assert row["kl/mismatch"] < 1e-4
        assert row["kl/ref_sequence"] is not None
        assert abs(row["kl/ref_sequence"]) < 5
