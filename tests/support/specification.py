"""Try every statement of the specification and print the table: tests/support/specification.py.

A statement of a page is a test of tests/specification that is marked with it. Words given are parts
of ids or statements: only their rows are shown. The exit status is 1 if a row fails.
"""

import ast
import importlib.util
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the root and tests/ in place of this folder
    sys.path[:1] = map(str, Path(__file__).parents[2:0:-1])

import pytest
import torch

ROOT = Path(__file__).parents[2]
# The documents that tell users what differs.
TORCHRL, SCALING = "docs/coming_from_torchrl.md", "docs/scaling.md"
TRACKING = "docs/tracking.md"


def page(name: str) -> Callable[..., Callable[[Callable], Callable]]:
    """Return the decorator of a page: it marks a test with the statement that the test tries.

    `part` or `no`: how far the page's statement holds, as the document that tells users.
    """

    def statement(text: str, *, part: str = "", no: str = "") -> Callable[[Callable], Callable]:
        works = ("part" if part else "no" if no else "yes", part or no)

        def mark(test: Callable) -> Callable:
            # Deprecated classes and torch's prototypes warn.
            quiet = pytest.mark.filterwarnings("ignore")(test)
            return pytest.mark.statement(name, text, *works)(quiet)

        return mark

    return statement


def needs(package: str) -> Callable[[Callable], Callable]:
    """Mark a test that an optional package is for, and skip it where the package is not."""
    mark = getattr(pytest.mark, package)
    missing, reason = importlib.util.find_spec(package) is None, f"needs {package}"
    return lambda test: mark(pytest.mark.skipif(missing, reason=reason)(test))


RAY, VLLM = needs("ray"), needs("vllm")


@dataclass(frozen=True)
class Row:
    """A row of the table; `works` is yes, part or no, `document` says how the page differs."""

    id: str
    page: str
    statement: str
    works: str
    document: str
    where: str

    def outcome(self, report: pytest.TestReport) -> tuple[str, str]:
        """Return how far the statement works, or FAILS, and the evidence."""
        if report.failed:
            return "FAILS", f"{self.where}: {report.longrepr.reprcrash.message}"
        if report.skipped:
            reason = report.longrepr[2].removeprefix("Skipped: ")
            return "part" if self.works == "yes" else self.works, f"not run: {reason}"
        return self.works, f"{self.where} ({self.document})" if self.document else self.where


class Table:
    """A plugin of pytest that prints a row for each test that has a statement, and their sums."""

    def __init__(self, words: list[str]) -> None:
        self.words, self.rows, self.sums = words, {}, Counter()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        numbers, chosen = Counter(), []
        for item in items:
            name, *statement = item.get_closest_marker("statement").args
            numbers[name] += 1
            where = item.nodeid.split("/")[-1]
            row = Row(f"{name}.{numbers[name]:02d}", name, *statement, where=where)
            if not self.words or any(word in f"{row.id} {row.statement}" for word in self.words):
                self.rows[item.nodeid] = row
                chosen.append(item)
        items[:] = chosen
        print("| row | page | name | works | evidence |\n|---|---|---|---|---|")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            print(report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        row = self.rows[report.nodeid]
        works, evidence = row.outcome(report)
        self.sums[works] += 1
        cells = (row.id, row.page, row.statement, works, " ".join(evidence.split())[:300])
        print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |", flush=True)


def main(words: list[str]) -> int:
    """Print the table of the rows that the words name, and its sums."""
    table, folder = Table(words), str(ROOT / "tests" / "specification")
    # With this expression conftest.py hides no GPU.
    options = ["-o", "addopts=", "-p", "no:terminal", "-m", "gpu or not gpu"]
    status = pytest.main([*options, f"--rootdir={ROOT}", folder], plugins=[table])
    counts = ", ".join(f"{table.sums[name]} {name}" for name in ("yes", "part", "no", "FAILS"))
    print(f"\n{table.sums.total()} rows: {counts}")
    return int(status)


def defaults(what: Any, text: str, **more: Any) -> None:
    """Check that the arguments of a signature, and more, are there in this order by default."""
    call: Any = ast.parse(f"f({text})", mode="eval").body
    wanted = {name.id: inspect.Parameter.empty for name in call.args}
    wanted |= {part.arg: ast.literal_eval(part.value) for part in call.keywords} | more
    has = inspect.signature(what).parameters
    assert [(n, has[n].default) for n in has if n in wanted] == list(wanted.items())


def warned(call: Callable[[], Any], word: str) -> Any:
    """Return what a call gives; check that it warns with a word."""
    with pytest.warns(match=word):
        return call()


def raises(kind: Any, *words: str) -> Any:
    """Check that an error of a kind, or one of several, comes with words in it."""
    return pytest.raises(kind, match="(?s)" + "".join(f"(?=.*{re.escape(w)})" for w in words))


def refused(kind: Any, words: str | tuple[str, ...], call: Any, *args: Any, **kwargs: Any) -> None:
    """Check that a call raises an error of a kind with words in it."""
    with raises(kind, *([words] if isinstance(words, str) else words)):
        call(*args, **kwargs)


def close(a: Any, b: Any, atol: float = 1e-5) -> None:
    """Check that two tensors or lists of them hold the same numbers."""
    if isinstance(a, list):
        for x, y in zip(a, b, strict=True):
            close(x, y, atol)
    else:
        a, b = (torch.as_tensor(x).detach().double() for x in (a, b))
        torch.testing.assert_close(a, b, atol=atol, rtol=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
