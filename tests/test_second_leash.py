"""The KL to the sampler on the pages: its panels with the bounds of the run, and as an axis."""

import json

import pytest
from pages import Page, write_lines, write_status, write_words

from trainer.reports.report import write_report
from trainer.reports.sweep_page import write_sweep


@pytest.mark.parametrize(
    ("title", "metric", "key"),
    [
        ("KL to the sampler", "kl/behaviour", "algorithm.target_kl"),
        ("KL to the reference", "kl/ref_sequence", "kl.target"),
    ],
)
def test_a_panel_has_the_bound_of_the_run_as_a_line(tmp_path, title, metric, key):
    group, name = key.split(".")
    write_lines(tmp_path, *({metric: x, "kl/mismatch": 1e-7} for x in (0.01, 0.02, 0.03)))
    (tmp_path / "config.yaml").write_text(json.dumps({group: {name: 0.25}}))
    drawn = Page(write_report(tmp_path)).charts()[title]
    (bar,) = drawn.paths("bars")
    assert [drawn.value(y) for _, y in bar] == pytest.approx([0.25, 0.25], abs=2e-3)
    ((*_, (_, last)),) = drawn.paths("line")
    assert drawn.value(last) == pytest.approx(0.03, abs=2e-3), "the curve is where it was"


def test_a_sweep_is_drawn_against_the_kl_to_the_sampler_too(tmp_path):
    (tmp_path / "multirun.yaml").write_text("hydra: {}\n")
    for i, drift in enumerate((0.01, 0.04, -0.001)):
        at, right = tmp_path / f"algorithm.tv_bound={i}", {"eval/sampled_accuracy": 0.6 + 0.1 * i}
        row = {"reward/raw_mean": 0.5, "kl/ref_sequence": 2.0, "kl/behaviour": drift}
        write_lines(at, {"eval/sampled_accuracy": 0.1}, row, row | right, begin=0)
        write_status(at, state="finished", objective=0.6 + 0.1 * i)
        write_words(at, "experiment=dppo_tiny", f"algorithm.tv_bound={i}")
    dots = Page(write_sweep(tmp_path)).charts()["Accuracy against KL to the sampler"].dots
    first, second, begin = (float(dot.attrib["cx"]) for dot in dots)  # below 0 is noise about it
    assert second - begin == pytest.approx(2 * (first - begin), abs=0.3), "square roots"
