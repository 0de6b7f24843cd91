"""sweep.csv and sweep.html: what the jobs of a sweep reached, and at which KL.

Rebuilt from the files of the jobs, finished or not. Reward and KL of a job are means over its last
ten iterations; the reward is the task's alone, without a KL part. The page: show/sweep_page.py.
"""

import csv
import hashlib
import io
import json
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from trainer.display_text import shown
from trainer.lock import is_free, take
from trainer.redact import redact, redact_text
from trainer.report import LiveReport
from trainer.run_files import Run, dig, find_jobs, load_run, number, read_yaml, write_text
from trainer.show import about, page, svg
from trainer.show.jobs import Row, all_keys
from trainer.show.sweep_page import COLUMNS, Sweep, body, picture

PLAN = "sweep.json"  # how many jobs have not begun, and whether the sweep has ended
PATIENCE = 300.0  # seconds; a page that is older may be called stale
LONGEST = 200  # bytes of a job's folder name; file systems refuse more than 255


def write_sweep(folder: str | Path) -> Path:
    """Write sweep.csv and sweep.html into a multirun folder; return the path of the page."""
    folder = Path(folder)
    jobs = [load_run(job) for job in find_jobs(folder)]
    plan = read_yaml(folder / PLAN)  # JSON is YAML
    live = not plan.get("ended") and not is_free(folder) if plan else None
    rows = [_row(folder, job) for job in jobs]
    if live:  # one job at a time: the one that has no status yet is the one that begins
        rows = [replace(row, state=row.state.replace("not started", "starting")) for row in rows]
    write_text(folder / "sweep.csv", _csv(rows))
    left = number(plan.get("left"))
    sweep = Sweep(folder, rows, jobs, left=None if left is None else int(left), live=live)
    patience = PATIENCE if live else None
    path = folder / "sweep.html"
    write_text(path, page.page("sweep - leash", body(sweep), patience=patience))
    return path


class LiveSweep:
    """Write the page of a sweep while it goes on: at its start, with every job and in between.

    It holds the folder, so that whoever writes the page meanwhile knows whether the sweep lives.
    ValueError if another sweep holds it.
    """

    def __init__(self, folder: Path, jobs: Sequence[Sequence[str]]) -> None:
        self.folder, self.jobs = Path(os.path.abspath(folder)), jobs
        self._lock = take(self.folder)
        self._page = LiveReport(self.folder, write=write_sweep, share=0.02)
        self._writing, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._begun = 0

    def begin(self, number: int) -> None:
        """Say that a job begins; the first time, where the page is."""
        self._plan(left=len(self.jobs) - number - 1)
        with self._writing:
            self._page.refresh(now=True)
        if not self._begun:
            self._tell()
            self._thread.start()
        self._begun += 1
        print(job_line(number, self.jobs), flush=True)

    def end(self) -> None:
        """Write the page for good, and say where it is."""
        self._over.set()
        if self._begun:
            self._thread.join()
        self._plan(left=len(self.jobs) - self._begun, ended=True)
        os.close(self._lock)
        write_sweep(self.folder)
        self._tell()

    def _follow(self) -> None:
        while not self._over.wait(1.0):
            with self._writing:
                self._page.refresh()

    def _plan(self, **plan: float) -> None:
        write_text(self.folder / PLAN, json.dumps(plan))

    def _tell(self) -> None:
        line = Text("sweep    ").append_text(shown(self.folder / "sweep.html"))
        Console(highlight=False).print(line, soft_wrap=True)


def job_name(overrides: str) -> str:
    """Return a folder name for a job of a sweep: its overrides, in the order of their keys.

    What a shell or a disk would take amiss is a `_`, what is too long is cut; such a name ends in
    a hash, so that no two jobs share one.

    >>> job_name("kl.coeff=0.1,seed=1"), job_name("policy.model=a/b"), job_name("")
    ('kl.coeff=0.1,seed=1', 'policy.model=a_b-07448723', 'job')
    """
    name = re.sub(r"[^\w.,=+~@-]+", "_", overrides, flags=re.ASCII)
    if name == overrides and len(name) <= LONGEST:
        return name or "job"
    most, pairs = LONGEST - 9, re.split(r",(?=[\w.+~@]+=)", name)
    cuts = (",".join(pair[:each] for pair in pairs) for each in range(most, 11, -1))
    cut = next((short for short in cuts if len(short) <= most), name[:most])
    return f"{cut}-{hashlib.sha256(overrides.encode()).hexdigest()[:8]}"


def job_line(number: int, jobs: Sequence[Sequence[str]]) -> str:
    """Say which job of a sweep begins: its number, and the overrides that not all jobs have.

    >>> job_line(1, [["seed=1", "kl.coeff=0"], ["seed=1", "kl.coeff=0.1"]])
    'job 2 of 2: kl.coeff=0.1'
    """
    own = [word for word in jobs[number] if any(word not in job for job in jobs)]
    return redact_text(f"job {number + 1} of {len(jobs)}: {' '.join(own)}".rstrip(": "))


def read_rows(folder: str | Path) -> list[Row]:
    """Read one row per job of a multirun folder."""
    return [_row(Path(folder), load_run(job)) for job in find_jobs(folder)]


def frontier_svg(rows: Sequence[Row], *, width: int = 480, height: int = 340) -> str:
    """Draw reward against KL, one labelled point per setting, as a standalone SVG document."""
    return svg.standalone([picture(rows, width, height)], width=width, height=height)


def _row(folder: Path, run: Run) -> Row:
    job = run.folder.relative_to(folder).as_posix()
    coeff = run.last("kl/coeff")
    if coeff is None:
        coeff = number(dig(run.config, "kl", "coeff"))
    reward = run.last_ten_mean("reward/raw_mean")
    overrides = {k: v for k, v in run.overrides.items() if k not in about.PLACES}
    return Row(
        job=job,
        overrides=redact(overrides or _from_name(job)),
        state=run.state,
        objective=number(run.status.get("objective")),
        accuracy=run.last("eval/sampled_accuracy"),
        reward=run.last_ten_mean("reward/mean") if reward is None else reward,
        kl=run.last_ten_mean("kl/ref_sequence"),
        coeff=coeff,
        iteration=int(run.metrics[-1]["progress/iteration"]) if run.metrics else 0,
        command=about.command(run),
    )


def _from_name(job: str) -> dict[str, str]:
    """Read `a=1,b=[2,3]`, the name Hydra gives a job's folder."""
    parts = re.split(r",(?=[\w.+~/@]+=)", job)
    return dict(part.split("=", 1) for part in parts if "=" in part)


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["job", *all_keys(rows), *COLUMNS])
    for row in rows:
        own = [row.overrides.get(key, "") for key in all_keys(rows)]
        writer.writerow([row.job, *own, *(getattr(row, name) for name in COLUMNS.values())])
    return text.getvalue()
