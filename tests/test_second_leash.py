"""The KL to the sampler on the pages: its panels with the bounds of the run, and as an axis."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from pages import Page, Picture, write_lines, write_status, write_words

from trainer.reports.frontier import frontier
from trainer.reports.report import write_report
from trainer.reports.sweep_jobs import load_sweep
from trainer.reports.sweep_page import write_sweep


def charts_of(folder: Path, rows: list[dict[str, float]], config: Any) -> dict[str, Picture]:
    write_lines(folder, *rows)
    (folder / "config.yaml").write_text(json.dumps(config))
    return Page(write_report(folder)).charts()


@pytest.mark.parametrize(
    ("title", "metric", "key"),
    [
        ("KL to the sampler", "kl/behaviour", "algorithm.target_kl"),
        ("Furthest token from the sampler", "policy/tv_max", "algorithm.tv_bound"),
        ("Furthest token from the sampler, in nats", "policy/binary_kl_max", "algorithm.kl_bound"),
        ("KL to the reference", "kl/ref_sequence", "kl.target"),
    ],
)
def test_a_panel_has_the_bound_of_the_run_as_a_line(tmp_path, title, metric, key):
    group, name = key.split(".")
    rows = [{metric: value, "kl/mismatch": 1e-7} for value in (0.01, 0.02, 0.03)]
    drawn = charts_of(tmp_path / "with", rows, {group: {name: 0.25}})[title]
    (line,) = drawn.paths("bars")
    assert [drawn.value(y) for _, y in line] == pytest.approx([0.25, 0.25], abs=2e-3)
    assert line[0][0] < line[1][0]
    assert f"{key} 0.25" in drawn.texts()
    ((_, *_, (_, last)),) = drawn.paths("line")
    assert drawn.value(last) == pytest.approx(0.03, abs=2e-3), "the curve is where it was"
    for number, config in enumerate(({group: {name: None}}, {group: {name: "far"}}, {}, [])):
        drawn = charts_of(tmp_path / str(number), rows, config)[title]
        assert drawn.paths("bars") == []


def write_job(folder: Path, bound: float, *, accuracy: float, drift: float) -> None:
    row = {"reward/raw_mean": 0.5, "kl/ref_sequence": 2.0, "kl/behaviour": drift}
    first = {"eval/sampled_accuracy": 0.1}
    write_lines(folder, first, row, row | {"eval/sampled_accuracy": accuracy}, begin=0)
    write_status(folder, state="finished", objective=accuracy)
    write_words(folder, "experiment=dppo_tiny", f"algorithm.tv_bound={bound}")


def write_jobs(folder: Path, *drifts: float) -> Path:
    (folder / "multirun.yaml").write_text("hydra: {}\n")
    for i, drift in enumerate(drifts):
        at = folder / f"algorithm.tv_bound={i}"
        write_job(at, float(i), accuracy=0.6 + 0.1 * i, drift=drift)
    return folder


def test_a_sweep_is_drawn_against_the_kl_to_the_sampler_too(tmp_path):
    page = Page(write_sweep(write_jobs(tmp_path, 0.01, 0.04, -0.001)))
    charts = page.charts()
    assert "Accuracy against KL to the sampler" in charts
    drawn = charts["Accuracy against KL to the sampler"]
    xs = [float(dot.attrib["cx"]) for dot in drawn.dots]
    begin = xs[2]  # a mean below 0 is noise about it
    assert xs[1] - begin == pytest.approx(2 * (xs[0] - begin), abs=0.3), "square roots"
    assert "KL, nats per token (square-root scale)" in drawn.texts()
    assert not any("before training" in tip for tip in drawn.tips), "it has sampled nothing yet"
    assert "Accuracy against KL to the reference" in charts
    assert "KL to the sampler" in charts, "the curves of the jobs"
    with open(tmp_path / "sweep.csv", newline="") as file:
        assert [row["kl/behaviour"] for row in csv.DictReader(file)] == ["0.01", "0.04", "-0.001"]


def test_rounding_is_no_axis(tmp_path):
    jobs = load_sweep(write_jobs(tmp_path, 1e-8, 2e-8)).jobs
    page = Page(write_sweep(tmp_path))
    assert "Accuracy against KL to the sampler" not in page.charts()
    assert frontier(jobs, width=420, height=320, sampler=True), "where it is asked for"


def test_rounding_is_drawn_as_nothing_over_each_other_too(tmp_path):
    """One step on fresh replies: kl/behaviour is +-5e-8, in a report and in a sweep."""
    (tmp_path / "multirun.yaml").write_text("hydra: {}\n")
    for i, size in enumerate((5e-8, -5e-8)):
        rows = [{"reward/raw_mean": 0.5, "kl/behaviour": size * (-1) ** n} for n in range(6)]
        write_lines(tmp_path / f"kl.coeff={i}", *rows)
        write_status(tmp_path / f"kl.coeff={i}", state="finished")
        write_words(tmp_path / f"kl.coeff={i}", f"kl.coeff={i}")
    drawn = Page(write_sweep(tmp_path)).charts()["KL to the sampler"]
    lines = drawn.paths("line")
    assert len(lines) == 2
    assert all(abs(drawn.value(y)) < 1e-6 for line in lines for _, y in line)
    assert len({y for line in lines for _, y in line}) == 1, "flat"
