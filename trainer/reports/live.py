"""The page of a run or a sweep that goes on, drawn by processes of its own.

It never ends or holds up what it shows: a page that cannot be drawn is told once, and only the last
one is waited for.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from trainer.observer import Observer

log = logging.getLogger(__name__)
SECONDS, SHARE = 5.0, 0.02  # the least time from page to page; what they may take of one core
LAST, NICER = 20.0, 10  # seconds that the last page may take; how much less urgent than the run
ROOT = Path(__file__).parents[2]  # the folder of the package


class LivePage:
    """Draw the page of a folder again and again, one `python -m trainer.reports` at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.wanted = False  # whether the next page need not wait until it is time to
        self._process: subprocess.Popen[str] | None = None
        self._due = 0.0  # of time.monotonic()
        self._failed = False

    def refresh(self) -> None:
        """Start a page if it is time to and none is being drawn; wait for nothing."""
        if not self._ended():
            return
        if time.monotonic() >= self._due or (self.wanted and not self._failed):
            self._start()

    def finish(self) -> None:
        """Draw the page once more and wait for it; one that takes too long is given up."""
        limit = time.monotonic() + LAST
        if self._ended(LAST):
            self._start()
        if not self._ended(limit - time.monotonic()):
            self._fail(f"not drawn within {LAST:g} s")

    def _start(self) -> None:
        self.wanted = False
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trainer.reports", str(self.folder)],
                cwd=ROOT,  # it is searched for modules first
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C is for the run alone
            )
        except OSError as error:
            return self._fail(str(error))
        with suppress(OSError):
            nice = os.getpriority(os.PRIO_PROCESS, 0) + NICER
            os.setpriority(os.PRIO_PROCESS, self._process.pid, nice)

    def _ended(self, seconds: float = 0.0) -> bool:
        """Wait at most so long; return whether no page is being drawn."""
        process, before = self._process, os.times()
        if process is None:
            return True
        try:
            code = process.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            return False
        took = sum(b - a for a, b in zip(before[2:4], os.times()[2:4], strict=True))  # of children
        self._due = time.monotonic() + max(SECONDS, took / SHARE)
        self._process, (_, errors) = None, process.communicate()
        if code:
            self._fail(errors.strip().rpartition("\n")[2] or f"exit code {code}")
        return True

    def _fail(self, why: str) -> None:
        """Say once that there are no more pages."""
        if not self._failed:
            log.warning("no more live report: %s", why)
        self._failed, self._due = True, float("inf")
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


class LiveReport(Observer):
    """Keep report.html of a run folder up to date."""

    def __init__(self, folder: Path) -> None:
        self._page = LivePage(folder)

    def begin(self) -> None:
        self._page.refresh()

    def evaluating(self, what: str, share: float, *, last: bool) -> None:
        self._page.refresh()  # a page that stands still says that the run is dead

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        self._page.wanted |= iteration <= 1  # the first curves at once
        self._page.refresh()

    def end(self, state: str, *, saved: int | None) -> None:
        self._page.finish()
