"""What the jobs of a sweep reached, read from their files, finished or not.

Reward and KL of a job are means over its last ten iterations, at most a quarter of them; the reward
is the task's alone, without a KL part. Jobs are called after what differs between them; those that
differ in the seed alone are one setting.
"""

import csv
import io
import math
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from trainer.limit import FILE, Limit, read_limit
from trainer.metric_names import ACCURACY, HELD_KL, HELD_REWARD
from trainer.reports.formats import nats, one_line, short
from trainer.reports.summary import hydra_path, repeat_command
from trainer.runs.find import find_jobs
from trainer.runs.lock import is_free
from trainer.runs.redact import redact, redact_text
from trainer.runs.run_files import PLACES, Run, dig, is_sweep, load_run, number, read_yaml

PLAN = "sweep.json"  # its words, the folders of its jobs, and whether the sweep has ended
PLACE = "hydra.sweep.dir="
OBJECTIVE, REWARD, KL = "objective", "reward/raw_mean", "kl/ref_sequence"
EFFICIENCY, DRIFT = "kl/efficiency", "kl/behaviour"
COLUMNS = {"objective": (OBJECTIVE, short), "reward": (REWARD, short), "KL": (KL, nats)}
MOST = 20  # settings that the terminal lists
FEW = 3  # of those that are tied


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

    def kl(self, by: str) -> float | None:
        """Return the KL of the replies that `by` is of; of the training ones without another."""
        held = self.reached[HELD_KL] if by in (ACCURACY, HELD_REWARD) else None
        return self.reached[KL] if held is None else held

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
    jobs: tuple[Job, ...]

    @property
    def finished(self) -> tuple[Job, ...]:
        return tuple(job for job in self.jobs if job.state == "finished")

    @property
    def state(self) -> str:
        """Return the states of its jobs: "finished", or "2 finished, 1 failed"."""
        states = counted(job.state for job in self.jobs)
        return states.removeprefix("1 ") if len(self.jobs) == 1 else states

    def spots(self, by: str = REWARD) -> list[tuple[float, float]]:
        """List KL and `by` of its jobs, both of the same prompts where they can be."""
        held = [(job.kl(by), job.reached.get(by)) for job in self.finished or self.jobs]
        return [(kl, value) for kl, value in held if kl is not None and value is not None]

    def place(self, by: str = REWARD) -> tuple[float, float]:
        """Return the mean of its spots."""
        kls, values = zip(*self.spots(by), strict=True)
        return fmean(kls), fmean(values)

    def mean(self, name: str) -> float | None:
        """Average a column over the jobs that have it; the efficiency only if all of them do.

        Jobs without an efficiency are the ones furthest out.
        """
        values = [job.reached[name] for job in self.finished or self.jobs]
        known = [value for value in values if value is not None]
        partial = name == EFFICIENCY and len(known) < len(values)
        return fmean(known) if known and not partial else None

    def numbers(self) -> str:
        """Return its objective, reward and KL as text."""
        means = ((name, form, self.mean(key)) for name, (key, form) in COLUMNS.items())
        text = ", ".join(
            f"{name} {form(value)}" for name, form, value in means if value is not None
        )
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
    def unfinished(self) -> bool:
        """Whether the sweep is over though jobs are not finished."""
        ended = all(job.state == "finished" for job in self.jobs)
        return self.live is False and not (ended and not self.left)


def load_sweep(folder: str | Path) -> Sweep:
    """Read a multirun folder, whatever state it is in."""
    folder = Path(folder)
    plan = read_yaml(folder / PLAN)  # JSON is YAML
    live = not plan.get("ended") and not is_free(folder) if plan else None
    jobs = [_job(load_run(job), job.relative_to(folder).as_posix()) for job in find_jobs(folder)]
    for job in jobs if live else ():  # one at a time: one without a status is the one that begins
        job.reached["state"] = job.state.replace("not started", "starting")
    planned, words = (_texts(plan.get(key)) for key in ("jobs", "words"))
    words = [redact_text(word) for word in words]
    again = (
        shlex.join(["python", "train.py", "-m", *words, f"{PLACE}{hydra_path(folder.resolve())}"])
        if plan
        else ""
    )
    left = sum(not (folder / name).is_dir() for name in planned)
    return Sweep(folder, jobs, left, live, again)


def as_job(folder: Path) -> Job:
    """Read a run that is by itself like a job, by the name of its experiment."""
    run = load_run(folder)
    return _job(run, run.experiment)


def load_jobs(folder: Path) -> Sequence[Job]:
    """Read the jobs of a sweep, or a run as the only job."""
    return load_sweep(folder).jobs if is_sweep(folder) else [as_job(folder)]


def _job(run: Run, name: str) -> Job:
    last = {name: run.series(name)[-1:] for name in (ACCURACY, HELD_REWARD, HELD_KL)}
    trained = {name: value for name, found in last.items() for at, value in found if at >= 1}
    coeff, ends = run.last("kl/coeff"), run.last_ten(KL) or run.last_ten("reward/mean")
    limit = known_limit(run.folder)
    reached = {
        "state": run.state,
        OBJECTIVE: number(run.status.get("objective")),
        ACCURACY: trained.get(ACCURACY),
        REWARD: run.last_ten_mean(task_reward(run)),
        KL: run.last_ten_mean(KL),
        DRIFT: run.last_ten_mean(DRIFT),
        HELD_REWARD: trained.get(HELD_REWARD),
        HELD_KL: trained.get(HELD_KL),
        EFFICIENCY: efficiency(run, limit) if limit else None,
        "kl/coeff": number(dig(run.config, "kl", "coeff")) if coeff is None else coeff,
        "progress/iteration": int(run.metrics[-1]["progress/iteration"]) if run.metrics else 0,
        "iterations_averaged": len(ends),
    }
    overrides = {key: value for key, value in run.overrides.items() if key not in PLACES}
    return Job(name, run, redact(overrides), reached)


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
        name = "all seeds" if differ == ["seed"] else job.label(keys)
        held.setdefault(name, []).append(job)
    labels = {
        name: ", ".join(those[0].overrides.get(key, "-") for key in keys)
        for name, those in held.items()
    }
    return [Setting(name, labels[name] or name, tuple(those)) for name, those in held.items()]


def other_starts(jobs: Sequence[Job]) -> bool:
    """Return whether jobs may start from different models, or on different tasks."""
    return any(key.partition(".")[0] in ("experiment", "policy", "env") for key in varying(jobs))


def other_limits(jobs: Sequence[Job]) -> bool:
    """Return whether jobs may be judged by different references, prompts or ways to sample."""
    ours = {"kl.reference", "kl.refresh_every", "eval.max_rows", "eval.temperature"}
    return other_starts(jobs) or not ours.isdisjoint(varying(jobs))


def start(jobs: Sequence[Job], by: str) -> tuple[float, float] | None:
    """Return KL and reward (or accuracy) before training, the mean over jobs of one start.

    The replies of the first iteration are those of the model before any step.
    """
    spots = []
    for job in jobs:
        name, first = (task_reward(job.run), 1) if by == REWARD else (by, 0)
        values, kls = (dict(job.run.series(n)) for n in (name, KL))
        if first in values and 1 in kls:
            spots.append((kls[1], values[first]))
    if not spots or other_starts(jobs):
        return None
    return fmean(kl for kl, _ in spots), fmean(value for _, value in spots)


def best(jobs: Sequence[Job]) -> Setting | None:
    """Return the setting whose finished jobs have the highest mean objective; of one job, None.

    At equal ones that with the lower KL. Not that of the best job: with many seeds it is the
    luckiest.
    """
    ended = [s for s in grouped(jobs) if s.finished and s.mean(OBJECTIVE) is not None]

    def worth(setting: Setting) -> tuple[float, float]:
        return setting.mean(OBJECTIVE) or 0.0, -(setting.mean(KL) or 0.0)

    return max(ended, key=worth, default=None) if len(jobs) > 1 else None


def tied(jobs: Sequence[Job], found: Setting) -> str:
    """Return a line on the settings that have the objective of the best one, "" if none has."""
    value = found.mean(OBJECTIVE) or 0.0
    ended = [s for s in grouped(jobs) if s.finished and s.name != found.name]
    means = {setting.name: setting.mean(OBJECTIVE) for setting in ended}
    same = [n for n, mean in means.items() if mean is not None and math.isclose(mean, value)]
    listed = ", ".join(same[:FEW]) + (f" and {len(same) - FEW} more" if len(same) > FEW else "")
    return f"tied with {listed}; it has the lowest KL" if same else ""


def results(sweep: Sweep) -> list[str]:
    """Return what a sweep came to for a terminal: a line per setting, the best, what is left."""
    made = grouped(sweep.jobs)
    if len(made) > MOST:  # the best of them
        made = sorted(made, key=lambda s: -(s.mean(OBJECTIVE) or -math.inf))
    names = ("reward", "KL", "objective")
    rows = [["setting", *names, "state"]]
    for setting in made[:MOST]:
        values = [(COLUMNS[name][1], setting.mean(COLUMNS[name][0])) for name in names]
        cells = ["-" if value is None else form(value) for form, value in values]
        rows.append([one_line(setting.name, 48), *cells, setting.state])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows] * bool(made)
    lines += [f"... {len(made) - MOST} more in sweep.html"] * (len(made) > MOST)
    if found := best(sweep.jobs):
        again = repeat_command(found.finished[0].run)
        lines.append(f"best     {found.name} ({found.numbers()})")
        lines += [f"         {same}"] if (same := tied(sweep.jobs, found)) else []
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


def as_markdown(jobs: Sequence[Job]) -> str:
    """Return a table of the settings: reward, held-out accuracy and KL, with those of the start."""
    made, begun = grouped(jobs), [start(jobs, by) for by in (REWARD, ACCURACY)]
    before = [f"; before training {short(spot[1])}" if spot else "" for spot in begun]
    over = {job.reached["iterations_averaged"] or 10 for job in jobs}
    last = f"last {min(over)} iterations" if len(over) == 1 else "last iterations, at most 10"
    names = {
        f"reward ({last}{before[0]})": REWARD,
        f"sampled held-out accuracy (at the end{before[1]})": ACCURACY,
        f"KL, nats per reply ({last})": KL,
        "KL of the held-out replies": HELD_KL,
        "KL efficiency": EFFICIENCY,
    }
    lines = ["| | " + " | ".join(setting.name for setting in made) + " |"]
    lines.append("|" + "---|" * (len(made) + 1))
    for name, column in names.items():
        values = [setting.mean(column) for setting in made]
        if any(value is not None for value in values):
            cells = ["-" if value is None else f"{value:z.2f}" for value in values]
            lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join([*lines, ""])


def task_reward(run: Run) -> str:
    """Name the metric of the task's reward: that without a KL part, where a run has it."""
    return REWARD if run.series(REWARD) else "reward/mean"


def counted(states: Iterable[str]) -> str:
    """Return how many are in which state: "2 finished, 1 failed"."""
    return ", ".join(f"{count} {state}" for state, count in Counter(states).items())


def _texts(found: object) -> list[str]:
    """Return the texts of a list, of a damaged file none."""
    return [item for item in found if isinstance(item, str)] if isinstance(found, list) else []


class Reached(NamedTuple):
    """What an evaluation found: the mean of a metric, and the KL of the same replies, in nats."""

    iteration: float
    value: float
    kl: float


def held_out(run: Run, metric: str) -> list[Reached]:
    """Return the evaluations that measured both a metric and the KL."""
    kls = dict(run.series(HELD_KL))
    return [Reached(i, value, kls[i]) for i, value in run.series(metric) if i in kls]


def efficiency(run: Run, limit: Limit) -> float | None:
    """Return the KL efficiency of the last evaluation."""
    found = held_out(run, limit.metric)
    return limit.efficiency(limit.metric, found[-1].value, found[-1].kl) if found else None


def known_limit(folder: Path) -> Limit | None:
    """Return the limit of a run or sweep: its own, or that of the sweep around it."""
    around = [parent for parent in folder.resolve().parents[:3] if is_sweep(parent)]
    for path in (place / FILE for place in (folder, *around) if (place / FILE).is_file()):
        limit = _read(path, path.stat().st_mtime_ns)
        if limit is not None and of_same_rows(limit, folder):
            return limit
        fault = "damaged" if limit is None else "of other held-out rows"
        again = "remove it, or ask again: --limit"
        print(f"{path} is {fault}, so it is not drawn; {again}", file=sys.stderr)
    return None


def limit_of(sweep: Sweep) -> Limit | None:
    """Return the limit of a sweep: its own, or a job's where all start from one model."""
    if (own := known_limit(sweep.folder)) is not None or other_limits(sweep.jobs):
        return own
    return next(filter(None, (known_limit(job.run.folder) for job in sweep.jobs)), None)


def of_same_rows(limit: Limit, folder: Path) -> bool:
    """Return whether it is of as many rows as a run evaluates; a sweep has no count of its own."""
    rows = read_yaml(folder / "status.json").get("held_out")
    return None in (rows, limit.asked) or rows == limit.asked


@lru_cache(maxsize=2)  # the jobs of a sweep share one
def _read(path: Path, _stamp: int) -> Limit | None:
    return read_limit(path)
