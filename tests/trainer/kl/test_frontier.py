"""The frontier: by enumeration, brute force and the closed form of 0/1 rewards; on the pages."""

import csv
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.pages import Page, Picture, write_lines, write_status, write_words
from support.policies import make_policy
from support.runs import lines
from support.small_runs import IN_ITERATION_2, Counted, Unjudged, stop, train
from support.tasks import Words

from envs.tasks.task import Response
from trainer.kl import FRONTIER_FILE
from trainer.kl.efficiency import Efficiency
from trainer.kl.frontier import (
    ConfidenceBand,
    best_of,
    efficiency_error,
    least_kl,
    most_kl_of_best_of,
    optima,
)
from trainer.modes.frontier import run as sample_reference
from trainer.pages.__main__ import main
from trainer.pages.report import write_report
from trainer.pages.sweep_page import sweep_svg, write_sweep


def enumerated(prompts: int = 3, responses: int = 6, parts: int = 60, seed: int = 0):
    """Return a reference [P, responses] in whole parts, a reward each, and samples that are it."""
    draw = np.random.default_rng(seed)
    chances = draw.dirichlet(np.ones(responses), size=prompts)
    counts = np.maximum(1, np.floor(chances * (parts - responses))).astype(int)
    counts[:, 0] += parts - counts.sum(1)
    rewards = draw.normal(size=(prompts, responses))
    samples = [np.repeat(r, c) for r, c in zip(rewards, counts, strict=True)]
    return counts / parts, rewards, np.stack(samples)


def kl_and_reward(policy, reference, rewards):
    """Return those of a distribution over responses [P, responses], by their definitions."""
    kl = np.where(policy > 0, policy * np.log(np.maximum(policy, 1e-300) / reference), 0).sum(1)
    return kl.mean(), (policy * rewards).sum(1).mean()


def kl_of_rates(p, odds: float):
    """Return KL and accuracy of the best policy for pass rates `p`, by the closed form."""
    a = p * odds / (1 - p + p * odds)
    return (a * np.log(a / p) + (1 - a) * np.log((1 - a) / (1 - p))).mean(), a.mean()


@pytest.mark.parametrize("coeff", [0.2, 1.0, 5.0])
def test_the_optimum_is_that_of_an_ascent_over_all_distributions(coeff):
    reference, rewards, samples = enumerated()
    ref, r = torch.tensor(reference), torch.tensor(rewards)
    logits = ref.log().clone().requires_grad_()
    climber = torch.optim.LBFGS([logits], max_iter=500, tolerance_grad=1e-12,
                                tolerance_change=1e-16, line_search_fn="strong_wolfe")  # fmt: skip

    def loss():
        climber.zero_grad()
        policy = logits.log_softmax(-1)
        value = (policy.exp() * (r - coeff * (policy - ref.log()))).sum(1).mean()
        (-value).backward()
        return -value

    for _ in range(5):
        climber.step(loss)
    found = logits.log_softmax(-1).exp().detach().numpy()
    want = kl_and_reward(found, reference, rewards)
    (_, kl), (_, reward) = optima(samples, np.array([coeff]))
    assert (kl, reward) == pytest.approx(want, abs=1e-6)


@given(st.lists(st.integers(1, 63), min_size=1, max_size=6), st.floats(0.1, 7.0))
def test_of_right_and_wrong_only_pass_rates_matter(right, log_odds):
    success = np.array([[1.0] * k + [0.0] * (64 - k) for k in right])
    kl, accuracy = kl_of_rates(np.array(right) / 64, math.exp(log_odds))
    (_, least), (_, reward) = optima(success, np.array([1 / log_odds]))
    assert (least, reward) == pytest.approx((kl, accuracy), abs=1e-12)
    assert least_kl(success, accuracy) == pytest.approx(kl, abs=1e-5)


def test_what_the_reference_reaches_is_free_and_what_no_sample_shows_is_unknown():
    success = np.array([[0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    assert least_kl(success, 0.125) == 0.0 == least_kl(success, 0.0)
    assert least_kl(success, 0.4999) == pytest.approx(math.log(4) / 2, rel=0.01)
    assert least_kl(success, 0.51) is None  # one prompt of two was never solved
    rewards = np.array([[3.0, 3.0, 1.0, 0.0], [2.0, -1.0, 0.0, 0.0]])
    best = (math.log(2) + math.log(4)) / 2  # the share of the best responses
    assert least_kl(rewards, 2.5) == pytest.approx(best)
    assert least_kl(rewards, 2.5 - 1e-5) == pytest.approx(best, abs=1e-3)


def test_the_best_of_k_is_the_mean_over_all_picks_and_its_kl_is_bounded():
    """By the exact KL of best-of-k of a uniform reference over m responses of different rewards."""
    rewards = np.random.default_rng(0).normal(size=(2, 7))
    for k in (1, 2, 4, 7):
        picks = [max(pick) for row in rewards for pick in itertools.combinations(row, k)]
        assert best_of(rewards, k) == pytest.approx(np.mean(picks))
    for k, m in itertools.product((1, 2, 4, 8), (10, 10_000)):
        i = np.arange(1, m + 1) / m
        chance = i**k - (i - 1 / m) ** k
        exact = (chance * np.log(np.maximum(chance, 1e-300) * m)).sum()
        assert exact <= most_kl_of_best_of(k) + 1e-12
        if m > 10 * k:
            assert exact == pytest.approx(most_kl_of_best_of(k), abs=0.01)
    rewards = np.sort(np.random.default_rng(0).normal(size=(4, 512)))
    drawn = ConfidenceBand(rewards, draws=0).curve()
    for k in (2, 4, 16):  # no best-of-k passes the frontier
        assert best_of(rewards, k) <= np.interp(most_kl_of_best_of(k), drawn.kl, drawn.value) + 1e-3


def test_a_curve_begins_at_the_reference_rises_and_ends_where_its_samples_do():
    draw = np.random.default_rng(0)
    normal, binary = draw.normal(size=(5, 64)), (draw.random((5, 64)) < 0.2).astype(float)
    for rewards, share in ((normal, 10), (binary, math.e)):
        drawn = ConfidenceBand(rewards).curve()
        assert (drawn.kl[0], drawn.value[0]) == (0.0, pytest.approx(rewards.mean()))
        assert (np.diff(drawn.kl) > 0).all()
        assert (np.diff(drawn.value) > 0).all()
        assert drawn.kl[-1] <= math.log(64 / share)
        assert (drawn.low <= drawn.high).all()
        width = drawn.high[0] - drawn.low[0]  # of the mean reward: 90 % of a normal distribution
        error = rewards.std(1).mean() / rewards.size**0.5
        assert width == pytest.approx(2 * 1.645 * error, rel=0.25)
    nearly = ConfidenceBand(
        (draw.random((5, 64)) < 0.7).astype(float)
    ).curve()  # the band would pass 1
    assert nearly.high.max() <= 1
    flat = ConfidenceBand(np.ones((3, 4))).curve()
    assert (flat.kl.tolist(), flat.value.tolist()) == ([0.0], [1.0])


RATES = np.linspace(0.01, 0.99, 100)


def right_or_wrong(seed: int) -> np.ndarray:
    """Return 64 responses to a prompt of each pass rate."""
    return (np.random.default_rng(seed).random((100, 64)) < RATES[:, None]).astype(float)


def normal(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(40, 64))


# Of a standard normal reward the best policy is one with mean m, at m^2 / 2 nats.
KNOWN = [(normal, 1.2, 1.2**2 / 2), (right_or_wrong, *kl_of_rates(RATES, 80.0)[::-1])]


@pytest.mark.parametrize(("samples", "value", "truth"), KNOWN)
def test_what_few_samples_err_to_one_side_is_taken_off(samples, value, truth):
    """Means over 12 sets of samples; as they are, they say more than 2 % too much."""
    sets = [samples(seed) for seed in range(12)]
    plain = [found for rewards in sets if (found := least_kl(rewards, value))]
    judged = [
        found for rewards in sets if (found := ConfidenceBand(rewards, draws=40).least_kl(value))
    ]
    assert len(judged) >= 10
    assert np.mean(plain) > 1.02 * truth
    assert np.mean(judged) == pytest.approx(truth, rel=0.02)


def test_the_error_of_an_efficiency_is_its_deviation_over_sets_of_prompts():
    """Over 80 sets of 40 prompts, with 64 responses of the reference and 8 of a wasteful policy."""
    found, errors = [], []
    for seed in range(80):
        draw = np.random.default_rng(seed)
        p = draw.beta(1.2, 4, size=(40, 1))
        odds = np.exp(draw.normal(2.2, 1.0, size=(40, 1)))
        a = p * odds / (1 - p + p * odds)
        success = (draw.random((40, 64)) < p).astype(float)
        right = draw.random((40, 8)) < a
        kl = np.where(right, np.log(a / p), np.log((1 - a) / (1 - p))) + draw.normal(
            0.6, 1, (40, 8)
        )
        found.append(least_kl(success, right.mean()) / kl.mean())
        errors.append(efficiency_error(success, right.mean(1), kl.mean(1)))
    assert np.mean(errors) == pytest.approx(np.std(found), rel=0.25)
    assert efficiency_error(np.zeros((3, 4)), np.zeros(3), np.ones(3)) == 0, "nothing is ever right"


# On the pages: efficiency by hand numbers, what is drawn, and samples of a real run.

# Three prompts, 512 responses of the reference: right in a quarter, in half and in none of them.
SUCCESS = [[1] * right + [0] * (512 - right) for right in (128, 256, 0)]
REWARD = [[2.0 * right for right in row] for row in SUCCESS]
# KL and accuracy of the best policy at odds of 3; the third prompt adds nothing.
LEAST, ACCURACY = (2 / 3 * found for found in kl_of_rates(np.array([0.25, 0.5]), 3.0))


def write_frontier(folder: Path, success=SUCCESS, reward=REWARD, asked: int = 3) -> None:
    values = {"asked": asked, "success": success, "reward": reward}
    (folder / "frontier.json").write_text(json.dumps(values))


def write_jobs(folder: Path, *, right: bool = True) -> Path:
    """Write a sweep: of twice the KL needed, beyond what any sample shows, and not moved."""
    (folder / "multirun.yaml").write_text("hydra: {}\n")
    for coeff, accuracy, kl in (1.0, ACCURACY, 2 * LEAST), (0.0, 1.0, 3.0), (9.0, 0.25, 0.0):
        last = {"kl/ref_sequence": 99.0, "reward/mean": 0.5, "kl/coeff": coeff}
        last |= {"eval/kl_ref_sequence": kl, "eval/reward": 2 * accuracy}
        begin = {"eval/kl_ref_sequence": 0.0, "eval/reward": 0.5}
        if right:
            begin["eval/sampled_accuracy"], last["eval/sampled_accuracy"] = 0.25, accuracy
        job = write_lines(folder / f"kl.coeff={coeff:g}", begin, last, begin=0)
        write_words(write_status(job, state="finished"), f"kl.coeff={coeff}")
    return folder


def efficiencies(folder: Path) -> dict[str, str]:
    write_sweep(folder)
    rows = csv.DictReader((folder / "sweep.csv").read_text().splitlines())
    return {row["kl.coeff"]: row["kl/efficiency"] for row in rows}


@pytest.mark.parametrize("right", [True, False])
def test_efficiency_is_the_least_kl_over_what_was_spent(tmp_path, right):
    """By accuracy, and by reward where nothing is right or wrong."""
    write_frontier(write_jobs(tmp_path, right=right), SUCCESS if right else [[0] * 512] * 3)
    found = efficiencies(tmp_path)
    # a bootstrap took off what 512 err
    assert float(found.pop("1.0")) == pytest.approx(0.5, abs=0.01)
    assert found == {"0.0": "", "9.0": ""}
    picture = tmp_path / "a.svg"  # responses that are there are not sampled again
    assert main([str(tmp_path), "--frontier", "512", "--svg", str(picture)]) == 0
    write_status(tmp_path / "kl.coeff=1", state="finished", held_out=100)
    assert efficiencies(tmp_path)["1.0"] == "", "a frontier of other rows judges no run"


def test_points_stand_at_the_kl_of_the_responses_that_they_are_of_below_the_frontier(tmp_path):
    write_frontier(write_jobs(tmp_path))
    drawn = Picture(sweep_svg(tmp_path))
    point = f"accuracy {ACCURACY:.3f}, KL {2 * LEAST:.3f}"
    assert f"1.0: {point}" in drawn.tips
    line = next(p for p in drawn.paths("line") if len(p) > 5)
    assert all(b[1] <= a[1] for a, b in itertools.pairwise(line)), "it rises"
    page = Page(write_report(tmp_path / "kl.coeff=1"))
    drawn = page.charts()["Accuracy against KL, held-out prompts"]
    assert f"iteration 1: {point}, efficiency 0.49" in drawn.tips
    beyond = Page(write_report(tmp_path / "kl.coeff=0")).texts
    assert any("beyond the end" in t for t in beyond)
    scores = {"eval/sampled_accuracy": ACCURACY, "eval/kl_ref_sequence": 2 * LEAST}
    judge = Efficiency(512, tmp_path / FRONTIER_FILE)
    assert judge(scores, 3, {}) == {"kl/efficiency": pytest.approx(0.5, abs=0.01)}
    assert judge(scores, 4, {}) == {}, "those samples say nothing of more rows"


def test_the_page_of_a_run_shows_the_share_of_its_kl_that_changed_style(tmp_path):
    write_frontier(tmp_path)
    parts = {"kl/needed": 0.4, "kl/misallocated": 0.1, "kl/in_right": 0.2, "kl/in_wrong": 1.3}
    last = {"eval/kl_ref_sequence": 2.0, "eval/sampled_accuracy": ACCURACY, **parts}
    last |= {"kl/efficiency_error": 0.05, "kl/efficiency_train": 0.625}
    texts = " ".join(Page(write_report(write_lines(tmp_path, last))).texts)
    assert "65% of" in texts
    assert "10% right" in texts
    assert "(standard error 0.05)" in texts
    assert "On training prompts it is 0.62." in texts


@pytest.mark.runs
def test_a_run_with_a_frontier_judges_its_evaluations_and_goes_on_so(tmp_path):
    """It samples before training; a run that is stopped and resumed logs the same."""
    options = {"frontier": 16, "train_rows": 3}
    before = 4 * 16 + 3 * 16 + 3 * 3  # responses that a run without these options lacks
    train(tmp_path / "whole", **options)
    assert "stopped" in train(tmp_path / "cut", Counted(before + IN_ITERATION_2, stop), **options)
    train(tmp_path / "cut", resume=True, **options)
    whole, cut = (lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut"))
    judged = [row["progress/iteration"] for row in whole if "kl/efficiency" in row]
    assert judged == [2, 4], whole
    assert [row.get("kl/efficiency") for row in whole] == [row.get("kl/efficiency") for row in cut]
    for row in whole:
        if "kl/efficiency" in row:
            parts = [row[f"kl/{n}"] for n in ("needed", "misallocated", "in_right", "in_wrong")]
            assert sum(parts) == pytest.approx(row["eval/kl_ref_sequence"], rel=1e-5)
            assert row["kl/efficiency_error"] >= 0
    assert whole[-1]["eval_train/sampled_accuracy"] == cut[-1]["eval_train/sampled_accuracy"]
    seen = json.loads((tmp_path / "whole" / "frontier_train.json").read_text())
    assert (seen["rows"], seen["asked"]) == ([0, 1, 2], 3)
    kept = json.loads((tmp_path / "whole" / "frontier.json").read_text())
    assert kept["rows"] == [0, 1, 2, 3]
    assert {len(row) for row in kept["success"]} == {16}
    train(tmp_path / "dropped", Unjudged(), frontier=4)
    assert not (tmp_path / "dropped" / "frontier.json").exists(), "no row has a reward"


@pytest.mark.runs
def test_the_samples_of_a_frontier_are_those_of_the_tempered_reference(tmp_path):
    """By enumeration of all responses of one token."""
    policy, task, factor = make_policy(max_new_tokens=1), Words(), 0.25
    settings = {"kl": {"reference_temperature": factor}, "output_dir": str(tmp_path)}

    def change(loop):
        loop.evaluate.generator = policy
        sample_reference(loop, settings | {"eval": {"num_samples": 512}})

    train(tmp_path / "run", change=change)
    found = np.mean(json.loads((tmp_path / FRONTIER_FILE).read_text())["reward"], 1)
    texts = [
        policy.tokenizer.decode([i], skip_special_tokens=True)
        for i in range(policy.model.vocab_size)
    ]
    for row, mean in zip(task.rows("eval"), found, strict=True):
        chat = policy.tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True)
        with torch.no_grad():
            logits = policy.model(torch.tensor([chat["input_ids"]])).logits[0, -1].double()
        rewards = [task.reward(row, Response(text, True, [])).total for text in texts]
        exact = (logits / factor).softmax(-1) @ torch.tensor(rewards, dtype=torch.float64)
        assert mean == pytest.approx(float(exact), abs=0.06)
