"""Update report.html during a run, and show its curves in the notebook cell that trains it.

Rank 0 rewrites the page, using at most `FRACTION` of the time. A page that cannot be written causes
one warning and never ends the run.
"""

import logging
import time
from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.observer import Observer
from trainer.pages.page import PATIENCE
from trainer.pages.report import run_svg, write_report

log = logging.getLogger(__name__)
SECONDS, FRACTION = 30.0, 0.02  # shortest time between pages; largest share of it for writing
CELL_SECONDS = 1.0  # shortest time between pictures in a notebook


class LiveReport(Observer):
    """Keep report.html of a run folder up to date."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._due = 0.0  # next time to write, time.monotonic()
        self._warned = False

    def begin(self) -> None:
        self._write()

    def evaluating(self, label: str, fraction: float, *, last: bool) -> None:
        self._refresh()  # an old page looks like a dead run

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        self._refresh(now=iteration <= 1)  # the first curves appear immediately

    def end(self, state: str, *, saved: int | None) -> None:
        self._write()

    def _refresh(self, *, now: bool = False) -> None:
        if now or time.monotonic() >= self._due:
            self._write()

    def _write(self) -> None:
        begin = time.monotonic()
        try:
            write_report(self.folder)
        except Exception as error:  # a full disk or damaged files must not end the run
            if not self._warned:
                log.warning("no live report: %s: %s", type(error).__name__, error)
            self._warned = True
        end = time.monotonic()
        self._due = end + min(max(SECONDS, (end - begin) / FRACTION), PATIENCE / 2)


class CellCurves(Observer):
    """Show reward (or loss) and KL of a run folder below the running cell.

    A picture that cannot be drawn is skipped.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cell: Any = None
        self._due = 0.0  # next time to write, time.monotonic()

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        if iteration and time.monotonic() >= self._due:
            self._draw()
            self._due = time.monotonic() + CELL_SECONDS

    def end(self, state: str, *, saved: int | None) -> None:
        self._draw()

    def _draw(self) -> None:
        from IPython.display import HTML, display  # a notebook has it

        with suppress(ValueError, OSError):
            # As an image, because its style sheet would change the notebook.
            data = b64encode(run_svg(self.folder).encode()).decode()
            picture = HTML(f'<img alt="reward and KL" src="data:image/svg+xml;base64,{data}">')
            if self._cell is None:
                self._cell = display(picture, display_id=True)
            else:
                self._cell.update(picture)
