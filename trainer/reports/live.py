"""Pages of what goes on, written again and again. Light: what draws them is imported when they are.

Such a page must never end what it shows: when it cannot be written, it says so once and is left.
"""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from trainer.observer import Observer

log = logging.getLogger(__name__)
SECONDS, SHARE = 5.0, 0.02  # the least time from page to page; what pages may take of all the time


class LivePage:
    """Call `write` every SECONDS, and in at most a SHARE of the time."""

    def __init__(self, write: Callable[[], object]) -> None:
        self._write = write
        self._due = 0.0  # of time.monotonic()

    def refresh(self, *, now: bool = False) -> bool:
        """Write the page if it is time to, or `now`; return whether it was written."""
        start = time.monotonic()
        if start < self._due and not (now and self._due < float("inf")):
            return False
        try:
            self._write()
        except Exception as error:
            log.warning("no more live report: %s: %s", type(error).__name__, error)
            self._due = float("inf")
            return False
        end = time.monotonic()
        self._due = end + max(SECONDS, (end - start) / SHARE)
        return True


class LiveReport(Observer):
    """Keep report.html of a run folder up to date."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._page = LivePage(self._write)

    def _write(self) -> None:
        from trainer.reports.report import write_report

        write_report(self.folder)

    def begin(self) -> None:
        self._page.refresh()

    def evaluating(self, what: str, share: float, *, last: bool) -> None:
        self._page.refresh()  # a page that stands still says that the run is dead

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        self._page.refresh(now=iteration <= 1)  # the first curves at once

    def end(self, state: str, *, saved: int | None) -> None:
        LivePage(self._write).refresh()  # also where it could not be written before
