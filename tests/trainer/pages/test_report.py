"""report.html: right values, escaped texts, a chart per metric, whatever state the folder is in."""

import json
import math
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.pages import Page, Picture, recorded, write_lines, write_run, write_status, write_words

from trainer.pages import live
from trainer.pages.__main__ import main
from trainer.pages.chart import Series, line_chart
from trainer.pages.diagnosis import Diagnosis
from trainer.pages.live import FRACTION, SECONDS, LiveReport
from trainer.pages.report import run_svg, write_report
from trainer.runs.lock import locked


def drawn(*series: Series) -> Picture:
    return Picture(line_chart(series, title="t", unit="u"))


def test_the_page_has_the_facts_of_the_run_no_secret_and_needs_no_network(tmp_path):
    page = Page(path := write_report(write_run(tmp_path / "a run")))
    assert {"demo", "failed", "<i>why</i>", "c0ffee", "1 min 15 s"} <= {*page.texts}
    assert f"python train.py resume='{path.parent.resolve()}'" in page.texts
    assert "0.0625 \u2192 0.688" in page.texts  # 1/16; 11/16 of the last three: a quarter
    assert "planted-2" not in page.source
    assert not {"link", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert page.attributes("src") == []
    assert {place[1:] for place in page.attributes("href")} <= set(page.attributes("id"))
    known = ["Reward", "KL to the reference", "Accuracy on held-out prompts"]
    assert [*page.charts()] == [*known, "Reward parts", "my/own"]
    chat = Page(write_report(write_run(tmp_path / "2", state="finished"))).text
    assert "python train.py mode=chat resume=" in chat


def test_no_text_of_the_files_is_markup(tmp_path):
    hostile = '"><script>alert(1)</script><p class="'
    notes = [{"title": hostile, "text": hostile, "iteration": hostile, "rule": "x"}]
    notes[0] |= {"level": "warn", "until": None}
    write_run(tmp_path, state=hostile)
    write_status(tmp_path, state=hostile, reason=hostile, notes=notes, model={"name": hostile})
    page = Page(write_report(tmp_path))
    assert [tag for tag, _ in page.tags].count("script") == 2  # the page's own, and its data
    assert page.texts.count(hostile) >= 4
    assert {"x </pre><script>1</script>", "<b>Q</b>", "?\x00 late"} <= {*page.texts}


def test_the_table_of_keys_has_what_the_run_used_and_no_chart_is_empty(tmp_path):
    model, plain = "experiment:sft_tiny", {"policy": {"model": "tiny"}, "env": {"strict": False}}
    theirs = {**plain, "policy": {"model": model}}
    write_lines(tmp_path, {"optim/skipped_steps": 0.0, "optim/lr": 0.0}, {"optim/lr": 1.0})
    write_words(tmp_path, "env.strict=true")
    (tmp_path / ".hydra" / "defaults.yaml").write_text(
        json.dumps({"leash": plain, "experiment": theirs})
    )
    config = {"policy": {"model": "/cache/sft_tiny-1"}, "env": {"strict": True}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    page = Page(write_report(tmp_path))
    assert page.in_order("env.strict", "false", "true", "policy.model", "tiny", model)
    assert [*page.charts()] == ["Learning rate"]
    assert "Always 0: Steps left out" in page.texts
    write_words(tmp_path, "policy.model=tiny")
    (tmp_path / "config.yaml").write_text(json.dumps({**config, **{"policy": {"model": "tiny"}}}))
    cells = Page(write_report(tmp_path)).texts
    row = cells[cells.index("policy.model") :][:4]
    assert row == ["policy.model", "tiny", model, "tiny"]


RUNS = [
    ("healthy_run.json", []),
    ("hacked_run.json", ["Reward hacking (iteration 30)"] * 2 + ["k1 1.53, above 1"]),
]


@pytest.mark.parametrize(("name", "warnings"), RUNS)
def test_captions_warn_of_what_the_run_did(tmp_path, name, warnings):
    rows = recorded(name)
    notes = [vars(found) for found in Diagnosis(rows).findings]
    known = [{k: v for k, v in row.items() if v is not None} for row in rows]
    write_lines(tmp_path, *known, begin=rows[0]["progress/iteration"])
    write_status(tmp_path, state="finished", notes=notes)
    captions = r"<figcaption class=.*?><b>(.*?)</b>"
    assert re.findall(captions, Page(write_report(tmp_path)).source) == warnings
    write_status(tmp_path, notes=[{**note, "until": 40} for note in notes])  # it was taken back
    assert "Reward hacking" not in "".join(
        re.findall(captions, Page(write_report(tmp_path)).source)
    )


def test_a_page_reloads_itself_while_its_run_goes_on_and_says_what_it_does(tmp_path):
    (tmp_path / "config.yaml").write_text("trainer: {num_iterations: 30}")
    write_lines(tmp_path, *[{"reward/mean": 0.5, "time/iteration_s": 8.0}] * 12)
    phase = {"phase": "evaluate", "phase_since": time.time() - 75, "phase_fraction": 0.4}
    write_status(tmp_path, state="running", **phase)
    with locked(tmp_path):
        page = Page(write_report(tmp_path))
        assert page.goes_on
        assert {"evaluating on held-out prompts: 40% done, for ", "1 min 15 s"} <= {*page.texts}
        assert "; 18 iterations to go, about 2 min 24 s" in page.texts, "18 times 8 seconds"
    page = Page(write_report(tmp_path))
    assert (page.goes_on, "killed" in page.texts) == (False, True)
    write_status(tmp_path, state="failed", reason="why", **phase)
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "rank1.txt").write_text("why")
    page = Page(write_report(tmp_path))
    assert not page.goes_on
    assert page.in_order("failed", "why", "errors/rank1.txt", "mean per response, with KL")


def test_the_command_writes_pages_and_pictures_of_runs_alone(tmp_path, capsys):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("defaults: [schema, {policy: smollm}]\n")
    run, picture = write_run(tmp_path / "outputs" / "run"), tmp_path / "run.svg"
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert [*tmp_path.rglob("report.html")] == [run / "report.html"]
    assert main([str(run), "--svg", str(picture)]) == 0
    assert Picture(picture.read_text()).tips == Picture(run_svg(run)).tips
    assert main([str(tmp_path / "nothing")]) == 2


def test_a_curve_goes_through_its_values_and_a_spike_is_cut_and_told():
    picture = drawn(Series("s", [(0, 0.0), (5, 5.0), (10, 10.0)]))
    (line,) = picture.paths("line")
    assert [picture.value(y) for _, y in line] == pytest.approx([0, 5, 10], abs=0.02)
    assert line[1][0] == pytest.approx((line[0][0] + line[2][0]) / 2, abs=0.11)
    values = [1.0 + 0.1 * (i % 3) for i in range(30)]
    values[18] = 400.0
    spiked = drawn(Series("k3", list(enumerate(values))))
    assert spiked.ticks[-1] < 5
    assert "k3, 18: 400" in spiked.tips


def test_a_long_run_is_drawn_small_smooth_and_with_its_last_value():
    values = [(i, math.sin(i / 50)) for i in range(20_000)]
    picture = drawn(Series("s", [*values, (20_000, 3.0)]))
    assert picture.texts(**{"class": "value"}) == ["3"]
    (raw,), (line,) = picture.paths("raw"), picture.paths("line")
    assert len(raw) < 2_000
    half = len(raw) // 20
    near = [y for _, y in raw[100 - half : 101 + half]]
    assert line[100][1] == pytest.approx(sum(near) / len(near), abs=0.11)  # 0.1 pixel


def test_the_curves_of_200_jobs_are_drawn_small_with_their_means():
    jobs = [Series(f"job {job}", [(i, float(job)) for i in range(500)], job) for job in range(200)]
    svg = line_chart(jobs, title="t", unit="u", named=False)
    assert len(svg) < 2**20 / 7, "a page of a sweep has seven charts"
    picture = Picture(svg)
    lines = picture.paths("line")
    assert len(lines) == 200
    for job, line in enumerate(lines):
        assert [picture.value(y) for _, y in line] == pytest.approx([job] * len(line), abs=0.2)


# The page of a run that goes on.


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_report_follows_its_run(tmp_path, clock):
    folder = write_status(tmp_path / "run", state="running")
    report, page = LiveReport(folder), folder / "report.html"
    with locked(folder):
        report.begin()
        assert Page(page).goes_on
        page.unlink()
        report.evaluating("4 prompts", 0.5, last=False)
        assert not page.exists(), "not yet due"
        report.log({}, 1)
        assert page.exists(), "the first curves at once"
        page.unlink()
        report.log({}, 2)
        assert not page.exists()
        clock[0] += SECONDS
        report.evaluating("4 prompts", 0.5, last=False)
        assert page.exists()
    write_status(folder, state="finished")
    report.end("finished", saved=None)
    assert "finished" in Page(page).texts
    assert not Page(page).goes_on


def test_pages_take_a_bounded_share_of_the_time(tmp_path, monkeypatch, clock):
    begun = []

    def write_slowly(folder: Path) -> None:
        begun.append(clock[0])
        clock[0] += 2.0

    monkeypatch.setattr(live, "write_report", write_slowly)
    report = LiveReport(tmp_path)
    report.begin()
    for _ in range(500):
        clock[0] += 1.0
        report.evaluating("4 prompts", 0.5, last=False)
    assert begun == [100 + i * (2.0 + 2.0 / FRACTION) for i in range(len(begun))]
    assert len(begun) >= 5


def test_a_page_that_cannot_be_written_is_told_once_and_ends_nothing(tmp_path, caplog):
    (write_status(tmp_path, state="running") / "report.html").mkdir()
    report = LiveReport(tmp_path)
    report.begin()
    report.end("finished", saved=None)
    assert len(caplog.records) == 1
