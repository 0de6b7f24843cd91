"""The page of a run that goes on: written in place, seldom enough, and right at its end."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from pages import Page, write_lines, write_status

from trainer.reports import live
from trainer.reports.live import SECONDS, SHARE, LiveReport
from trainer.runs.lock import held


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_report_follows_its_run(tmp_path, clock):
    folder = write_status(tmp_path / "run", state="running")
    report, page = LiveReport(folder), folder / "report.html"
    with held(folder):
        report.begin()
        assert Page(page).goes_on
        write_lines(folder, {"reward/mean": 0.5})
        report.evaluating("4 prompts", 0.5, last=False)
        assert "Reward" not in Page(page).charts(), "not yet due"
        report.log({}, 1)
        assert "Reward" in Page(page).charts(), "the first curves at once"
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
    assert begun == [100 + i * (2.0 + 2.0 / SHARE) for i in range(len(begun))]
    assert len(begun) >= 5


def test_a_page_that_cannot_be_written_is_told_once_and_ends_nothing(tmp_path, caplog):
    (write_status(tmp_path, state="running") / "report.html").mkdir()
    report = LiveReport(tmp_path)
    report.begin()
    report.end("finished", saved=None)
    assert len(caplog.records) == 1
