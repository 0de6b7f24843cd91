"""The KL to the sampler on the pages: its panels with the bounds of the run, and as an axis."""

import csv
import json
from pathlib import Path

import pytest
from pages import Page, write_lines, write_status, write_words

from trainer.reports.report import write_report
from trainer.reports.sweep_page import write_sweep

DRAWN = "Accuracy against KL to the sampler"


@pytest.mark.parametrize(
    ("title", "metric", "key"),
    [
        ("KL to the sampler", "kl/behaviour", "algorithm.target_kl"),
        ("Furthest token from the sampler", "policy/tv_max", "algorithm.tv_bound"),
        ("KL to the reference", "kl/ref_sequence", "kl.target"),
    ],
)
def test_a_panel_has_the_bound_of_the_run_as_a_line(tmp_path, title, metric, key):
    group, name = key.split(".")
    write_lines(tmp_path, *({metric: x, "kl/mismatch": 1e-7} for x in (0.01, 0.02, 0.03)))
    for bound, lines in ((0.25, 1), (None, 0)):
        (tmp_path / "config.yaml").write_text(json.dumps({group: {name: bound}}))
        drawn = Page(write_report(tmp_path)).charts()[title]
        assert len(drawn.paths("bars")) == lines
        if bound:
            heights = [drawn.value(y) for _, y in drawn.paths("bars")[0]]
            assert heights == pytest.approx([bound, bound], abs=2e-3)
            ((*_, (_, last)),) = drawn.paths("line")
            assert drawn.value(last) == pytest.approx(0.03, abs=2e-3), "the curve is where it was"


def write_jobs(folder: Path, *drifts: float) -> Path:
    (folder / "multirun.yaml").write_text("hydra: {}\n")
    for i, drift in enumerate(drifts):
        at, right = folder / f"algorithm.tv_bound={i}", {"eval/sampled_accuracy": 0.6 + 0.1 * i}
        row = {"reward/raw_mean": 0.5, "kl/ref_sequence": 2.0, "kl/behaviour": drift}
        write_lines(at, {"eval/sampled_accuracy": 0.1}, row, row | right, begin=0)
        write_status(at, state="finished", objective=0.6 + 0.1 * i)
        write_words(at, "experiment=dppo_tiny", f"algorithm.tv_bound={i}")
    return folder


def test_a_sweep_is_drawn_against_the_kl_to_the_sampler_too(tmp_path):
    charts = Page(write_sweep(write_jobs(tmp_path, 0.01, 0.04, -0.001))).charts()
    assert {"Accuracy against KL to the reference", "KL to the sampler"} <= charts.keys()
    xs = [float(dot.attrib["cx"]) for dot in charts[DRAWN].dots]
    begin = xs[2]  # a mean below 0 is noise about it
    assert xs[1] - begin == pytest.approx(2 * (xs[0] - begin), abs=0.3), "square roots"
    with open(tmp_path / "sweep.csv", newline="") as file:
        assert [row["kl/behaviour"] for row in csv.DictReader(file)] == ["0.01", "0.04", "-0.001"]


def test_rounding_is_no_axis(tmp_path):
    assert DRAWN not in Page(write_sweep(write_jobs(tmp_path, 1e-8, 2e-8))).charts()
