"""Try every row of the specification and print the table: `python tests/support/specification.py`.

Words given are parts of ids or names: only their rows are shown. The exit status is 1 if a row is
not as it is declared.
"""

import sys
import traceback
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/specification")]

from specification_rows import ROWS  # noqa: E402
from specification_rows.differs import DIFFERS  # noqa: E402
from specification_rows.row import Row, is_documented  # noqa: E402


def tried(row: Row) -> tuple[str, str]:
    """Return whether a row works, yes, part, no or FAILS, and the evidence."""
    differs = DIFFERS.get(row.name)
    if row.lacks:
        return "part" if differs is None else differs.works, f"not run: {row.lacks}"
    try:
        row.run()
    except (Exception, pytest.fail.Exception) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return "FAILS", f"{row.where}: {type(error).__name__}: {str(error) or place.line}"
    if differs is None:
        return "yes", row.where
    if not is_documented(differs.document, differs.words):
        return "FAILS", f"{differs.document} does not say {differs.words!r}"
    return differs.works, f"{differs.words} ({differs.document})"


def main(words: list[str]) -> int:
    """Print the table of the rows that the words name, and its sums."""
    sums: Counter[str] = Counter()
    print("| row | page | name | works | evidence |\n|---|---|---|---|---|")
    for row in ROWS:
        if words and not any(word in f"{row.id} {row.name}" for word in words):
            continue
        works, evidence = tried(row)
        sums[works] += 1
        cells = (row.id, row.page, row.name, works, " ".join(evidence.split())[:300])
        print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |", flush=True)
    counts = ", ".join(f"{sums[name]} {name}" for name in ("yes", "part", "no", "FAILS"))
    print(f"\n{sums.total()} rows: {counts}")
    return int(sums["FAILS"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
