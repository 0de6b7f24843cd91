"""The jobs of a sweep, in turn or side by side (conf/side_by_side.py).

A sweep goes on by the command of before with hydra.sweep.dir=<its folder>: jobs that are finished
stay as they are, others go on at their last checkpoint, as by resume=, or are begun. A job that is
not the one in its folder is refused before the first starts.
"""

import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.command_line import check_overrides, check_single, read_override, swept_by_experiment
from conf.compose import compose_checked, compose_raw
from conf.interpolations import bounded
from conf.resume import load_for_resume, told_again
from conf.start import Job, run_folder
from trainer.reports.sweep import LiveSweep
from trainer.runs.failures import complain, say
from trainer.runs.find import find_jobs
from trainer.runs.folders import holds_run
from trainer.runs.job_names import job_names
from trainer.runs.lock import held
from trainer.runs.run_files import read_status
from trainer.runs.saved_configs import holds_same

OUTPUT = "output.txt"  # in the folder of a job that runs beside others: what it printed
MOST = 1_000  # jobs; each is checked before the first starts


@dataclass(frozen=True)
class Sweep:
    """The folder of a sweep, its words, and the words and the folder of each of its jobs.

    `launcher`: the words that choose Hydra's launcher for jobs side by side; none: in turn.
    """

    folder: Path
    words: list[str]
    jobs: list[list[str]]
    folders: list[str]
    launcher: list[str]

    def job(self, number: int) -> Job:
        """Return what is to be done of a job: all, the rest, or nothing."""
        config, place = compose_checked(self.jobs[number]), self.folder / self.folders[number]
        composed = compose_raw(self.jobs[number], with_hydra=True)
        if not holds_same(place, config):
            return Job(place, config, composed=composed)
        if read_status(place).get("state") == "finished":
            return Job(place, config, "finished already")
        leave = [word for word in self.jobs[number] if word.startswith("allow_targets=")]
        sent = {*told_again(config)}  # it has the words of this sweep, see holds_same
        leave += [f"{key}={text}" for key, text in sorted(sent)]
        return Job(place, load_for_resume(str(place), leave))

    def ranks(self, number: int) -> int:
        """Return the processes of a job."""
        return compose_checked(self.jobs[number])["launch"]["num_processes"]

    def batches(self) -> Iterator[list[int]]:
        """Yield the numbers of jobs that may begin; the next ones once these have ended."""
        yield [*range(len(self.jobs))]

    def count(self) -> int:
        """Return how many jobs there will be."""
        return len(self.jobs)

    def run(self, run: Callable[[Job], None]) -> int:
        """Call `run` with each job, the others too if one fails; return the exit code.

        The page of the sweep is kept up to date.
        """
        failed = list[str]()
        pages = LiveSweep(
            self.folder, self.jobs, names=self.folders, words=self.words, count=self.count
        )
        try:
            for numbers in self.batches():
                failed += (self._together if self.launcher else self._in_turn)(numbers, run, pages)
        except KeyboardInterrupt:  # outside of a run
            say("stopped between two jobs")
            return 130
        finally:
            pages.end()
        for name in failed:
            print(f"failed   {name}", file=sys.stderr)
        return 1 if failed else 0

    def _in_turn(
        self, numbers: Sequence[int], run: Callable[[Job], None], pages: LiveSweep
    ) -> list[str]:
        failed = []
        for number in numbers:
            try:
                job = self.job(number)
                pages.begin(number, job.done)
                if not job.done:
                    run(job)
            except (RuntimeError, ValueError, OSError) as error:
                complain(error)
                failed.append(self.folders[number])
        return failed

    def _together(
        self, numbers: Sequence[int], run: Callable[[Job], None], pages: LiveSweep
    ) -> list[str]:
        from conf.side_by_side import run_side_by_side  # here: it needs a launcher's package

        if left := pages.begin_together(numbers):
            run_side_by_side(self, left, run, stop=pages.stop)
        failed = [self.folders[number] for number in numbers]
        failed = [n for n in failed if read_status(self.folder / n).get("state") != "finished"]
        return [f"{name}: {_last_error(self.folder / name)}" for name in failed]


def _last_error(folder: Path) -> str:
    """Return the last error among what a job printed, or where that is."""
    path = folder / OUTPUT
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    errors = [line for line in lines if line.startswith("error: ")]
    return errors[-1].removeprefix("error: ") if errors else f"see {path}"


def list_jobs(words: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each job of a sweep, as Hydra's basic sweeper makes them.

    What the experiment itself sweeps (hydra.sweeper.params) is among them.

    >>> list_jobs(["kl.coeff=0,0.1", "seed=1"])
    [['kl.coeff=0', 'seed=1'], ['kl.coeff=0.1', 'seed=1']]
    """
    check_overrides(words)
    brought = {key: f"{key}={values}" for key, values in swept_by_experiment(words).items()}
    choices = []
    for word in (brought | {word.partition("=")[0]: word for word in words}).values():
        item = read_override(word)
        if not item.is_sweep_override():
            choices.append([word])
            continue
        key = item.get_key_element()
        if item.is_interval_sweep() or "glob(" in word:
            values = f"{key}=a,b,c or {key}=range(0,3)"
            told = "interval() is for a search, hydra/sweeper=optuna; glob does not work"
            raise ValueError(f"{word}: a sweep takes values, {values}; {told}")
        values = itertools.islice(item.sweep_string_iterator(), MOST + 1)
        choices.append([f"{key}={value}" for value in values])
        if not choices[-1]:
            raise ValueError(f"{word} gives no value; a range ends before its stop: range(0,3)")
    if (count := math.prod(map(len, choices))) > MOST:
        few = "give fewer values, or several sweeps"
        raise ValueError(f"expected at most {MOST:,} jobs of a sweep, got {count:,} or more; {few}")
    return [list(job) for job in itertools.product(*choices)]


def split_launcher(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words on Hydra's launcher, none for jobs in turn, and the others.

    >>> split_launcher(["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=1,2"])
    (['hydra/launcher=joblib', 'hydra.launcher.n_jobs=2'], ['seed=1,2'])
    """
    own = [word for word in words if re.match(r"\+*hydra[/.]launcher\b", word)]
    rest = [word for word in words if word not in own]
    for word in own:
        if "_target_" in word or not re.match(r"hydra/launcher=|\+?hydra\.launcher\.", word):
            raise ValueError(f"{word}: a launcher is named by hydra/launcher=, as joblib")
    if not [word for word in own if word.startswith("hydra/launcher=")] and own:
        raise ValueError(f"{own[0]} is for a launcher; name it too, as hydra/launcher=joblib")
    if "hydra/launcher=basic" in own:
        own = []
    elif own:
        from conf.side_by_side import compose_launcher  # here: most sweeps go in turn

        compose_launcher(own, Path("multirun"))
    return own, rest


def read_sweep(words: list[str]) -> Sweep:
    """Check the jobs of a sweep, and those that lie in its folder already."""
    launcher, rest = split_launcher(words)
    if own := [word for word in rest if re.match(r"\+*hydra[/.]sweeper\b", word)]:
        if "hydra/sweeper=optuna" in own:
            from conf.search import read_search  # here: it needs Optuna

            return read_search(words, own, launcher)
        if own != ["hydra/sweeper=basic"]:
            raise ValueError(f"{own[0]}: expected hydra/sweeper=optuna and its keys, or neither")
        rest.remove(own[0])
    jobs = list_jobs(rest)
    for job in jobs:
        check_single(job)
        if compose_checked(job)["output_dir"]:
            raise ValueError("output_dir is one folder; a sweep takes hydra.sweep.dir=")
    folder = run_folder(jobs[0], sweep=True)
    sweep = Sweep(folder, words, jobs, _job_folders(jobs), launcher)
    for other in (there := find_jobs(folder)):
        if str(other.relative_to(folder)) not in sweep.folders:
            raise ValueError(
                f"{folder} holds {other.name}, which is none of these jobs; give the words of that "
                "sweep (more values of a key may follow), or another hydra.sweep.dir"
            )
    if there:
        with held(folder):  # else another process goes on with it
            for number, name in enumerate(sweep.folders):
                if holds_run(folder / name):
                    sweep.job(number)
    return sweep


@bounded()
def _job_folders(jobs: Sequence[Sequence[str]]) -> list[str]:
    """Return the names of the jobs' folders, also where hydra.sweep.subdir= gives others."""
    if not any(word.startswith("hydra.sweep.subdir=") for word in jobs[0]):
        return job_names(jobs)
    numbered = ([*job, f"hydra.job.num={number}"] for number, job in enumerate(jobs))
    return [str(compose_raw(job, with_hydra=True).hydra.sweep.subdir) for job in numbered]
