"""docs/reliability.md is the record of a run of tests that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
ROWS = re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \| (.+) \|$", PAGE.read_text(), re.M)


@pytest.mark.parametrize(("file", "tried", "held", "what"), ROWS, ids=[row[3] for row in ROWS])
def test_each_group_of_the_page_is_a_test(file, tried, held, what):
    source = (ROOT / "tests" / "reliability" / f"test_{file}.py").read_text()
    assert f"def test_{what.replace(' ', '_')}(" in source
    assert 0 < int(tried) >= int(held)


def test_the_page_says_which_code_it_is_of():
    total, held = (sum(int(row[k]) for row in ROWS) for k in (1, 2))
    assert re.search(
        rf"^{held} of {total} cases held on \d{{4}}-\d\d-\d\d, at commit \w+",
        PAGE.read_text(),
        re.M,
    )
