"""The gate of every command line that trains, and sweeps that go on in their folder. Torch-free.

`check` looks at the words and then at the folders that they name. A sweep goes on by the command of
before with hydra.sweep.dir=<its folder>: jobs that are finished stay as they are, others go on at
their last checkpoint, as by resume=, or are begun. A job that is not the one in its folder is
refused before the first one starts.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import open_dict, read_write

from conf import compose
from conf.explain import compose_raw
from conf.files import holds_run
from conf.words import split
from trainer.reports.about import PLACES
from trainer.reports.sweep import LiveSweep
from trainer.runs.experiment_models import PREFIX
from trainer.runs.job_names import job_names
from trainer.runs.lock import held
from trainer.runs.redact import redact
from trainer.runs.run_files import find_jobs, read_status, read_yaml


def check(words: Sequence[str]) -> compose.Resumed | None:
    """Do `compose.check_words`; of a sweep check the jobs that lie in its folder already."""
    resumed = compose.check_words(words)
    flags, given = split(words)
    if flags and flags <= {"-m", "--multirun"}:
        _check_jobs(compose.expand(given))
    return resumed


def live(words: Sequence[str], folder: str) -> LiveSweep:
    """Return what follows the sweep of a command line in its folder."""
    _, given = split(words)
    jobs = compose.expand(given)
    return LiveSweep(Path(folder), jobs, names=_names(jobs), words=given)


def find(config: dict[str, Any], folder: Path) -> compose.Resumed:
    """Return what is to be done of a job in its folder: all, the rest, or nothing (`done`)."""
    saved = read_yaml(folder / "config.yaml")
    if not saved:
        if (folder / "metrics.jsonl").exists():
            raise ValueError(f"{folder} holds a run without its config.yaml; move it away")
        return compose.Resumed(folder, config, None)
    if lost := config.keys() - saved.keys():
        raise ValueError(f"{folder}/config.yaml is damaged: it has no {min(lost)}; move it away")
    for key, there, asked in _changes(saved, config):
        there, asked = (redact({key: value})[key] for value in (there, asked))
        raise ValueError(
            f"{folder} holds a job with {key}={there}, got {asked}; give the words of that sweep, "
            "or another hydra.sweep.dir"
        )
    if read_status(folder).get("state") == "finished":
        return compose.Resumed(folder, config, "finished already")
    return compose.Resumed(folder, compose.load_for_resume(str(folder), []), None)


def _check_jobs(jobs: Sequence[Sequence[str]]) -> None:
    folder = compose.run_folder(jobs[0], sweep=True)
    if not find_jobs(folder):
        return
    names = _names(jobs)
    for other in find_jobs(folder):
        if str(other.relative_to(folder)) not in names:
            raise ValueError(
                f"{folder} holds {other.name}, which is none of these jobs; give the words of that "
                "sweep (more values of a key may follow), or another hydra.sweep.dir"
            )
    with held(folder):  # else another process goes on with it
        for job, name in zip(jobs, names, strict=True):
            if holds_run(folder / name):
                find(compose.compose_checked(job), folder / name)


def _names(jobs: Sequence[Sequence[str]]) -> list[str]:
    """Return the names of the jobs' folders, also where hydra.sweep.subdir= gives others."""
    if not any(word.startswith("hydra.sweep.subdir=") for word in jobs[0]):
        return job_names(jobs)
    names = []
    for number, job in enumerate(jobs):
        hydra = compose_raw(job, hydra=True).hydra
        with read_write(hydra), open_dict(hydra):
            hydra.job.num = hydra.job.id = number
        names.append(str(hydra.sweep.subdir))
    return names


def _changes(saved: Any, config: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield key, saved and asked value of what differs.

    Of a warm-up the folder of its model is saved.
    """
    if isinstance(saved, dict) and isinstance(config, dict):
        for name in dict.fromkeys([*saved, *config]):
            path = f"{key}.{name}" if key else name
            if path not in PLACES:
                yield from _changes(saved.get(name), config.get(name), path)
    elif saved != config and not str(config).startswith(PREFIX):
        yield key, saved, config
