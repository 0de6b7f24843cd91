"""Does it learn? One short run for `make test`; whole runs on fresh seeds for `make test-learn`."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from runs import Finished, lines, train

from trainer.reports.diagnosis import Diagnosis

SEEDS = (101, 102, 103)  # none of them was used for tuning


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
    kl = [row["kl/ref_sequence"] for row in rows[1:]]
    assert abs(kl[0]) < 1e-4
    assert sum(kl[-5:]) / 5 > 0.5


@cache
def whole_run(experiment: str, seed: int, *words: str) -> tuple[Finished, list[dict]]:
    """Run an experiment as it is, or but for some words; return how it went and its metrics."""
    folder = Path(mkdtemp()) / "run"
    done = train(f"experiment={experiment}", f"seed={seed}", f"output_dir={folder}", *words)
    assert done.code == 0, done.text
    return done, lines(folder / "metrics.jsonl")


def trained(rows: list[dict], name: str) -> list[float]:
    return [row[name] for row in rows[1:]]


@pytest.mark.learn
@pytest.mark.parametrize("seed", SEEDS)
def test_grpo_tiny_learns_to_sort(seed: int) -> None:
    _, rows = whole_run("grpo_tiny", seed)
    assert rows[0]["eval/sampled_accuracy"] < 0.35
    assert rows[-1]["eval/sampled_accuracy"] > 0.85
    assert rows[-1]["eval/greedy_accuracy"] > 0.95
    assert abs(rows[1]["kl/ref_sequence"]) < 1e-4
    assert trained(rows, "kl/ref_sequence")[-1] > 0.5
    assert {found.level for found in Diagnosis(rows).findings} == {"info"}, "a good run is well"
    seconds = sorted(trained(rows, "time/iteration_s"))
    assert seconds[len(seconds) * 95 // 100] < 0.6, "95 of 100 iterations"


@pytest.mark.learn
@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_tiny_learns_to_sort_and_its_critic_to_expect(seed: int) -> None:
    _, rows = whole_run("ppo_tiny", seed)
    assert rows[0]["eval/sampled_accuracy"] < 0.35
    assert rows[-1]["eval/sampled_accuracy"] > 0.8
    assert rows[-1]["eval/greedy_accuracy"] > 0.9
    assert sum(trained(rows, "value/explained_variance")[-10:]) / 10 > 0.3


# Each at the coefficient of its YAML; ppo and grpo have tests of their own.
FAMILY = (
    "bnpo",
    "cispo",
    "dapo",
    "dppo",
    "dr_grpo",
    "gspo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "rloo",
)


@pytest.mark.learn
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("algorithm", FAMILY)
def test_the_grpo_family_learns_to_sort(algorithm: str, seed: int) -> None:
    _, rows = whole_run(f"{algorithm}_tiny", seed)
    assert rows[0]["eval/sampled_accuracy"] < 0.35
    assert rows[-1]["eval/sampled_accuracy"] >= 0.80
    assert trained(rows, "kl/ref_sequence")[-1] > 0.5


@pytest.mark.learn
def test_minor_sft_tiny_goes_on_imitating_and_stays_where_it_was() -> None:
    _, rows = whole_run("minor_sft_tiny", 101)
    deviation = trained(rows, "sft/deviation")
    assert deviation[0] == pytest.approx(0.0, abs=1e-5)
    assert abs(sum(deviation[-20:]) / 20) < 0.1, "nats a token above the start"
    assert 0.05 < rows[-1]["eval/sampled_accuracy"] < 0.4, "a quarter of what it imitates is right"


@pytest.mark.learn
def test_ppo_tldr_tiny_is_gamed_on_a_long_leash_and_sorts_on_a_short_one() -> None:
    _, short = whole_run("ppo_tldr_tiny", 101)
    _, long = whole_run("ppo_tldr_tiny", 101, "kl.coeff=0")
    for rows in (short, long):
        assert rows[-1]["reward/raw_mean"] > rows[1]["reward/raw_mean"] + 3
    assert short[-1]["eval/sampled_accuracy"] > 0.45
    assert long[-1]["eval/sampled_accuracy"] < short[-1]["eval/sampled_accuracy"] - 0.2
    assert long[-1]["reward/raw_mean"] > short[-1]["reward/raw_mean"]
    assert long[-1]["kl/ref_sequence"] > short[-1]["kl/ref_sequence"] + 1


@pytest.mark.learn
@pytest.mark.parametrize("seed", SEEDS)
def test_grpo_calculator_tiny_learns_to_call(seed: int) -> None:
    _, rows = whole_run("grpo_calculator_tiny", seed)
    assert rows[0]["eval/sampled_accuracy"] <= 0.15
    assert rows[-1]["eval/sampled_accuracy"] >= 0.85
    assert rows[-1]["eval/greedy_accuracy"] > 0.95
    assert trained(rows, "reward_part/called")[-1] > 0.9
    assert sum(trained(rows, "time/iteration_s")) < 60


@pytest.mark.learn
def test_grpo_tiny_takes_two_minutes_the_first_time_and_one_the_second(tmp_path: Path) -> None:
    limits = (120, 60)
    for number, limit in enumerate(limits):
        words = ("experiment=grpo_tiny", f"output_dir={tmp_path / str(number)}")
        done = train(*words, LEASH_CACHE=str(tmp_path / "cache"))
        assert done.code == 0, done.text
        assert done.seconds < limit


@pytest.mark.learn
@pytest.mark.parametrize("seed", SEEDS)
def test_grpo_smollm_learns_capitals(seed: int) -> None:
    done, rows = whole_run("grpo_smollm", seed)
    assert 0.1 < rows[0]["eval/sampled_accuracy"] < 0.35
    assert rows[-1]["eval/sampled_accuracy"] > 0.65
    one_subject = 1 / 40  # 40 subjects are held out
    lost = rows[0]["eval/greedy_accuracy"] - rows[-1]["eval/greedy_accuracy"]
    assert lost <= one_subject + 1e-9
    assert abs(rows[1]["kl/ref_sequence"]) < 1e-2
    assert trained(rows, "kl/ref_sequence")[-1] > 0.1
    assert max(trained(rows, "perf/peak_memory_gib")) < 8
    assert done.seconds < 600


@pytest.mark.learn
def test_grpo_smollm_is_above_three_quarters_in_the_mean() -> None:
    last = [whole_run("grpo_smollm", seed)[1][-1]["eval/sampled_accuracy"] for seed in SEEDS]
    assert sum(last) / len(last) > 0.75
