"""What the jobs of a sweep reached, and at which KL: for the page, sweep.csv and the terminal.

Read from the files of the jobs, finished or not. Reward and KL of a job are means over its last ten
iterations, at most a quarter of them; the reward is the task's alone, without a KL part. Jobs are
called after what differs between them; those that differ in the seed alone are one setting.
"""

import csv
import io
import math
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from trainer.reports import summary
from trainer.reports.formats import one_line, short
from trainer.reports.sweep import PLACE, PLAN
from trainer.runs.find import find_jobs
from trainer.runs.lock import is_free
from trainer.runs.redact import redact
from trainer.runs.run_files import Run, dig, load_run, number, read_yaml
from trainer.runs.saved_configs import PLACES

OBJECTIVE, REWARD, KL = "objective", "reward/raw_mean", "kl/ref_sequence"
MOST = 20  # settings that the terminal lists


@dataclass(frozen=True)
class Job:
    """A job, by the name of its folder; `reached`: its state and metrics, a column each."""

    name: str
    run: Run
    overrides: dict[str, str]
    reached: dict[str, Any]

    @property
    def state(self) -> str:
        return self.reached["state"]

    def called(self, keys: Sequence[str]) -> str:
        """Name the job by some of its overrides, else by its folder."""
        own = (f"{key}={self.overrides[key]}" for key in keys if key in self.overrides)
        return ", ".join(own) or self.name


@dataclass(frozen=True)
class Setting:
    """Jobs that differ in the seed alone; `label`: its name in the picture.

    What is told of it is of its finished jobs, if any is.
    """

    name: str
    label: str
    jobs: tuple[Job, ...]

    @property
    def finished(self) -> tuple[Job, ...]:
        return tuple(job for job in self.jobs if job.state == "finished")

    @property
    def state(self) -> str:
        """Say in which states its jobs are: "finished", or "2 finished, 1 failed"."""
        counts = Counter(job.state for job in self.jobs)
        several = len(self.jobs) > 1
        return ", ".join(f"{n} {state}" if several else state for state, n in counts.items())

    @property
    def spots(self) -> list[tuple[float, float]]:
        """List KL and reward of its jobs."""
        held = [(job.reached[KL], job.reached[REWARD]) for job in self.finished or self.jobs]
        return [(kl, reward) for kl, reward in held if kl is not None and reward is not None]

    @property
    def place(self) -> tuple[float, float]:
        """Return the mean KL and reward."""
        kls, rewards = zip(*self.spots, strict=True)
        return fmean(kls), fmean(rewards)

    def mean(self, name: str) -> float | None:
        """Average a column over the jobs that have it."""
        values = [job.reached[name] for job in self.finished or self.jobs]
        known = [value for value in values if value is not None]
        return fmean(known) if known else None

    def numbers(self) -> str:
        """Tell its objective, reward and KL."""
        means = {"objective": self.mean(OBJECTIVE), "reward": self.mean(REWARD)}
        means["KL"] = self.mean(KL)
        told = ", ".join(f"{name} {short(v)}" for name, v in means.items() if v is not None)
        count = len(self.finished)
        return f"{told}; means of {count} seeds" if count > 1 else told


@dataclass(frozen=True)
class Sweep:
    """The jobs of a multirun folder. `left`: jobs that have not begun; `live`: whether it goes on.

    `live` is None where nobody wrote it down, as of a search by a script of one's own. `command`
    continues the sweep.
    """

    folder: Path
    jobs: Sequence[Job]
    left: int = 0
    live: bool | None = None
    command: str = ""

    @property
    def unfinished(self) -> bool:
        """Whether the sweep does not go on though jobs are not finished."""
        ended = all(job.state == "finished" for job in self.jobs)
        return self.live is False and not (ended and not self.left)


def load_sweep(folder: str | Path) -> Sweep:
    """Read a multirun folder, whatever state it is in."""
    folder = Path(folder)
    plan = read_yaml(folder / PLAN)  # JSON is YAML
    live = not plan.get("ended") and not is_free(folder) if plan else None
    jobs = [_read_job(folder, load_run(job)) for job in find_jobs(folder)]
    for job in jobs if live else ():  # one at a time: one without a status is the one that begins
        job.reached["state"] = job.state.replace("not started", "starting")
    planned, words = (_texts(plan.get(key)) for key in ("jobs", "words"))
    place = str(folder.resolve())
    if not re.fullmatch(r"[\w./+-]+", place, re.ASCII):  # quoted for Hydra's grammar
        place = "'" + place.replace("'", "\\'") + "'"
    again = shlex.join(["python", "train.py", "-m", *words, f"{PLACE}{place}"]) if plan else ""
    left = sum(not (folder / name).is_dir() for name in planned)
    return Sweep(folder, jobs, left, live, again)


def varying(jobs: Sequence[Job]) -> list[str]:
    """List the keys in which the jobs differ, as far as they have them: one may not have begun."""
    values: dict[str, set[str]] = {}
    for job in jobs:
        for key, value in job.overrides.items():
            values.setdefault(key, set()).add(value)
    return [key for key, found in values.items() if len(found) > 1]


def grouped(jobs: Sequence[Job]) -> list[Setting]:
    """Put the jobs of a setting together."""
    differ = varying(jobs)
    keys = [key for key in differ if key != "seed"]
    held: dict[str, list[Job]] = {}
    for job in jobs:
        name = "all seeds" if differ == ["seed"] else job.called(keys)
        held.setdefault(name, []).append(job)
    values = {name: [own[0].overrides.get(key, "-") for key in keys] for name, own in held.items()}
    return [Setting(n, ", ".join(values[n]) or n, tuple(own)) for n, own in held.items()]


def best(jobs: Sequence[Job]) -> Setting | None:
    """Return the setting whose finished jobs have the highest mean objective; of one job, None.

    At equal ones that with the lower KL. Not that of the best job: with many seeds it is the
    luckiest.
    """
    ended = [s for s in grouped(jobs) if s.finished and s.mean(OBJECTIVE) is not None]

    def worth(setting: Setting) -> tuple[float, float]:
        return setting.mean(OBJECTIVE) or 0.0, -(setting.mean(KL) or 0.0)

    return max(ended, key=worth, default=None) if len(jobs) > 1 else None


def results(sweep: Sweep) -> list[str]:
    """Return what a sweep came to for a terminal: a line per setting, the best, what is left."""
    made, lines = grouped(sweep.jobs), []
    if len(made) > MOST:  # the best of them
        made = sorted(made, key=lambda s: -(s.mean(OBJECTIVE) or -math.inf))
    cells = [["setting", "reward", "KL", "objective", "state"]]
    for setting in made[:MOST]:
        values = [setting.mean(name) for name in (REWARD, KL, OBJECTIVE)]
        numbers = ["-" if value is None else short(value) for value in values]
        cells.append([one_line(setting.name, 48), *numbers, setting.state])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if made:
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    lines += [f"... {len(made) - MOST} more in sweep.html"] * (len(made) > MOST)
    if found := best(sweep.jobs):
        again = summary.repeat_command(found.finished[0].run)
        lines.append(f"best     {found.name} ({found.numbers()})")
        lines += [f"again    {again}"] * bool(again)
    if sweep.unfinished:
        left = f"{sweep.left} not begun; " if sweep.left else ""
        lines.append(f"{left}continue with: {sweep.command}")
    return lines


def as_csv(jobs: Sequence[Job]) -> str:
    """Return a line per job: its overrides and what it reached."""
    text = io.StringIO()
    keys = dict.fromkeys(key for job in jobs for key in job.overrides)
    columns = ["job", *keys, *dict.fromkeys(name for job in jobs for name in job.reached)]
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({"job": job.name, **job.overrides, **job.reached} for job in jobs)
    return text.getvalue()


def _texts(found: object) -> list[str]:
    """Return the texts of a list, of a damaged file none."""
    return [item for item in found if isinstance(item, str)] if isinstance(found, list) else []


def _read_job(folder: Path, run: Run) -> Job:
    name = run.folder.relative_to(folder).as_posix()
    overrides = {k: v for k, v in run.overrides.items() if k not in PLACES}
    if not overrides:  # `a=1,b=2`, the name that `job_name` gives a folder
        parts = re.split(r",(?=[\w.+~/@]+=)", name)
        overrides = dict(part.split("=", 1) for part in parts if "=" in part)
    coeff, ends = run.last("kl/coeff"), run.last_ten(KL) or run.last_ten("reward/mean")
    reached = {
        "state": run.state,
        OBJECTIVE: number(run.status.get("objective")),
        "eval/sampled_accuracy": run.last("eval/sampled_accuracy"),
        REWARD: run.last_ten_mean(summary.task_reward(run)),
        KL: run.last_ten_mean(KL),
        "kl/coeff": number(dig(run.config, "kl", "coeff")) if coeff is None else coeff,
        "progress/iteration": int(run.metrics[-1]["progress/iteration"]) if run.metrics else 0,
        "iterations_averaged": len(ends),
    }
    return Job(name, run, redact(overrides), reached)
