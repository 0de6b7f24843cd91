"""The curves of a run in the cell of a notebook that trains it, drawn anew as it goes on."""

import time
from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.observer import Observer
from trainer.reports.report import run_svg

SECONDS = 1.0  # the least time from picture to picture


class CellCurves(Observer):
    """Show reward (or loss) and KL of a run folder below the cell that runs.

    A picture that cannot be drawn is left out: the next one may be.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cell: Any = None
        self._due = 0.0  # of time.monotonic()

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        if iteration and time.monotonic() >= self._due:
            self._draw()
            self._due = time.monotonic() + SECONDS

    def end(self, state: str, *, saved: int | None) -> None:
        self._draw()

    def _draw(self) -> None:
        from IPython.display import HTML, display

        with suppress(ValueError, OSError):
            # an image: its style sheet is not the page's
            data = b64encode(run_svg(self.folder).encode()).decode()
            picture = HTML(f'<img alt="reward and KL" src="data:image/svg+xml;base64,{data}">')
            if self._cell is None:
                self._cell = display(picture, display_id=True)
            else:
                self._cell.update(picture)
