"""Every row of the specification is as it is declared, and every difference is documented.

pytest tests/specification -k RetrieveKL    # the rows whose statement names it
"""

import pytest
from specification_rows import ROWS
from specification_rows.differs import DIFFERS
from specification_rows.row import NEEDS, is_documented

MARKS = {name: getattr(pytest.mark, name) for name in NEEDS}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=f"{row.id} {row.name}", marks=MARKS[row.needs] if row.needs else ())
        for row in ROWS
    ],
)
def test_a_row_is_as_it_is_declared(row):
    if row.lacks:
        pytest.skip(row.lacks)
    row.run()


@pytest.mark.parametrize("name", DIFFERS)
def test_what_differs_is_documented(name):
    assert DIFFERS[name].works in ("part", "no")
    assert is_documented(DIFFERS[name].document, DIFFERS[name].words)


def test_every_row_stands_once():
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert set(DIFFERS) <= set(names)
