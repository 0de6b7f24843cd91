"""The limit on the pages: efficiency by hand numbers, what is drawn, and samples of a real run."""

import csv
import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from pages import Page, Picture, write_lines, write_status, write_words
from refusals import refusal
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


def least(odds: float) -> tuple[float, float]:
    """Return accuracy and KL of the best policy by the closed form for rates 1/4, 1/2 and 0."""
    rates = (0.25, 0.5)
    right = [p * odds / (1 - p + p * odds) for p in rates]
    kls = [
        a * math.log(a / p) + (1 - a) * math.log((1 - a) / (1 - p))
        for a, p in zip(right, rates, strict=True)
    ]
    return sum(right) / 3, sum(kls) / 3


def write_limit(folder: Path, success=SUCCESS, reward=REWARD, asked: int = 3) -> None:
    values = {"asked": asked, "success": success, "reward": reward}
    (folder / "limit.json").write_text(json.dumps(values))


def write_job(
    folder: Path, coeff: float, accuracy: float, kl: float, *, right: bool = True
) -> None:
    held = {"eval/kl_ref_sequence": kl, "eval/reward": 2 * accuracy}
    last = {"kl/ref_sequence": 99.0, "reward/mean": 0.5, "kl/coeff": coeff, **held}
    begin = {"eval/kl_ref_sequence": 0.0, "eval/reward": 0.5}
    if right:
        begin["eval/sampled_accuracy"], last["eval/sampled_accuracy"] = 0.25, accuracy
    write_lines(folder, begin, last, begin=0)
    write_status(folder, state="finished")
    write_words(folder, f"kl.coeff={coeff}")


def rows_of_csv(folder: Path) -> list[dict[str, str]]:
    write_sweep(folder)
    return list(csv.DictReader((folder / "sweep.csv").read_text().splitlines()))


def write_jobs(folder: Path, **how: bool) -> Path:
    (folder / "multirun.yaml").write_text("hydra: {}\n")
    accuracy, kl = least(3.0)
    write_job(folder / "kl.coeff=1", 1.0, accuracy, 2 * kl, **how)  # for twice the price
    write_job(folder / "kl.coeff=0", 0.0, 1.0, 3.0, **how)  # beyond what any sample shows
    write_job(folder / "kl.coeff=9", 9.0, 0.25, 0.0, **how)  # has not moved
    return folder


@pytest.mark.parametrize("right", [True, False])
def test_efficiency_is_the_least_kl_over_what_was_spent(tmp_path, right, capsys):
    """By accuracy, and by reward where nothing is right or wrong."""
    write_limit(write_jobs(tmp_path, right=right), SUCCESS if right else [[0] * 512] * 3)
    page = Page(write_sweep(tmp_path))
    with open(tmp_path / "sweep.csv", newline="") as file:
        got = {row["kl.coeff"]: row["kl/efficiency"] for row in csv.DictReader(file)}
    assert float(got.pop("1.0")) == pytest.approx(
        0.5, abs=0.01
    )  # a bootstrap took off what 512 err
    assert got == {"0.0": "", "9.0": ""}
    assert "KL efficiency" in page.text
    assert "The limit: 512 replies of the reference to each of 3 held-out prompts" in page.text
    assert (
        "the line ends where these do (--limit 4096 for more): docs/kl.md, The limit" in page.text
    )
    assert main([str(tmp_path), "--table"]) == 0
    assert "| KL efficiency | - | 0.49 | - |" in capsys.readouterr().out


def test_points_stand_at_the_kl_of_the_replies_that_they_are_of(tmp_path):
    write_limit(write_jobs(tmp_path))
    drawn = Picture(sweep_svg(tmp_path))
    accuracy, kl = least(3.0)
    assert f"1.0: accuracy {accuracy:.3f}, KL {2 * kl:.3f}" in drawn.tips
    best = (
        2 - (384 / 512 * 383 / 511 + 256 / 512 * 255 / 511)
    ) / 3  # two different ones, none right
    bound = math.log(2) - 1 / 2
    tip = f"best of 2 replies of the reference: accuracy {best:.3f}, KL at most {bound:.2f}"
    assert tip in drawn.tips
    # At the KL of that bound the line lies above the diamond.
    line = next(p for p in drawn.paths("line") if len(p) > 5)
    assert all(b[1] <= a[1] for a, b in pairwise(line)), "it rises"


def test_a_report_draws_its_way_below_the_limit_of_its_sweep(tmp_path):
    write_limit(write_jobs(tmp_path))
    page = Page(write_report(tmp_path / "kl.coeff=1"))
    drawn = page.charts()["Accuracy against KL, held-out prompts"]
    accuracy, kl = least(3.0)
    assert f"iteration 1: accuracy {accuracy:.3f}, KL {2 * kl:.3f}, efficiency 0.49" in drawn.tips
    assert "iteration 0: accuracy 0.250, KL 0.000" in drawn.tips


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"reward": [[1, 2]], "success": [[1]]}', '{"reward": [], "success": []}',
     '{"reward": [[1, [2]]], "success": [[1, 0]]}', '{"reward": [["x"]], "success": [[1]]}',
     '{"reward": [[NaN]], "success": [[1]]}', '{"reward": [[-Infinity]], "success": [[0]]}'],
)  # fmt: skip
def test_a_damaged_limit_is_none_and_is_not_drawn(tmp_path, text):
    (write_jobs(tmp_path) / "limit.json").write_text(text)
    assert read_limit(tmp_path / "limit.json") is None
    page = Page(write_report(tmp_path / "kl.coeff=1"))
    assert "replies of the reference" not in page.text
    assert "The limit" not in Page(write_sweep(tmp_path)).text
    assert not Efficiency(4, tmp_path).known()
    assert Efficiency(4, tmp_path)({"eval/reward": 1.0}, 3) == {}


EXTREME = [
    [[1.0, 1.0 + 2**-52], [1.0, 1.0]],
    [[0.0] * 4_000, [0.0] * 3_999 + [1.0]],
]


@pytest.mark.parametrize("reward", EXTREME)
def test_extreme_samples_give_finite_numbers_or_none(tmp_path, reward):
    """Warnings are errors: none is raised on the way to a page either."""
    write_jobs(tmp_path, right=False)
    write_limit(tmp_path, [[0] * len(reward[0])] * 2, reward, asked=2)
    limit = read_limit(tmp_path / "limit.json")
    for value in (-1e300, 5e-324, 0.5, 1e99, math.nan, math.inf):
        for kl in (0.0, 0.5, 1e300, math.nan):
            got = limit.efficiency("eval/reward", value, kl)
            assert got is None or 0 <= got < math.inf, (value, kl, got)
    drawn = Bounds(limit.reward).curve()
    assert all(np.isfinite(side).all() for side in (drawn.kl, drawn.value, drawn.low, drawn.high))
    assert "The limit" in Page(write_sweep(tmp_path)).text
    assert "replies of the reference" in Page(write_report(tmp_path / "kl.coeff=1")).text


def test_what_has_no_one_reference_is_refused(tmp_path, capsys):
    (tmp_path / "multirun.yaml").write_text("hydra: {}\n")
    for name in "ab":
        seen = {"reward/mean": 1.0, "eval/reward": 1.0}
        write_words(write_lines(tmp_path / name, seen), f"policy.model={name}")
        write_status(tmp_path / name, state="finished")
    assert main([str(tmp_path), "--limit"]) == 2
    assert "expected jobs that start from one model" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--limit", str(tmp_path / "a")])
    assert "invalid int value: '/" in capsys.readouterr().err


def test_replies_that_are_there_are_not_sampled_again(tmp_path, capsys):
    """And --svg draws the sweep, not the first of its jobs."""
    write_limit(write_jobs(tmp_path))
    picture = tmp_path / "a.svg"
    assert main([str(tmp_path), "--limit", "512", "--svg", str(picture)]) == 0
    assert picture.read_text() == sweep_svg(tmp_path)
    assert "| KL efficiency | - | 0.49 | - |" in capsys.readouterr().out
    assert main([str(tmp_path), "--svg", str(tmp_path / "none" / "a.svg")]) == 2
    assert "none" in capsys.readouterr().err


def test_a_limit_of_other_rows_judges_no_run(tmp_path):
    write_limit(write_jobs(tmp_path))
    write_status(tmp_path / "kl.coeff=1", state="finished", held_out=3)
    drawn = {row["job"]: row for row in rows_of_csv(tmp_path)}
    assert float(drawn["kl.coeff=1"]["kl/efficiency"]) == pytest.approx(0.5, abs=0.02)
    write_status(tmp_path / "kl.coeff=1", state="finished", held_out=100)
    drawn = {row["job"]: row for row in rows_of_csv(tmp_path)}
    assert drawn["kl.coeff=1"]["kl/efficiency"] == ""


def test_a_run_with_a_limit_judges_its_evaluations_and_goes_on_so(tmp_path):
    """The replies before training are the limit's; what was stopped and resumed logs the same."""
    shown = train(tmp_path / "whole", limit=16)
    assert "stopped" in train(tmp_path / "cut", Counted(64 + IN_ITERATION_2, stop), limit=16)
    train(tmp_path / "cut", resume=True, limit=16)
    whole, cut = (lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut"))
    assert "sampling the reference: 4 prompts x 16 samples\nevaluating 4 prompts" in shown
    assert f"KL efficiency {whole[-1]['kl/efficiency']:.3g}" in shown
    judged = [row["progress/iteration"] for row in whole if "kl/efficiency" in row]
    assert judged == [2, 4], whole
    assert [row.get("kl/efficiency") for row in whole] == [row.get("kl/efficiency") for row in cut]
    kept = json.loads((tmp_path / "whole" / "limit.json").read_text())
    assert kept["rows"] == [0, 1, 2, 3]
    assert {len(row) for row in kept["success"]} == {16}
    text = Page(write_report(tmp_path / "whole")).text
    assert "16 replies of the reference to each of 4 held-out prompts" in text


def test_a_task_that_drops_every_held_out_row_has_no_limit(tmp_path):
    train(tmp_path, Unjudged(), limit=4)
    assert not (tmp_path / "limit.json").exists()


def test_an_evaluation_is_judged_by_the_samples_of_its_folder(tmp_path):
    write_limit(tmp_path)
    accuracy, kl = least(3.0)
    judge, rows = Efficiency(512, tmp_path), [{}, {}, {}]

    def efficiency(value: float, spent: float) -> dict[str, float]:
        scores = {"eval/sampled_accuracy": value, "eval/kl_ref_sequence": spent}
        return judge(scores | {"eval/reward": 0.1}, len(rows))

    assert efficiency(accuracy, 2 * kl) == {"kl/efficiency": pytest.approx(0.5, abs=0.01)}
    assert efficiency(1.0, 3.0) == efficiency(accuracy, 0.0) == {}  # unknown; not moved
    assert judge({"eval/greedy_accuracy": 1.0}, len(rows)) == {}
    rows.append({})  # a resumed run with more eval.max_rows: those samples say nothing of it
    assert efficiency(accuracy, 2 * kl) == {}
    for damaged in ("{", "[]"):
        (tmp_path / "limit.json").write_text(damaged)
        assert Efficiency(4, tmp_path)({"eval/reward": 1.0}, 3) == {}


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("kl.measure=false", "kl.measure"),
        ("kl.reference=gpt2", "kl.reference"),
        ("kl.refresh_every=2", "kl.refresh_every"),
        ("eval.temperature=0.5", "eval.temperature"),
        ("eval.num_samples=0", "eval.num_samples"),
        ("eval.limit=1", "eval.limit=1"),
    ],
)
def test_a_limit_that_would_not_be_that_of_the_run_is_refused(word, key):
    coeff = ["kl.coeff=0"] if word == "kl.measure=false" else []
    assert key in refusal("experiment=grpo_tiny", "eval.limit=64", word, *coeff)
