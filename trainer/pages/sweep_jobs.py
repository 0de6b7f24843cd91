"""Read the results of the jobs of a sweep from their files, finished or not.

Reward and KL of a job are means over its last ten iterations, at most a quarter of all; the reward
is the task's, without a KL part. Jobs are named by the keys that differ between them; jobs that
differ only in the seed are one setting.
"""

import csv
import io
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from trainer.kl import FRONTIER_FILE
from trainer.kl.frontier import ACCURACY, EVAL_KL, EVAL_REWARD, Frontier, read_frontier
from trainer.pages.formats import nats, one_line, short
from trainer.pages.summary import hydra_path, repeat_command
from trainer.runs.discover import find_jobs
from trainer.runs.folders import PLAN, program
from trainer.runs.lock import is_free
from trainer.runs.redact import redact, redact_text
from trainer.runs.run_files import PLACES, Run, dig, flatten, is_sweep, load_run, number, read_yaml

OBJECTIVE, REWARD, KL = "objective", "reward/raw_mean", "kl/ref_sequence"
EFFICIENCY, DRIFT = "kl/efficiency", "kl/behaviour"
SAME = ("policy", "env", "eval")  # sections that comparable jobs share
SAME += ("kl.reference", "kl.reference_temperature", "kl.hint", "kl.refresh_every")
FLOAT = re.compile(r"\d+\.\d{15,}")  # Hydra's range(0.1,0.5,0.1) gives 0.30000000000000004
COLUMNS = {"objective": (OBJECTIVE, short), "reward": (REWARD, short), "KL": (KL, nats)}


@dataclass(frozen=True)
class Job:
    """A job, named by its folder; `reached`: its state and metrics, by column."""

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
    """Jobs that differ only in the seed; `label`: the name in the picture.

    Numbers are over finished jobs, or over all jobs if none has finished.
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
        states = count_states(job.state for job in self.jobs)
        return states.removeprefix("1 ") if len(self.jobs) == 1 else states

    def spots(self, by: str = REWARD) -> list[tuple[float, float]]:
        """List KL and `by` of its jobs, on the same prompts where possible."""
        out = []
        for reached in (job.reached for job in self.finished or self.jobs):
            eval_kl = None if by == REWARD else reached[EVAL_KL]
            spot = (reached[KL] if eval_kl is None else eval_kl, reached.get(by))
            out += [spot] if None not in spot else []
        return out

    def place(self, by: str = REWARD) -> tuple[float, float]:
        """Return the mean of the spots."""
        return _middle(self.spots(by))

    def mean(self, name: str) -> float | None:
        """Average a column over the jobs; None if one of them lacks it."""
        values = [job.reached[name] for job in self.finished or self.jobs]
        return None if None in values else fmean(values)

    def cell(self, name: str) -> str:
        """Return a column as text; for several jobs mean, lowest and highest."""
        values = [job.reached[name] for job in self.finished or self.jobs]
        if None in values:
            return ""
        if isinstance(values[0], str):
            return self.state if name == "state" else values[0]
        form = nats if name in (KL, EVAL_KL, DRIFT) else short
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
    """The jobs of a multirun folder. `left`: number of jobs not started; `live`: whether it runs.

    `live` is None without a record. `command` continues the sweep.
    """

    folder: Path
    jobs: Sequence[Job]
    left: int = 0
    live: bool | None = None
    command: str = ""

    @property
    def state(self) -> str:
        """Return "running", "finished", "failed" or "stopped"; "" without a record."""
        ends = {job.state for job in self.jobs} or {"finished"}
        over = "failed" if "failed" in ends else "finished"
        if self.left or ends - {"finished", "failed"}:
            over = "stopped"
        return {None: "", True: "running", False: over}[self.live]

    @property
    def unfinished(self) -> bool:
        """Return whether the sweep has ended with unfinished jobs."""
        missing = self.left or any(job.state != "finished" for job in self.jobs)
        return self.live is False and bool(missing)


def load_sweep(folder: str | Path) -> Sweep:
    """Read a multirun folder in any state."""
    folder = Path(folder)
    plan = read_yaml(folder / PLAN)  # JSON is YAML
    live = not plan.get("ended") and not is_free(folder) if plan else None
    jobs = [_job(load_run(job), job.relative_to(folder).as_posix()) for job in find_jobs(folder)]
    words = [redact_text(word) for word in plan.get("words", [])]
    place = f"hydra.sweep.dir={hydra_path(folder.resolve())}"
    left = sum(not (folder / name).is_dir() for name in plan.get("jobs", []))
    return Sweep(folder, jobs, left, live, shlex.join([*program(), "-m", *words, place]))


def load_jobs(folder: Path) -> Sequence[Job]:
    """Read the jobs of a sweep, or a run as a single job named by its experiment."""
    if is_sweep(folder):
        return load_sweep(folder).jobs
    run = load_run(folder)
    return [_job(run, run.experiment)]


def gather(folders: Sequence[Path]) -> Sweep:
    """Return a sweep of any runs, each a setting named by its folder.

    The command-line keys in which they differ come before the results.
    """
    names = [folder.resolve().name for folder in folders]
    names = names if len(set(names)) == len(names) else [str(folder) for folder in folders]
    jobs = [_job(load_run(f), name) for f, name in zip(folders, names, strict=True)]
    configs = [dict(flatten(redact(job.run.config))) | job.overrides for job in jobs]
    keys = dict.fromkeys(key for job in jobs for key in job.overrides)
    differ = [key for key in keys if len({str(config.get(key, "-")) for config in configs}) > 1]
    gathered = []
    for job, config in zip(jobs, configs, strict=True):
        values = {key: str(config.get(key, "-")) for key in differ}
        gathered.append(replace(job, overrides={}, reached=values | job.reached))
    return Sweep(Path(), gathered)


def _job(run: Run, name: str) -> Job:
    def trained(metric: str) -> float | None:
        """Return the last value after training started."""
        return next((value for at, value in run.series(metric)[-1:] if at >= 1), None)

    frontier = find_frontier(run.folder)
    reached = {
        "state": run.state,
        OBJECTIVE: number(run.status.get("objective")),
        ACCURACY: trained(ACCURACY),
        REWARD: run.last_ten_mean(task_reward(run)),
        KL: run.last_ten_mean(KL),
        DRIFT: run.last_ten_mean(DRIFT),
        EVAL_REWARD: trained(EVAL_REWARD),
        EVAL_KL: trained(EVAL_KL),
        EFFICIENCY: efficiency(run, frontier) if frontier else None,
        **{name: trained(name) for name in (f"{EFFICIENCY}_error", f"{EFFICIENCY}_train")},
        "kl/coeff": run.last("kl/coeff"),
        "progress/iteration": int(run.metrics[-1]["progress/iteration"]) if run.metrics else 0,
        "iterations_averaged": len(run.last_ten(KL) or run.last_ten("reward/mean")),
    }
    overrides = {key: value for key, value in run.overrides.items() if key not in PLACES}
    overrides = {key: FLOAT.sub(lambda m: f"{float(m[0]):.12g}", v) for key, v in overrides.items()}
    return Job(name, run, redact(overrides), reached)


def varying(jobs: Sequence[Job]) -> list[str]:
    """List the keys in which the jobs differ; a job that has not started has no keys."""
    pairs = dict.fromkeys(pair for job in jobs for pair in job.overrides.items())
    return [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]


def grouped(jobs: Sequence[Job]) -> list[Setting]:
    """Group jobs into settings."""
    differ = varying(jobs)
    keys = [key for key in differ if key != "seed"]
    settings: dict[str, list[Job]] = {}
    for job in jobs:
        settings.setdefault("all seeds" if differ == ["seed"] else job.label(keys), []).append(job)
    labels = (", ".join(jobs[0].overrides.get(k, "-") for k in keys) for jobs in settings.values())
    pairs = zip(labels, settings.items(), strict=True)
    return [Setting(name, label or name, jobs) for label, (name, jobs) in pairs]


def comparable(jobs: Sequence[Job]) -> bool:
    """Return whether all jobs share the start model, the task and the evaluation."""
    runs = [job.run for job in jobs if job.run.metrics]
    settings = [
        [run.experiment, *(dig(run.config, *key.split(".")) for key in SAME)] for run in runs
    ]
    return all(setting == settings[0] for setting in settings)


def start(jobs: Sequence[Job], by: str) -> tuple[float, float] | None:
    """Return KL and reward (or accuracy) before training, averaged over comparable jobs.

    The responses of the first iteration are sampled before any step.
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
    """Return the setting whose finished jobs have the highest mean objective; None for one job.

    Ties are broken by the lower KL. The best single job would be the luckiest seed.
    """
    ended = [s for s in grouped(jobs) if s.finished and s.mean(OBJECTIVE) is not None]
    ended.sort(key=lambda s: s.mean(KL) or 0.0)
    return max(ended, key=lambda s: s.mean(OBJECTIVE), default=None) if len(jobs) > 1 else None


def results(sweep: Sweep) -> list[str]:
    """Return the results of a sweep for a terminal: a line per setting, the best, jobs left."""
    rows = [["setting", *COLUMNS, "state"]]
    for setting in grouped(sweep.jobs):
        means = [(form, setting.mean(key)) for key, form in COLUMNS.values()]
        cells = ["-" if mean is None else form(mean) for form, mean in means]
        rows.append([one_line(setting.name, 48), *cells, setting.state])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows if sweep.jobs]
    if winner := best(sweep.jobs):
        lines.append(f"best     {winner.name} ({winner.numbers()})")
        again = repeat_command(winner.finished[0].run)
        lines += [f"again    {again}"] if again else []
    if sweep.unfinished:
        left = f"{sweep.left} not begun; " if sweep.left else ""
        lines.append(f"{left}continue with: {sweep.command}")
    return lines


def as_csv(jobs: Sequence[Job]) -> str:
    """Return a CSV line per job: its overrides and results."""
    text = io.StringIO()
    rows = [{"job": job.name, **job.overrides, **job.reached} for job in jobs]
    keys = dict.fromkeys(key for job in jobs for key in job.overrides)
    columns = dict.fromkeys(["job", *keys, *(name for job in jobs[:1] for name in job.reached)])
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def task_reward(run: Run) -> str:
    """Return the metric of the task's reward, without a KL part if a run logs that."""
    return REWARD if run.series(REWARD) else "reward/mean"


def count_states(states: Iterable[str]) -> str:
    """Count jobs by state: "2 finished, 1 failed"."""
    return ", ".join(f"{count} {state}" for state, count in Counter(states).items())


def held_out(run: Run, metric: str) -> list[tuple[float, float, float]]:
    """List (iteration, value, KL in nats) of evaluations with a metric and the KL."""
    kls = dict(run.series(EVAL_KL))
    return [(at, value, kls[at]) for at, value in run.series(metric) if at in kls]


def efficiency(run: Run, frontier: Frontier) -> float | None:
    """Return the KL efficiency of the last evaluation."""
    evaluations = held_out(run, frontier.metric)
    return frontier.efficiency(frontier.metric, *evaluations[-1][1:]) if evaluations else None


def find_frontier(folder: Path) -> Frontier | None:
    """Return the frontier of a run or sweep, else the frontier of the sweep around it.

    Return None if its held-out rows are not those that the run evaluates.
    """
    around = [parent for parent in folder.resolve().parents[:3] if is_sweep(parent)]
    files = [place / FRONTIER_FILE for place in (folder, *around)]
    path = next((path for path in files if path.is_file()), None)
    frontier = _read(path, path.stat().st_mtime_ns) if path else None
    return frontier if frontier and has_same_rows(frontier, folder) else None


def find_sweep_frontier(sweep: Sweep) -> Frontier | None:
    """Return the frontier of a sweep, else of one of its jobs if the jobs are comparable."""
    folders = [sweep.folder]
    folders += [job.run.folder for job in sweep.jobs] if comparable(sweep.jobs) else []
    return next(filter(None, map(find_frontier, folders)), None)


def has_same_rows(frontier: Frontier, folder: Path) -> bool:
    """Return whether a frontier has as many rows as a run evaluates; True for a sweep."""
    return read_yaml(folder / "status.json").get("held_out") in (None, frontier.num_prompts)


@lru_cache(maxsize=2)  # the jobs of a sweep share one
def _read(path: Path, _stamp: int) -> Frontier | None:
    return read_frontier(path)
