"""Whether the limit of a run or sweep is known; numpy is imported only where it is."""

import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.runs.run_files import is_sweep, read_yaml

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
        limit = _read(path, path.stat().st_mtime_ns)
        if limit is not None and is_of(limit, folder):
            return limit
        fault = "damaged" if limit is None else "of other held-out rows"
        print(
            f"{path} is {fault}, so it is not drawn; remove it, or ask again: --limit",
            file=sys.stderr,
        )
    return None


def is_of(limit: "Limit", folder: Path) -> bool:
    """Return whether it is of as many rows as a run evaluates; a sweep says nothing of its own."""
    rows = read_yaml(folder / "status.json").get("held_out")
    return None in (rows, limit.asked) or rows == limit.asked


@lru_cache(maxsize=2)  # the jobs of a sweep share one
def _read(path: Path, _stamp: int) -> "Limit | None":
    from trainer.limit import read_limit

    return read_limit(path)
