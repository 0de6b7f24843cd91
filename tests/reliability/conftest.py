"""The table of what was tried and what held: docs/reliability.md is the record of a real run.

LEASH_TABLE=docs/reliability.md make test-reliability writes it, of a commit that is named there; a
row is a test function, its cases are its parameters. With ARGS=--collect-only nothing is tried: a
test without a row gets one that says so, and the rest stays as it is.
"""

import os
import re
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
HEAD = """# What was tried

Real runs with a fault put in. Written by `LEASH_TABLE=docs/reliability.md make test-reliability`,
never by hand; a row is a test of `tests/reliability/`, its cases are what it is tried with. Tried 0
times: it is younger than the run, or the machine could not (no disk of its own may be mounted).

{when}

| group | tried | held | what |
|---|---|---|---|
"""
ROW = re.compile(r"^\| (\w+) \| (\d+) \| (\d+) \| (.+) \|$", re.M)
tried: dict[tuple[str, str], list[bool]] = {}
began = time.time()


def _words(name: str) -> str:
    return name.removeprefix("test_").replace("_", " ")


def _writes(session: pytest.Session) -> bool:
    return "LEASH_TABLE" in os.environ and not hasattr(session.config, "workerinput")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Take minutes only for a table that may be kept."""
    words = ["git", "-C", str(ROOT), "status", "--porcelain", "--", ".", ":!docs/reliability.md"]
    if _writes(session) and not session.config.option.collectonly:
        changed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        if changed:
            pytest.exit(f"the table names a commit; commit first:\n{changed}", returncode=2)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.failed:  # what was skipped has not been tried
        path, _, name = report.nodeid.partition("::")
        if Path(path).parent.name == "reliability" and not report.skipped:
            key = Path(path).stem.removeprefix("test_"), _words(name.partition("[")[0])
            tried.setdefault(key, []).append(report.passed)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not _writes(session):
        return
    page, found = Path(os.environ["LEASH_TABLE"]), dict[tuple[str, str], tuple[int, int]]()
    if session.config.option.collectonly:
        found = {
            (file, what): (int(n), int(m)) for file, n, m, what in ROW.findall(page.read_text())
        }
        where = re.search(r"cases held( on .*)", page.read_text())[1]
    else:
        found = {key: (len(held), sum(held)) for key, held in tried.items()}
        words = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
        day, took = datetime.now(UTC).strftime("%Y-%m-%d"), (time.time() - began) / 60
        where = f" on {day}, at commit {commit}, in {took:.0f} minutes on {os.cpu_count()} cores."
    rows = {}
    for file in sorted(HERE.glob("test_*.py")):
        for name in sorted(re.findall(r"^def (test_\w+)\(", file.read_text(), re.M)):
            key = file.stem.removeprefix("test_"), _words(name)
            rows[key] = found.get(key, (0, 0))
    held, total = (sum(row[k] for row in rows.values()) for k in (1, 0))
    table = [f"| {file} | {n} | {m} | {what} |\n" for (file, what), (n, m) in rows.items()]
    page.write_text(HEAD.format(when=f"{held} of {total} cases held{where}") + "".join(table))
