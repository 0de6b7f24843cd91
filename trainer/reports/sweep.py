"""sweep.csv and sweep.html: what the jobs of a sweep reached, and at which KL.

Rebuilt from the files of the jobs, finished or not. Reward and KL of a job are means over its last
ten iterations, at most a quarter of them; the reward is the task's alone, without a KL part. The
page: sweep_page.py. How a sweep is continued: conf/continued.py.
"""

import csv
import io
import json
import os
import re
import shlex
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.text import Text

from policies.cache import write_text
from trainer.reports import about, page, svg
from trainer.reports.jobs import Row, all_keys
from trainer.reports.report import LiveReport
from trainer.reports.sweep_page import COLUMNS, Sweep, body, picture, results
from trainer.reports.text import Output, shown
from trainer.runs.failures import complain, say
from trainer.runs.job_names import job_line, job_names
from trainer.runs.lock import is_free, lock_folder
from trainer.runs.redact import redact
from trainer.runs.run_files import Run, dig, find_jobs, load_run, number, read_yaml

PLAN = "sweep.json"  # its words, the folders of its jobs, and whether the sweep has ended
PATIENCE = 300.0  # seconds; a page that is older may be called stale
PLACE = "hydra.sweep.dir="


def write_sweep(folder: str | Path) -> Path:
    """Write sweep.csv and sweep.html into a multirun folder; return the path of the page."""
    sweep = load_sweep(folder)
    write_text(sweep.folder / "sweep.csv", _csv(sweep.rows))
    path = sweep.folder / "sweep.html"
    patience = PATIENCE if sweep.live else None
    write_text(path, page.page("sweep - leash", body(sweep), patience=patience))
    return path


def load_sweep(folder: str | Path) -> Sweep:
    """Read a multirun folder, whatever state it is in."""
    folder = Path(folder)
    jobs = [load_run(job) for job in find_jobs(folder)]
    plan = read_yaml(folder / PLAN)  # JSON is YAML
    live = not plan.get("ended") and not is_free(folder) if plan else None
    rows = [_row(folder, job) for job in jobs]
    if live:  # one job at a time: the one that has no status yet is the one that begins
        rows = [replace(row, state=row.state.replace("not started", "starting")) for row in rows]
    left = sum(not (folder / name).is_dir() for name in _texts(plan.get("jobs")))
    command = _command(folder, _texts(plan.get("words"))) if plan else ""
    return Sweep(folder, rows, jobs, left=left, live=live, command=command)


class LiveSweep:
    """Write the page of a sweep while it goes on: at its start, with every job and in between.

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
        self._words = [about.safe(word) for word in words if not word.startswith(PLACE)]
        self._names = list(names or job_names(jobs))
        self._lock = lock_folder(self.folder)
        self._page = LiveReport(self.folder, write=write_sweep)
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
        self._over.set()
        if self._begun:
            self._thread.join()
        try:
            self._plan(ended=True)
            os.close(self._lock)
            write_sweep(self.folder)
            for line in results(load_sweep(self.folder)):
                say(line)
            self._tell()
        except OSError as error:  # a full disk, a folder that is gone
            complain(error)

    def _follow(self) -> None:
        while not self._over.wait(1.0):
            with self._writing:
                self._page.refresh()

    def _plan(self, *, ended: bool) -> None:
        plan = {"words": self._words, "jobs": self._names, "ended": ended}
        write_text(self.folder / PLAN, json.dumps(plan, indent=1))

    def _tell(self) -> None:
        line = Text("sweep    ").append_text(shown(self.folder / "sweep.html"))
        Output(highlight=False).print(line, soft_wrap=True)


def _texts(found: object) -> list[str]:
    """Return the texts of a list, of a damaged file none."""
    return [item for item in found if isinstance(item, str)] if isinstance(found, list) else []


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
    overrides = {k: v for k, v in run.overrides.items() if k not in about.PLACES}
    return Row(
        job=job,
        overrides=redact(overrides or _from_name(job)),
        state=run.state,
        objective=number(run.status.get("objective")),
        accuracy=run.last("eval/sampled_accuracy"),
        reward=run.last_ten_mean(about.task_reward(run)),
        kl=run.last_ten_mean("kl/ref_sequence"),
        coeff=coeff,
        iteration=int(run.metrics[-1]["progress/iteration"]) if run.metrics else 0,
        averaged=len(run.last_ten("kl/ref_sequence") or run.last_ten("reward/mean")),
        command=about.command(run),
    )


def _command(folder: Path, words: Sequence[str]) -> str:
    """Return the command that continues a sweep."""
    place = str(folder.resolve())
    plain = re.fullmatch(r"[\w./+-]+", place, re.ASCII)
    quoted = place if plain else "'" + place.replace("'", "\\'") + "'"  # for Hydra's grammar
    return shlex.join(["python", "train.py", "-m", *words, f"{PLACE}{quoted}"])


def _from_name(job: str) -> dict[str, str]:
    """Read `a=1,b=2`, the name that `job_name` gives a job's folder."""
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
