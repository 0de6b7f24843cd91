"""Does it learn? A short run (make test-runs), whole ones on fresh seeds (make test-learn)."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from support.runs import Finished, lines, train

from trainer.pages.diagnosis import Diagnosis

SEEDS = (101, 102, 103)  # none of them was used for tuning
GRPO_LIKE = ("bnpo", "cispo", "dapo", "dppo", "dr_grpo", "gspo", "rloo")
GRPO_LIKE += ("reinforce_pp", "reinforce_pp_baseline")
# Sampled accuracy on held-out rows: at most before, at least after. Each at the KL of its YAML.
LIMITS = {f"{name}_tiny": (0.35, 0.8) for name in ("ppo", *GRPO_LIKE)} | {
    "grpo_tiny": (0.35, 0.85),
    "grpo_tools_tiny": (0.7, 0.85),
    "grpo_smollm": (0.25, 0.55),
}


@pytest.mark.runs
def test_grpo_tiny_learns_in_25_iterations(small_run: Finished, tmp_path: Path) -> None:
    """From the warm cache that `small_run` left; sampled accuracy on held-out digit multisets."""
    done = train(
        "experiment=grpo_tiny",
        "seed=7",
        "trainer.num_iterations=25",
        "eval.greedy=false",
        "checkpoint.every=0",
        f"output_dir={tmp_path / 'run'}",
    )
    assert done.code == 0, done.text
    rows = lines(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1]["eval/sampled_accuracy"] >= rows[0]["eval/sampled_accuracy"] + 0.25
    kl = trained(rows, "kl/ref_sequence")
    assert abs(kl[0]) < 1e-4
    assert sum(kl[-5:]) / 5 > 0.5


@cache
def whole_run(experiment: str, seed: int, *words: str) -> list[dict]:
    """Run an experiment as it is, but for some words; return its metrics."""
    folder = Path(mkdtemp()) / "run"
    done = train(f"experiment={experiment}", f"seed={seed}", f"output_dir={folder}", *words)
    assert done.code == 0, done.text
    return lines(folder / "metrics.jsonl")


def trained(rows: list[dict], name: str) -> list[float]:
    return [row[name] for row in rows[1:]]


@pytest.mark.learn
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("experiment", LIMITS)
def test_an_algorithm_with_a_reward_learns(experiment: str, seed: int) -> None:
    rows = whole_run(experiment, seed)
    before, after = LIMITS[experiment]
    assert rows[0]["eval/sampled_accuracy"] <= before
    assert rows[-1]["eval/sampled_accuracy"] >= after
    assert trained(rows, "kl/ref_sequence")[-1] > 0.1, "it has left the reference"


@pytest.mark.learn
def test_a_good_run_has_no_warning() -> None:
    assert Diagnosis(whole_run("grpo_tiny", 101)).findings == []


@pytest.mark.learn
def test_the_critic_of_ppo_learns_to_expect() -> None:
    variance = trained(whole_run("ppo_tiny", 101), "value/explained_variance")
    assert sum(variance[-10:]) / 10 > 0.3


@pytest.mark.learn
def test_minor_sft_goes_on_imitating_and_stays_where_it_was() -> None:
    rows = whole_run("minor_sft_tiny", 101)
    deviation = trained(rows, "sft/deviation")
    assert deviation[0] == pytest.approx(0.0, abs=1e-5)
    assert abs(sum(deviation[-20:]) / 20) < 0.1, "nats a token above the start"
    assert 0.05 < rows[-1]["eval/sampled_accuracy"] < 0.4, "a quarter of what it imitates is right"


@pytest.mark.learn
def test_a_reward_model_is_gamed_on_a_long_leash_and_taught_by_on_a_short_one() -> None:
    short = whole_run("ppo_tldr_tiny", 101)
    long = whole_run("ppo_tldr_tiny", 101, "kl.coeff=0")
    for rows in (short, long):
        assert rows[-1]["reward/raw_mean"] > rows[1]["reward/raw_mean"] + 3
    assert short[-1]["eval/sampled_accuracy"] > 0.45
    assert long[-1]["eval/sampled_accuracy"] < short[-1]["eval/sampled_accuracy"] - 0.2
    assert long[-1]["reward/raw_mean"] > short[-1]["reward/raw_mean"]
    assert long[-1]["kl/ref_sequence"] > short[-1]["kl/ref_sequence"] + 1
