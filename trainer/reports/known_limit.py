"""Whether the limit of a run or sweep is known; numpy is imported only where it is."""

import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.runs.run_files import is_sweep

if TYPE_CHECKING:
    from trainer.limit import Limit

FILE = "limit.json"  # as in trainer/limit.py, which needs numpy


def known_limit(folder: Path) -> "Limit | None":
    """Return the limit of a run or sweep: its own, or that of the sweep around it."""
    around = [parent for parent in folder.resolve().parents[:3] if is_sweep(parent)]
    found = [place / FILE for place in (folder, *around) if (place / FILE).is_file()]
    if not found:
        return None
    for path in found:
        if (limit := _read(path, path.stat().st_mtime_ns)) is not None:
            return limit
        print(
            f"{path} is damaged, so it is not drawn; remove it, or ask again: --limit",
            file=sys.stderr,
        )
    return None


@lru_cache(maxsize=2)  # the jobs of a sweep share one
def _read(path: Path, _stamp: int) -> "Limit | None":
    from trainer.limit import read_limit

    return read_limit(path)
