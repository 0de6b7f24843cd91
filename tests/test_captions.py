"""What the captions and the tiles of a report say is held to what the run did."""

import json
import re
from pathlib import Path

import pytest
from pages import Page, write_lines, write_status

from trainer.reports.diagnosis import WORDS, Diagnosis
from trainer.reports.panels import MAIN, MORE, unhealthy
from trainer.reports.report import write_report
from trainer.runs.run_files import load_run

HERE = Path(__file__).parent
KL = "<b>k1 1.53, above 1</b>; healthy: from 0 to between 0.01 and 1"
PANELS = {panel.title: panel for panel in (*MAIN, *MORE)}


def write_recorded(folder: Path, name: str, **status) -> Path:
    """Write the run that a file of this folder holds, with what its diagnosis says."""
    columns = json.loads((HERE / name).read_text())
    begin = int("eval/reward" not in columns)
    count = len(columns["loss/policy"])
    rows = [{name: values[i] for name, values in columns.items()} for i in range(count)]
    rows = [{name: value for name, value in row.items() if value is not None} for row in rows]
    found = Diagnosis({**row, "progress/iteration": i} for i, row in enumerate(rows, begin))
    notes = [vars(finding) for finding in found.findings]
    write_lines(folder, *rows, begin=begin)
    return write_status(folder, state="finished", notes=notes, **status)


def captions(folder: Path) -> list[str]:
    found = re.findall(r"<figcaption( class=.*?)? title.*?>(.*?)</figcaption>", Page(
        write_report(folder)).source)  # fmt: skip
    return [text for look, text in found if look]


def test_a_healthy_run_has_neither_a_red_caption_nor_a_red_tile(tmp_path):
    write_recorded(tmp_path, "healthy_run.json")
    assert captions(tmp_path) == []
    assert "tile bad" not in Page(write_report(tmp_path)).attributes("class")


def test_a_hacked_run_has_a_red_tile_and_captions_that_say_so(tmp_path):
    write_recorded(tmp_path, "hacked_run.json")
    page = Page(write_report(tmp_path))
    assert page.attributes("class").count("tile bad") == 1
    assert page.in_order("Reward hacking", "since iteration 30: see above")
    assert captions(tmp_path) == [
        "<b>Reward hacking (iteration 30)</b>; healthy: rises, then levels off",
        "<b>Reward hacking (iteration 30)</b>; healthy: sampled rises, greedy does not fall by "
        "more than 0.05",
        KL,
    ]
    write_status(tmp_path, state="finished")  # as of a run before that rule
    assert captions(tmp_path) == [
        "<b>sampled fell: 0.183 at first, 0.0187 now</b>; healthy: sampled rises, greedy does not "
        "fall by more than 0.05",
        KL,
    ]


def test_what_was_taken_back_is_no_alarm(tmp_path):
    write_recorded(tmp_path, "hacked_run.json")
    notes = load_run(tmp_path).status["notes"]
    write_status(tmp_path, notes=[{**note, "until": 40} for note in notes])
    assert "tile bad" not in Page(write_report(tmp_path)).attributes("class")
    assert not any("Reward hacking" in text for text in captions(tmp_path))


LIMITS = [(p.title, metric, low, high) for p in PANELS.values()
          for metric, (low, high) in p.limits.items()]  # fmt: skip


@pytest.mark.parametrize(("title", "metric", "low", "high"), LIMITS)
def test_a_caption_knows_its_own_limits(tmp_path, title, metric, low, high):
    bound, way = (low, -1) if high is None else (high, 1)
    assert f"{bound:g}" in re.findall(r"[\d.]+\d|\d", PANELS[title].healthy)
    for inside, name in ((True, "well"), (False, "sick")):
        value = bound - way * 0.001 if inside else bound + way * 0.001
        run = load_run(write_lines(tmp_path / name, *[{metric: value}] * 4))
        found = unhealthy(PANELS[title], run)
        assert (found is None) == inside
    assert found is not None
    assert (found.level, found.why.split(", ")[1]) == (
        "warn",
        f"{'above' if way > 0 else 'below'} {bound:g}",
    )


def test_every_rule_that_warns_stands_below_a_chart():
    named = {rule for panel in PANELS.values() for rule in panel.rules}
    assert named == {rule for rule, words in WORDS.items() if words["level"] != "info"}
