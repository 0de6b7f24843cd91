"""A sweep while it goes on: its page at its start, with every job and in between.

Light, for the process that starts the jobs: the page and what draws it are in sweep_page.py, which
is imported when a page is written. How a sweep is continued: conf/sweep.py.
"""

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from policies.cache import write_text
from trainer.reports.live import LivePage
from trainer.runs.failures import complain, say
from trainer.runs.job_names import job_line, job_names
from trainer.runs.lock import lock_folder

PLAN = "sweep.json"  # its words, the folders of its jobs, and whether the sweep has ended
PLACE = "hydra.sweep.dir="


class LiveSweep:
    """Follow a sweep in its folder.

    `jobs`: the overrides of each; `names`: their folders, without them those of `job_names`;
    `words`: the command line. It holds the folder, so that whoever writes the page meanwhile knows
    whether the sweep lives. ValueError if another sweep holds it.
    """

    def __init__(
        self,
        folder: Path,
        jobs: Sequence[Sequence[str]],
        *,
        names: Sequence[str] = (),
        words: Sequence[str] = (),
    ) -> None:
        from trainer.reports.summary import without_secret

        self.folder, self.jobs = Path(os.path.abspath(folder)), jobs
        self._words = [without_secret(word) for word in words if not word.startswith(PLACE)]
        self._names = list(names or job_names(jobs))
        self._lock = lock_folder(self.folder)
        self._page = LivePage(self._write)
        self._writing, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._begun = 0

    def begin(self, number: int, note: str | None = None) -> None:
        """Say that a job begins, or in a `note` why not; the first time, where the page is."""
        if not self._begun:
            self._plan(ended=False)
        with self._writing:
            self._page.refresh(now=True)
        if not self._begun:
            self._tell()
            self._thread.start()
        self._begun += 1
        say(": ".join(filter(None, [job_line(number, self.jobs), note])))

    def end(self) -> None:
        """Write the page for good, and say what came out and where the page is."""
        from trainer.reports.sweep_jobs import load_sweep, results

        self._over.set()
        if self._begun:
            self._thread.join()
        try:
            self._plan(ended=True)
            os.close(self._lock)
            self._write()
            for line in results(load_sweep(self.folder)):
                say(line)
            self._tell()
        except OSError as error:  # a full disk, a folder that is gone
            complain(error)

    def _write(self) -> None:
        from trainer.reports.sweep_page import write_sweep

        write_sweep(self.folder)

    def _follow(self) -> None:
        while not self._over.wait(1.0):
            with self._writing:
                self._page.refresh()

    def _plan(self, *, ended: bool) -> None:
        plan = {"words": self._words, "jobs": self._names, "ended": ended}
        write_text(self.folder / PLAN, json.dumps(plan, indent=1))

    def _tell(self) -> None:
        from trainer.reports.display import Output, linked

        line = linked("sweep    ", self.folder / "sweep.html")
        Output(highlight=False).print(line, soft_wrap=True)
