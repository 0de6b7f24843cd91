"""Pages of what goes on: drawn beside it, in a bounded share of a core, and right at its end."""

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from pages import Page, write_lines, write_status

from trainer.reports import live, report
from trainer.reports.live import SHARE, LivePage, LiveReport
from trainer.reports.replies import sections
from trainer.reports.report import write_report
from trainer.runs.lock import held


def until(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def children() -> list[psutil.Process]:
    """List the pages that this process has started and that go on."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, too
            found += [process] if "trainer.reports" in process.cmdline() else []
    return found


def test_a_report_follows_its_run_from_one_process_beside_it(tmp_path, monkeypatch):
    for name in ("trainer", "policies"):  # of someone else, found first by a plain python -m
        (tmp_path / "other" / name).mkdir(parents=True)
        (tmp_path / "other" / name / "__init__.py").write_text("raise SystemExit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"))
    monkeypatch.chdir(tmp_path / "other")
    folder = write_status(tmp_path / "run", state="running")
    report, page = LiveReport(Path("../run")), folder / "report.html"
    with held(folder):
        report.begin()
        for _ in range(99):
            report.evaluating("4 prompts", 0.5, last=False)
        (drawing,) = children()
        assert drawing.nice() > psutil.Process().nice()
        assert os.getsid(drawing.pid) == drawing.pid, "Ctrl-C at the terminal is not for it"
        until(page.exists)
        assert Page(page).goes_on
        write_lines(folder, {"reward/mean": 0.5})
        report.log({}, 1)
        until(lambda: report.evaluating("", 0.5, last=False) or "Reward" in Page(page).charts())
    write_status(folder, state="finished")
    report.end("finished", saved=None)
    assert "finished" in Page(page).texts
    assert not Page(page).goes_on
    assert children() == []


def test_pages_cost_a_fiftieth_of_a_core(tmp_path, monkeypatch):
    clock, begun = [0.0], []
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    page = LivePage(write_status(tmp_path, state="finished"))

    def spent() -> float:
        return os.times().children_user + os.times().children_system

    before = spent()
    for _ in range(80):
        page.refresh()
        if children():
            begun.append((clock[0], spent() - before))
            until(lambda: not children())
        clock[0] += 1.0
    assert len(begun) >= 2
    for now, cost in begun[1:]:
        assert cost <= SHARE * now + 0.02, "two ticks of the kernel's clock"
    page.finish()  # the last one may have begun just now


@pytest.mark.parametrize("fault", ["no run", "a folder in its place", "it hangs"])
def test_a_page_that_cannot_be_drawn_is_told_once_and_ends_nothing(
    tmp_path, monkeypatch, caplog, fault
):
    folder = tmp_path / "run"
    if fault != "no run":
        write_status(folder, state="running")
    if fault == "a folder in its place":
        (folder / "report.html").mkdir()
    if fault == "it hangs":
        monkeypatch.setattr(live, "LAST", 0.001)  # no process draws a page in that
    report = LiveReport(folder)
    report.begin()
    report.end("finished", saved=None)
    report.evaluating("4 prompts", 0.5, last=False)
    assert children() == []
    report.end("finished", saved=None)  # tries it again
    (said,) = (record.message for record in caplog.records)
    told = {"no run": "expected a run", "it hangs": "not drawn within 0.001 s"}
    assert told.get(fault, "expected a file there, got a folder") in said


def test_a_page_that_was_begun_before_the_end_of_its_run_tells_the_end(tmp_path, monkeypatch):
    write_status(tmp_path, state="running")
    begun = []

    def ended_meanwhile(folder: Path):  # read after the status
        if not begun:
            write_status(tmp_path, state="failed", reason="why")
        begun.append(folder)
        return sections(folder)

    monkeypatch.setattr(report, "sections", ended_meanwhile)
    with held(tmp_path):
        page = Page(write_report(tmp_path))
    assert len(begun) == 2
    assert "why" in page.texts
    assert not page.goes_on
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "failed"
