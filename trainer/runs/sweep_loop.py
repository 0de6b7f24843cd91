"""The jobs of a sweep, one after the other; the others too if one fails. Torch-free."""

import sys
from collections.abc import Callable
from typing import Any

from trainer.runs.failures import complain, say


def run_sweep(sweep: Any, run: Callable[[Any], None]) -> int:
    """Call `run` with each `sweep.job(number)` that has something left; return the exit code.

    `sweep`: has a folder, words, the words of its jobs and their folders (conf/start.py). Its page
    is kept up to date.
    """
    from trainer.reports.sweep import LiveSweep  # a single run needs none

    failed = []
    pages = LiveSweep(sweep.folder, sweep.jobs, names=sweep.folders, words=sweep.words)
    try:
        for number, name in enumerate(sweep.folders):
            try:
                job = sweep.job(number)
                pages.begin(number, job.done)
                if not job.done:
                    run(job)
            except (RuntimeError, ValueError, OSError) as error:
                complain(error)
                failed.append(name)
    except KeyboardInterrupt:  # outside of a run
        say("stopped between two jobs")
        return 130
    finally:
        pages.end()
    for name in failed:
        print(f"failed   {name}", file=sys.stderr)
    return 1 if failed else 0
