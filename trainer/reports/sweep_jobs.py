"""What the jobs of a sweep reached, read from their files, finished or not.

Reward and KL of a job are means over its last ten iterations, at most a quarter of them; the reward
is the task's alone, without a KL part. Jobs are called after what differs between them; those that
differ in the seed alone are one setting.
"""

import csv
import io
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from trainer.limit import ACCURACY, FILE, HELD_KL, HELD_REWARD, Limit, read_limit
from trainer.reports.formats import leaves, nats, one_line, short
from trainer.reports.summary import hydra_path, repeat_command
from trainer.runs.find import find_jobs
from trainer.runs.folders import program
from trainer.runs.lock import is_free
from trainer.runs.redact import redact, redact_text
from trainer.runs.run_files import PLACES, Run, dig, is_sweep, load_run, number, read_yaml

PLAN = "sweep.json"  # its words, the folders of its jobs, and whether the sweep has ended
OBJECTIVE, REWARD, KL = "objective", "reward/raw_mean", "kl/ref_sequence"
EFFICIENCY, DRIFT = "kl/efficiency", "kl/behaviour"
COLUMNS = {"objective": (OBJECTIVE, short), "reward": (REWARD, short), "KL": (KL, nats)}


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

    def label(self, keys: Sequence[str]) -> str:
        """Name the job by some of its overrides, else by its folder."""
        named = (f"{key}={self.overrides[key]}" for key in keys if key in self.overrides)
        return ", ".join(named) or self.name


@dataclass(frozen=True)
class Setting:
    """Jobs that differ in the seed alone; `label`: its name in the picture.

    Its numbers are those of finished jobs only, or of all jobs if none has finished.
    """

    name: str
    label: str
    jobs: Sequence[Job]

    @property
    def finished(self) -> list[Job]:
        return [job for job in self.jobs if job.state == "finished"]

    @property
    def state(self) -> str:
        """Return the states of its jobs: "finished", or "2 finished, 1 failed"."""
        states = counted(job.state for job in self.jobs)
        return states.removeprefix("1 ") if len(self.jobs) == 1 else states

    def spots(self, by: str = REWARD) -> list[tuple[float, float]]:
        """List KL and `by` of its jobs, both of the same prompts where they can be."""
        out = []
        for reached in (job.reached for job in self.finished or self.jobs):
            held = None if by == REWARD else reached[HELD_KL]
            spot = (reached[KL] if held is None else held, reached.get(by))
            out += [spot] if None not in spot else []
        return out

    def place(self, by: str = REWARD) -> tuple[float, float]:
        """Return the mean of its spots."""
        return _middle(self.spots(by))

    def mean(self, name: str) -> float | None:
        """Average a column over the jobs, None where one of them lacks it."""
        values = [job.reached[name] for job in self.finished or self.jobs]
        return None if None in values else fmean(values)

    def cell(self, name: str) -> str:
        """Return a column as text: of several jobs the mean, the lowest and the highest."""
        values = [job.reached[name] for job in self.finished or self.jobs]
        if None in values:
            return ""
        if isinstance(values[0], str):
            return self.state if name == "state" else values[0]
        form = nats if name in (KL, HELD_KL, DRIFT) else short
        low, high = form(min(values)), form(max(values))
        return form(fmean(values)) + (f" ({low} to {high})" if low != high else "")

    def numbers(self) -> str:
        """Return its objective, reward and KL as text."""
        means = ((name, form, self.mean(key)) for name, (key, form) in COLUMNS.items())
        text = ", ".join(f"{name} {form(mean)}" for name, form, mean in means if mean is not None)
        count = len(self.finished)
        return f"{text}; means of {count} seeds" if count > 1 else text


@dataclass(frozen=True)
class Sweep:
    """The jobs of a multirun folder. `left`: jobs that have not begun; `live`: whether it runs.

    `live` is None where nobody wrote it down. `command` continues the sweep.
    """

    folder: Path
    jobs: Sequence[Job]
    left: int = 0
    live: bool | None = None
    command: str = ""

    @property
    def state(self) -> str:
        """Return "running", "finished" or "stopped"; "" where nobody wrote it down."""
        over = all(job.state in ("finished", "failed") for job in self.jobs) and not self.left
        return {None: "", True: "running", False: "finished" if over else "stopped"}[self.live]

    @property
    def unfinished(self) -> bool:
        """Whether the sweep is over though jobs are not finished."""
        missing = self.left or any(job.state != "finished" for job in self.jobs)
        return self.live is False and bool(missing)


def load_sweep(folder: str | Path) -> Sweep:
    """Read a multirun folder, whatever state it is in."""
    folder = Path(folder)
    plan = read_yaml(folder / PLAN)  # JSON is YAML
    live = not plan.get("ended") and not is_free(folder) if plan else None
    jobs = [_job(load_run(job), job.relative_to(folder).as_posix()) for job in find_jobs(folder)]
    words = [redact_text(word) for word in plan.get("words", [])]
    place = f"hydra.sweep.dir={hydra_path(folder.resolve())}"
    left = sum(not (folder / name).is_dir() for name in plan.get("jobs", []))
    return Sweep(folder, jobs, left, live, shlex.join([*program(), "-m", *words, place]))


def load_jobs(folder: Path) -> Sequence[Job]:
    """Read the jobs of a sweep, or a run as the only job, by the name of its experiment."""
    if is_sweep(folder):
        return load_sweep(folder).jobs
    run = load_run(folder)
    return [_job(run, run.experiment)]


def gather(folders: Sequence[Path]) -> Sweep:
    """Make a sweep of runs from anywhere, each a setting that is called after its folder.

    The keys of their command lines in which they differ stand before what they reached.
    """
    names = [folder.resolve().name for folder in folders]
    names = names if len(set(names)) == len(names) else [str(folder) for folder in folders]
    jobs = [_job(load_run(f), name) for f, name in zip(folders, names, strict=True)]
    wholes = [dict(leaves(redact(job.run.config))) | job.overrides for job in jobs]
    keys = dict.fromkeys(key for job in jobs for key in job.overrides)
    differ = [key for key in keys if len({str(whole.get(key, "-")) for whole in wholes}) > 1]
    gathered = []
    for job, whole in zip(jobs, wholes, strict=True):
        values = {key: str(whole.get(key, "-")) for key in differ}
        gathered.append(replace(job, overrides={}, reached=values | job.reached))
    return Sweep(Path(), gathered)


def _job(run: Run, name: str) -> Job:
    def trained(metric: str) -> float | None:
        """Return the last value, unless that is the one before training."""
        return next((value for at, value in run.series(metric)[-1:] if at >= 1), None)

    limit = known_limit(run.folder)
    reached = {
        "state": run.state,
        OBJECTIVE: number(run.status.get("objective")),
        ACCURACY: trained(ACCURACY),
        REWARD: run.last_ten_mean(task_reward(run)),
        KL: run.last_ten_mean(KL),
        DRIFT: run.last_ten_mean(DRIFT),
        HELD_REWARD: trained(HELD_REWARD),
        HELD_KL: trained(HELD_KL),
        EFFICIENCY: efficiency(run, limit) if limit else None,
        "kl/coeff": run.last("kl/coeff"),
        "progress/iteration": int(run.metrics[-1]["progress/iteration"]) if run.metrics else 0,
        "iterations_averaged": len(run.last_ten(KL) or run.last_ten("reward/mean")),
    }
    overrides = {key: value for key, value in run.overrides.items() if key not in PLACES}
    return Job(name, run, redact(overrides), reached)


def varying(jobs: Sequence[Job]) -> list[str]:
    """List the keys in which the jobs differ, as far as they have them: one may not have begun."""
    pairs = dict.fromkeys(pair for job in jobs for pair in job.overrides.items())
    return [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]


def grouped(jobs: Sequence[Job]) -> list[Setting]:
    """Put the jobs of a setting together."""
    differ = varying(jobs)
    keys = [key for key in differ if key != "seed"]
    settings: dict[str, list[Job]] = {}
    for job in jobs:
        settings.setdefault("all seeds" if differ == ["seed"] else job.label(keys), []).append(job)
    labels = (", ".join(jobs[0].overrides.get(k, "-") for k in keys) for jobs in settings.values())
    pairs = zip(labels, settings.items(), strict=True)
    return [Setting(name, label or name, jobs) for label, (name, jobs) in pairs]


def comparable(jobs: Sequence[Job]) -> bool:
    """Return whether all jobs start from one model and are judged on one task in one way."""
    keys = ("policy", "env", "eval", "kl.reference", "kl.refresh_every")
    runs = [job.run for job in jobs if job.run.metrics]
    seen = {
        json.dumps([run.experiment, *(dig(run.config, *key.split(".")) for key in keys)])
        for run in runs
    }
    return len(seen) <= 1


def start(jobs: Sequence[Job], by: str) -> tuple[float, float] | None:
    """Return KL and reward (or accuracy) before training, the mean over jobs of one start.

    The replies of the first iteration are those of the model before any step.
    """
    spots = []
    for run in (job.run for job in jobs):
        name, first = (task_reward(run), 1) if by == REWARD else (by, 0)
        values, kls = dict(run.series(name)), dict(run.series(KL))
        if first in values and 1 in kls:
            spots.append((kls[1], values[first]))
    return _middle(spots) if spots and comparable(jobs) else None


def _middle(spots: Sequence[tuple[float, float]]) -> tuple[float, float]:
    kls, values = zip(*spots, strict=True)
    return fmean(kls), fmean(values)


def best(jobs: Sequence[Job]) -> Setting | None:
    """Return the setting whose finished jobs have the highest mean objective; of one job, None.

    At equal ones that with the lower KL. Not that of the best job: with many seeds it is the
    luckiest.
    """
    ended = [s for s in grouped(jobs) if s.finished and s.mean(OBJECTIVE) is not None]
    ended.sort(key=lambda s: s.mean(KL) or 0.0)
    return max(ended, key=lambda s: s.mean(OBJECTIVE), default=None) if len(jobs) > 1 else None


def results(sweep: Sweep) -> list[str]:
    """Return what a sweep came to for a terminal: a line per setting, the best, what is left."""
    rows = [["setting", *COLUMNS, "state"]]
    for setting in grouped(sweep.jobs):
        means = [(form, setting.mean(key)) for key, form in COLUMNS.values()]
        cells = ["-" if mean is None else form(mean) for form, mean in means]
        rows.append([one_line(setting.name, 48), *cells, setting.state])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows if sweep.jobs]
    if found := best(sweep.jobs):
        lines.append(f"best     {found.name} ({found.numbers()})")
        lines.append(f"again    {repeat_command(found.finished[0].run)}")
    if sweep.unfinished:
        left = f"{sweep.left} not begun; " if sweep.left else ""
        lines.append(f"{left}continue with: {sweep.command}")
    return lines


def as_csv(jobs: Sequence[Job]) -> str:
    """Return a line per job: its overrides and what it reached."""
    text = io.StringIO()
    rows = [{"job": job.name, **job.overrides, **job.reached} for job in jobs]
    keys = dict.fromkeys(key for job in jobs for key in job.overrides)
    columns = dict.fromkeys(["job", *keys, *(name for job in jobs[:1] for name in job.reached)])
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def task_reward(run: Run) -> str:
    """Name the metric of the task's reward: that without a KL part, where a run has it."""
    return REWARD if run.series(REWARD) else "reward/mean"


def counted(states: Iterable[str]) -> str:
    """Return how many are in which state: "2 finished, 1 failed"."""
    return ", ".join(f"{count} {state}" for state, count in Counter(states).items())


def held_out(run: Run, metric: str) -> list[tuple[float, float, float]]:
    """List (iteration, value, KL in nats) of the evaluations that measured a metric and the KL."""
    kls = dict(run.series(HELD_KL))
    return [(at, value, kls[at]) for at, value in run.series(metric) if at in kls]


def efficiency(run: Run, limit: Limit) -> float | None:
    """Return the KL efficiency of the last evaluation."""
    found = held_out(run, limit.metric)
    return limit.efficiency(limit.metric, *found[-1][1:]) if found else None


def known_limit(folder: Path) -> Limit | None:
    """Return the limit of a run or sweep: its own, or that of the sweep around it.

    None if it is of other held-out rows than the run evaluates.
    """
    around = [parent for parent in folder.resolve().parents[:3] if is_sweep(parent)]
    path = next((p / FILE for p in (folder, *around) if (p / FILE).is_file()), None)
    limit = _read(path, path.stat().st_mtime_ns) if path else None
    return limit if limit and of_same_rows(limit, folder) else None


def limit_of(sweep: Sweep) -> Limit | None:
    """Return the limit of a sweep: its own, or a job's where all start from one model."""
    folders = [sweep.folder]
    folders += [job.run.folder for job in sweep.jobs] if comparable(sweep.jobs) else []
    return next(filter(None, map(known_limit, folders)), None)


def of_same_rows(limit: Limit, folder: Path) -> bool:
    """Return whether it is of as many rows as a run evaluates; a sweep has no count of its own."""
    return read_yaml(folder / "status.json").get("held_out") in (None, limit.asked)


@lru_cache(maxsize=2)  # the jobs of a sweep share one
def _read(path: Path, _stamp: int) -> Limit | None:
    return read_limit(path)
