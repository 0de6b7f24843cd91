"""A sweep while it goes on, for the process that starts its jobs: its page and its last lines.

How a sweep is continued: conf/sweep.py.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from policies.cache import write_text
from trainer.reports.live import LivePage
from trainer.runs.failures import complain, say
from trainer.runs.job_names import job_line, job_names
from trainer.runs.lock import lock_folder
from trainer.runs.redact import redact_word
from trainer.runs.run_files import read_status

PLAN = "sweep.json"  # its words, the folders of its jobs, and whether the sweep has ended
PLACE = "hydra.sweep.dir="


class LiveSweep:
    """Follow a sweep in its folder.

    `jobs`: the overrides of each; `names`: their folders, without them those of `job_names`;
    `words`: the command line; `count`: how many jobs there will be, where others may follow. It
    holds the folder, so that whoever writes the page meanwhile knows whether the sweep lives.
    ValueError if another sweep holds it.
    """

    def __init__(
        self,
        folder: Path,
        jobs: Sequence[Sequence[str]],
        *,
        names: Sequence[str] | None = None,
        words: Sequence[str] = (),
        count: Callable[[], int] | None = None,
    ) -> None:
        self.folder, self.jobs = Path(os.path.abspath(folder)), jobs
        self._words = [redact_word(word) for word in words if not word.startswith(PLACE)]
        self._names = job_names(jobs) if names is None else names
        self._count = count or (lambda: len(self.jobs))
        self._lock = lock_folder(self.folder)
        self._page = LivePage(self.folder)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._begun = False
        self._began: float | None = None  # of time.monotonic(): the job that runs
        self._seconds: list[float] = []  # of the jobs that ran
        self._together: dict[int, dict[str, Any]] = {}  # status of the jobs that run side by side
        self._started: dict[int, float] = {}  # those that were seen to run, by time.monotonic()

    def begin(self, number: int, note: str | None = None) -> None:
        """Say that a job begins, or in a `note` why not; the first time, where the page is."""
        self._open()
        self._page.wanted = True
        now = time.monotonic()
        if self._began is not None:
            self._seconds.append(now - self._began)
        self._began = None if note else now
        line = ": ".join(filter(None, [self._line(number), note]))
        if self._seconds and not note:
            from trainer.reports.formats import duration

            left = fmean(self._seconds) * (self._count() - number)
            line += f" (about {duration(left)} left)"
        say(line)

    def begin_together(self, numbers: Sequence[int]) -> list[int]:
        """Say which of some jobs are finished already; return the others, and follow those."""
        self._open()
        found = {number: read_status(self.folder / self._names[number]) for number in numbers}
        left = [number for number in numbers if found[number].get("state") != "finished"]
        for number in numbers:
            if number not in left:
                say(f"{self._line(number)}: finished already")
        self._plan(ended=False)
        self._together = {number: found[number] for number in left}
        return left

    def stop(self) -> None:
        """Let jobs that run side by side know that the sweep stops; those that run save first."""
        self._plan(ended=True)

    def _open(self) -> None:
        if not self._begun:
            self._begun = True
            self._plan(ended=False)
            self._page.finish()
            self._tell()
            self._thread.start()

    def _line(self, number: int) -> str:
        return job_line(number, self.jobs, count=self._count())

    def _hear(self) -> None:
        """Say which of the jobs side by side have begun or ended since."""
        for number, before in list(self._together.items()):
            status = read_status(self.folder / self._names[number])
            state = status.get("state")
            if status == before or state is None:
                continue
            if number not in self._started:
                self._started[number] = time.monotonic()
                say(self._line(number))
            if state != "running":
                from trainer.reports.formats import duration

                del self._together[number]
                self._page.wanted = True
                took = duration(time.monotonic() - self._started[number])
                why = f": {status['reason']}" if state == "failed" and status.get("reason") else ""
                say(f"{self._line(number)}: {state} after {took}{why}")

    def end(self) -> None:
        """Write the page for good, and say what came out and where the page is."""
        from trainer.reports.sweep_jobs import load_sweep, results

        self._over.set()
        if self._begun:
            self._thread.join()
        self._hear()
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
            self._hear()

    def _plan(self, *, ended: bool) -> None:
        plan = {"words": self._words, "jobs": [*self._names], "ended": ended}
        write_text(self.folder / PLAN, json.dumps(plan, indent=1))

    def _tell(self) -> None:
        from trainer.reports.display import Output, linked

        line = linked("sweep    ", self.folder / "sweep.html")
        Output(highlight=False).print(line, soft_wrap=True)
