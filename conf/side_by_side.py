"""Jobs of a sweep side by side, by Hydra's own launchers: hydra/launcher=joblib, submitit_slurm ...

What a launcher gets is the number of each job and one function to call with it; what the job is,
its checks and its folder are those of a sweep in turn, and how it went is read from its files.
Hydra's callbacks and its names of folders are not used: a job may run where no callback of this
process can hear it, and `override_dirname` has no name for two values that a disk takes amiss.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from conf.schema import register
from conf.start import Job, set_up
from conf.sweep import OUTPUT
from trainer.reports.sweep import PLAN
from trainer.runs.failures import complain
from trainer.runs.launch import Interrupted, cores
from trainer.runs.run_files import read_yaml
from trainer.runs.slots import gpus_here, holding

ROOT = Path(__file__).parents[1]
EXTRA = "pip install -e '.[sweeps]'"


class Numbered:
    """In place of Hydra's loader, which a launcher asks for the configuration of a job."""

    def load_sweep_config(self, master: DictConfig, overrides: Sequence[str]) -> DictConfig:
        cfg = deepcopy(master)
        with read_write(cfg), open_dict(cfg):
            cfg.job = int(overrides[0])
        return cfg


@dataclass(frozen=True)
class RunJob:
    """Run one job of a sweep, by its number, wherever a launcher calls this; errors are its own."""

    sweep: Any
    run: Callable[[Job], None]
    driver: int  # the process that started the sweep, and the allocation that it is in
    host: str
    allocation: str | None
    gpus: list[str]  # that its jobs share there; where none are, "" for each core or nothing

    def __call__(self, cfg: DictConfig) -> None:
        register.cache_clear()  # the launcher has put the driver's, pickled, in its place
        set_up()
        with suppress(PermissionError):
            os.setsid()  # Ctrl-C in a terminal is for the driver, which tells the jobs
        number: int = cfg.job
        shared = self.gpus if self._is_here() else []
        wanted = self.sweep.ranks(number) if shared else 0
        with holding(self.sweep.folder, shared, wanted, over=self._over) as gpus, _seeing(gpus):
            if not self._over():
                self._run(number)
        if self._is_orphan():
            os._exit(1)  # joblib's would wait for more, minutes long

    def _run(self, number: int) -> None:
        folder = self.sweep.folder / self.sweep.folders[number]
        with _printing_to(folder / OUTPUT), self._stopped_with_the_sweep():
            try:
                job = self.sweep.job(number)
                if not job.done:
                    self.run(job)
            except (RuntimeError, ValueError, OSError) as error:
                complain(error)
            except (Interrupted, KeyboardInterrupt):
                pass  # its status says so

    def _is_here(self) -> bool:
        """Return whether this is the driver's machine, and no job of its own of Slurm's."""
        return self.host == socket.gethostname() and self.allocation == _allocation()

    def _over(self) -> bool:
        """Return whether the sweep was told to stop, or was killed where that can be seen."""
        return bool(read_yaml(self.sweep.folder / PLAN).get("ended")) or self._is_orphan()

    def _is_orphan(self) -> bool:
        import psutil

        try:
            status = psutil.Process(self.driver).status() if self._is_here() else "elsewhere"
        except psutil.NoSuchProcess:
            return True
        return status == psutil.STATUS_ZOMBIE

    @contextmanager
    def _stopped_with_the_sweep(self) -> Iterator[None]:
        """Send this process a SIGTERM when the sweep ends; the run saves what it has."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.5):
                if self._over():
                    return os.kill(os.getpid(), signal.SIGTERM)

        def stop(*_: Any) -> None:
            raise Interrupted(128 + signal.SIGTERM)

        before = signal.signal(signal.SIGTERM, stop)  # until a run has its own
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
            signal.signal(signal.SIGTERM, before)


def _allocation() -> str | None:
    return os.environ.get("SLURM_JOB_ID")


@contextmanager
def _seeing(gpus: Sequence[str]) -> Iterator[None]:
    """Let what starts in a block see some GPUs alone, if any are named."""
    before = {**os.environ}
    if named := ",".join(filter(None, gpus)):
        os.environ["CUDA_VISIBLE_DEVICES"] = named
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _printing_to(path: Path) -> Iterator[None]:
    """Let this process and those that it starts print to the end of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [os.dup(1), os.dup(2)]

    def turn(files: Sequence[int]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, file in enumerate(files, start=1):
            os.dup2(file, number)

    with open(path, "ab") as file:
        turn([file.fileno()] * 2)
        try:
            yield
        finally:
            turn(kept)
            for each in kept:
                os.close(each)


def compose_launcher(words: Sequence[str], folder: Path) -> DictConfig:
    """Return Hydra's configuration with the launcher that words choose, and no file of conf/.

    ValueError if there is no such launcher, or it has no such key.
    """
    place = str(folder.absolute()).replace("'", "\\'")
    fixed = [f"hydra.sweep.dir='{place}'", "hydra.sweep.subdir='.'", "hydra.output_subdir=null"]
    fixed += ["hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.job.name=leash"]
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize(config_path=None, version_base="1.3", job_name="leash"):
            return hydra.compose(overrides=[*fixed, *words], return_hydra_config=True)
    except MissingConfigException:
        chosen = next(word for word in words if word.startswith("hydra/launcher="))
        need = f"joblib, submitit_local and submitit_slurm come with {EXTRA}"
        raise ValueError(f"{chosen}: there is no such launcher here; {need}") from None
    except (HydraException, OmegaConfBaseException) as error:
        told = str(error).split("\n")[0].strip().rstrip(".")
        raise ValueError(
            f"{' '.join(words)}: {told}; leave it out, or see its page (docs/sweeps.md)"
        ) from None


def run_side_by_side(
    sweep: Any, numbers: Sequence[int], run: Callable[[Job], None], *, stop: Callable[[], None]
) -> None:
    """Let the launcher of a sweep run some of its jobs, and wait for all of them.

    The first SIGINT or SIGTERM calls `stop` and lets them end, the second kills them.
    """
    cfg = compose_launcher(sweep.launcher, sweep.folder)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ["PYTHONPATH"] = path  # for processes that import nothing of this one
    gpus = gpus_here()
    if cfg.hydra.launcher._target_.endswith(".LocalLauncher"):  # it starts all of them at once
        gpus = gpus or [""] * cores()
        os.environ.setdefault("OMP_NUM_THREADS", str(max(cores() // len(numbers), 1)))
    task = RunJob(sweep, run, os.getpid(), socket.gethostname(), _allocation(), gpus)
    context = HydraContext(config_loader=Numbered(), callbacks=Callbacks())
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=context, task_function=task, config=cfg
    )
    got: list[int] = []

    def caught(number: int, _: Any) -> None:
        got.append(number)
        stop()
        if len(got) > 1:
            raise KeyboardInterrupt

    before = {kind: signal.signal(kind, caught) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        launcher.launch([[str(number)] for number in numbers], initial_job_idx=0)
    except (Exception, KeyboardInterrupt) as error:
        if not got:
            raise RuntimeError(f"the launcher failed: {type(error).__name__}: {error}") from error
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
    if got:
        raise Interrupted(128 + got[0])
