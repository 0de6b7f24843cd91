"""A sweep while it goes on, for the process that starts its jobs: its page and its last lines.

How a sweep is continued: conf/sweep.py.
"""

import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from policies.cache import write_text
from trainer.reports.live import LivePage
from trainer.runs.failures import complain, say
from trainer.runs.job_names import job_line, job_names
from trainer.runs.lock import lock_folder
from trainer.runs.redact import redact_word

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
        self.folder, self.jobs = Path(os.path.abspath(folder)), jobs
        self._words = [redact_word(word) for word in words if not word.startswith(PLACE)]
        self._names = list(names or job_names(jobs))
        self._lock = lock_folder(self.folder)
        self._page = LivePage(self.folder)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._begun = False
        self._began: float | None = None  # of time.monotonic(): the job that runs
        self._seconds: list[float] = []  # of the jobs that ran

    def begin(self, number: int, note: str | None = None) -> None:
        """Say that a job begins, or in a `note` why not; the first time, where the page is."""
        if not self._begun:
            self._begun = True
            self._plan(ended=False)
            self._page.finish()
            self._tell()
            self._thread.start()
        self._page.wanted = True
        now = time.monotonic()
        if self._began is not None:
            self._seconds.append(now - self._began)
        self._began = None if note else now
        line = ": ".join(filter(None, [job_line(number, self.jobs), note]))
        if self._seconds and not note:
            from trainer.reports.formats import duration

            left = fmean(self._seconds) * (len(self.jobs) - number)
            line += f" (about {duration(left)} left)"
        say(line)

    def end(self) -> None:
        """Write the page for good, and say what came out and where the page is."""
        from trainer.reports.sweep_jobs import load_sweep, results

        self._over.set()
        if self._begun:
            self._thread.join()
        try:
            self._plan(ended=True)
            os.close(self._lock)
            self._page.finish()
            for line in results(load_sweep(self.folder)):
                say(line)
            self._tell()
        except OSError as error:  # a full disk, a folder that is gone
            complain(error)

    def _follow(self) -> None:
        while not self._over.wait(0.5):
            self._page.refresh()

    def _plan(self, *, ended: bool) -> None:
        plan = {"words": self._words, "jobs": self._names, "ended": ended}
        write_text(self.folder / PLAN, json.dumps(plan, indent=1))

    def _tell(self) -> None:
        from trainer.reports.display import Output, linked

        line = linked("sweep    ", self.folder / "sweep.html")
        Output(highlight=False).print(line, soft_wrap=True)
