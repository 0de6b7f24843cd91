"""The limit on the pages: efficiency by hand numbers, what is drawn, and samples of a real run."""

import csv
import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from pages import Page, Picture, write_lines, write_status, write_words
from runs import lines
from small_runs import IN_ITERATION_2, Counted, Unjudged, stop, train

from trainer.evaluation import Efficiency
from trainer.limit import Bounds, read_limit
from trainer.reports.__main__ import main
from trainer.reports.report import write_report
from trainer.reports.sweep_page import sweep_svg, write_sweep

# Three prompts, 512 replies of the reference: right in a quarter, in half and in none of them.
SUCCESS = [[1] * right + [0] * (512 - right) for right in (128, 256, 0)]
REWARD = [[2.0 * right for right in row] for row in SUCCESS]
# Accuracy and KL of the best policy at odds of 3, by the closed form for those rates.
RIGHT = [p * 3 / (1 - p + p * 3) for p in (0.25, 0.5)]
ACCURACY = sum(RIGHT) / 3
LEAST = sum(
    a / 3 * math.log(a / p) + (1 - a) / 3 * math.log((1 - a) / (1 - p))
    for a, p in zip(RIGHT, (0.25, 0.5), strict=True)
)


def write_limit(folder: Path, success=SUCCESS, reward=REWARD, asked: int = 3) -> None:
    values = {"asked": asked, "success": success, "reward": reward}
    (folder / "limit.json").write_text(json.dumps(values))


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
    write_limit(write_jobs(tmp_path, right=right), SUCCESS if right else [[0] * 512] * 3)
    found = efficiencies(tmp_path)
    # a bootstrap took off what 512 err
    assert float(found.pop("1.0")) == pytest.approx(0.5, abs=0.01)
    assert found == {"0.0": "", "9.0": ""}
    picture = tmp_path / "a.svg"  # replies that are there are not sampled again
    assert main([str(tmp_path), "--limit", "512", "--svg", str(picture)]) == 0
    write_status(tmp_path / "kl.coeff=1", state="finished", held_out=100)
    assert efficiencies(tmp_path)["1.0"] == "", "a limit of other rows judges no run"


def test_points_stand_at_the_kl_of_the_replies_that_they_are_of_below_the_limit(tmp_path):
    write_limit(write_jobs(tmp_path))
    drawn = Picture(sweep_svg(tmp_path))
    point = f"accuracy {ACCURACY:.3f}, KL {2 * LEAST:.3f}"
    assert f"1.0: {point}" in drawn.tips
    # two different ones, none right
    best = (2 - (384 / 512 * 383 / 511 + 256 / 512 * 255 / 511)) / 3
    tip = f"best of 2 replies of the reference: accuracy {best:.3f}, KL at most "
    assert f"{tip}{math.log(2) - 1 / 2:.2f}" in drawn.tips
    line = next(p for p in drawn.paths("line") if len(p) > 5)
    assert all(b[1] <= a[1] for a, b in pairwise(line)), "it rises"
    page = Page(write_report(tmp_path / "kl.coeff=1"))
    drawn = page.charts()["Accuracy against KL, held-out prompts"]
    assert f"iteration 1: {point}, efficiency 0.49" in drawn.tips
    scores = {"eval/sampled_accuracy": ACCURACY, "eval/kl_ref_sequence": 2 * LEAST}
    judge = Efficiency(512, tmp_path)
    assert judge(scores, 3) == {"kl/efficiency": pytest.approx(0.5, abs=0.01)}
    assert judge(scores, 4) == {}, "those samples say nothing of more rows"


@pytest.mark.parametrize(
    "reward", [[[1.0, 1.0 + 2**-52], [1.0, 1.0]], [[0.0] * 4_000, [0.0] * 3_999 + [1.0]]]
)
def test_extreme_samples_give_finite_numbers_or_none(tmp_path, reward):
    """Warnings are errors: none is raised on the way to a page either."""
    write_limit(write_jobs(tmp_path, right=False), [[0] * len(reward[0])] * 2, reward, asked=2)
    limit = read_limit(tmp_path / "limit.json")
    for value in (-1e300, 5e-324, 0.5, 1e99, math.nan, math.inf):
        for kl in (0.0, 0.5, 1e300, math.nan):
            got = limit.efficiency("eval/reward", value, kl)
            assert got is None or 0 <= got < math.inf, (value, kl, got)
    assert all(np.isfinite(side).all() for side in vars(Bounds(limit.reward).curve()).values())
    assert "replies of the reference" in write_sweep(tmp_path).read_text()


@pytest.mark.runs
def test_a_run_with_a_limit_judges_its_evaluations_and_goes_on_so(tmp_path):
    """The replies before training are the limit's; what was stopped and resumed logs the same."""
    train(tmp_path / "whole", limit=16)
    assert "stopped" in train(tmp_path / "cut", Counted(64 + IN_ITERATION_2, stop), limit=16)
    train(tmp_path / "cut", resume=True, limit=16)
    whole, cut = (lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut"))
    judged = [row["progress/iteration"] for row in whole if "kl/efficiency" in row]
    assert judged == [2, 4], whole
    assert [row.get("kl/efficiency") for row in whole] == [row.get("kl/efficiency") for row in cut]
    kept = json.loads((tmp_path / "whole" / "limit.json").read_text())
    assert kept["rows"] == [0, 1, 2, 3]
    assert {len(row) for row in kept["success"]} == {16}
    train(tmp_path / "dropped", Unjudged(), limit=4)
    assert not (tmp_path / "dropped" / "limit.json").exists(), "no row has a reward"
