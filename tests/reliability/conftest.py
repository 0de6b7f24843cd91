"""The table of what was tried and what held: docs/reliability.md is the record of a real run.

LEASH_TABLE=docs/reliability.md make test-reliability writes it; a group is a test function, its
cases are its parameters.
"""

import os
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAD = """# What was tried

Real runs with a fault put in. Written by `LEASH_TABLE=docs/reliability.md make test-reliability`,
never by hand; a row is a test of `tests/reliability/`, its cases are what it is tried with.

{when}

| group | tried | held | what |
|---|---|---|---|
"""
tried: dict[str, list[bool]] = {}
told: dict[str, str] = {}
began = time.time()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.failed:  # what was skipped has not been tried
        path, _, name = report.nodeid.partition("::")
        if Path(path).parent.name == "reliability" and not report.skipped:
            group = f"{Path(path).stem.removeprefix('test_')}: {name.partition('[')[0]}"
            tried.setdefault(group, []).append(report.passed)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = getattr(item, "originalname", item.name).removeprefix("test_").replace("_", " ")
        told[item.nodeid.partition("::")[2].partition("[")[0]] = name


def pytest_sessionfinish() -> None:
    if not (path := os.environ.get("LEASH_TABLE")):
        return
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    day, took = datetime.now(UTC).strftime("%Y-%m-%d"), (time.time() - began) / 60
    cases = [held for group in tried.values() for held in group]
    when = f"{sum(cases)} of {len(cases)} cases held on {day}, at commit {commit}, "
    when += f"in {took:.0f} minutes on {os.cpu_count()} cores."
    rows = []
    for group, held in sorted(tried.items()):
        file, _, name = group.partition(": ")
        rows.append(f"| {file} | {len(held)} | {sum(held)} | {told[name]} |\n")
    Path(path).write_text(HEAD.format(when=when) + "".join(rows))
