"""docs/reliability.md is the record of a run of tests that are there, all of them."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
ROWS = re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \| (.+) \|$", PAGE.read_text(), re.M)
REMEDY = "LEASH_TABLE=docs/reliability.md make test-reliability ARGS=--collect-only"


def test_each_reliability_test_has_a_row_and_each_row_is_one():
    tests = {
        (file.stem.removeprefix("test_"), node.name.removeprefix("test_").replace("_", " "))
        for file in (ROOT / "tests" / "reliability").glob("test_*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert {(row[0], row[3]) for row in ROWS} == tests, REMEDY
    assert len(ROWS) == len(tests)


def test_the_page_says_which_code_it_is_of():
    assert all(int(tried) >= int(held) >= 0 for _, tried, held, _ in ROWS)
    total, held = (sum(int(row[k]) for row in ROWS) for k in (1, 2))
    assert re.search(
        rf"^{held} of {total} cases held on \d{{4}}-\d\d-\d\d, at commit [0-9a-f]{{7,40}}, in",
        PAGE.read_text(),
        re.M,
    )
