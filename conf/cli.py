"""The command line on Hydra, called once per run and per job of a sweep. Torch-free."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from conf.compose import (
    FAULTS,
    compose_experiment,
    explain,
    is_temporary,
    set_up,
    write_defaults,
)
from conf.job import read_job
from conf.run import worker
from conf.schema import FOLDER, all_keys
from trainer.runs.failures import TRACEBACKS, print_error, say
from trainer.runs.folders import PLAN, TEMPORARY, is_main_rank, quoted
from trainer.runs.launch import STOPPED, Interrupted, prepare, start, worker_command
from trainer.runs.lock import locked, reserved_gpus
from trainer.runs.run_files import read_status, read_yaml
from trainer.runs.run_log import VERBOSE, run_log

MULTIRUN = ("-m", "--multirun")
TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # of srun and mpirun


def cli() -> int:
    """Run the command line; return the exit code.

    0: done, 1: failed, 2: refused before the start, 130 and 143: stopped by a signal.
    """
    os.environ.setdefault(TRACEBACKS, os.environ.get("HYDRA_FULL_ERROR", "0"))
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors
    try:
        sys.argv[1:] = expand(sys.argv[1:])
        set_up()
        run()
    except (*FAULTS, ValueError, OSError) as error:
        if is_main_rank():
            print_error(ValueError(explain(error)))
        return 2
    except RuntimeError as error:
        if error.args:  # a launcher's error; a job prints its error and raises an empty one
            print_error(error)
        return 1
    except KeyboardInterrupt:
        say("stopped before it began; nothing new is saved")
        return 130
    finally:
        if sweep := sys.modules.get("conf.sweep"):  # this process began one
            sweep.end()
    return 0


class Checks(Callback):
    """Check a run, or all jobs of a sweep, before Hydra starts one."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Refuse a run with a fault."""
        with _refused(config):
            folder = Path("." if is_temporary(config) else config.hydra.run.dir)
            read_job(config, folder, config.hydra.overrides.task, in_sweep=False)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Refuse a sweep with a faulty job, else begin its folder."""
        from conf import sweep  # one run has none

        with _refused(config):
            sweep.begin(config, [w for w in sys.argv[1:] if w not in MULTIRUN])

    def on_job_end(self, config: DictConfig, **_: Any) -> None:
        """Rewrite the page of the sweep."""
        if config.hydra.mode == RunMode.MULTIRUN:
            from conf import sweep

            with suppress(OSError):  # a full disk
                sweep.write_page(Path(config.hydra.sweep.dir))


@contextmanager
def _refused(config: DictConfig) -> Iterator[None]:
    """End the process on a fault: Hydra only warns of errors in callbacks."""
    HydraConfig.instance().set_config(config.copy())  # for `compose`; Hydra does so for a job
    if verbose := config.hydra.verbose:  # true, a logger's name, or several
        names = verbose if OmegaConf.is_list(verbose) else [str(verbose).replace("True", "true")]
        os.environ[VERBOSE] = ",".join(names)
    try:
        yield
    except (*FAULTS, ValueError, OSError) as error:
        if is_main_rank():
            print_error(ValueError(explain(error)))
        raise SystemExit(2) from None


def expand(words: list[str]) -> list[str]:
    """Expand the shorthands of a command line.

    env.task=<name> becomes env.task.name=<name>, and resume=last the newest run. With resume=, keys
    that only some files declare are allowed (env.match of env=answers). A rank of torchrun adds the
    number of ranks, and resume=auto if torchrun may restart it. Raise ValueError for a word that
    removes a group or a key of leash.
    """
    for word in words:
        _refuse_removal(word)
    words = [re.sub(r"^env\.task=(?=\w[\w,]*$)", "env.task.name=", word) for word in words]
    sweeps = not {*MULTIRUN}.isdisjoint(words)
    for place, word in enumerate(words):
        if word == "resume=last":
            from conf.resume import last_run  # a run that begins does not need it

            trained = any(other.startswith("mode=") for other in words)
            words[place] = word = f"resume={last_run(Path('outputs'), trained=trained)}"
            say(word)
        folder = word.removeprefix("resume=")  # names of sweep jobs contain = and ,
        if folder != word and not sweeps and re.search(r"^[^'\"].*[^\w./~@+-]", folder):
            words[place] = f"resume={quoted(folder)}"
    if any(word.startswith("resume=") for word in words):
        words = [*map(_of_the_run, words)]
    several = [name for name in TASKS if int(os.environ.get(name) or 1) > 1]
    if several and "WORLD_SIZE" not in os.environ:
        name, tasks = several[0], os.environ[several[0]]
        one = f"for one, start one task with launch.num_processes={tasks} or torchrun"
        each = f"for {tasks}, unset {name}"
        raise ValueError(f"{name}={tasks} would be {tasks} runs; {one} (docs/slurm.sh); {each}")
    if (ranks := int(os.environ.get("WORLD_SIZE") or 1)) > 1:
        if sweeps:
            raise ValueError("a sweep starts its own ranks; type python train.py -m ...")
        words = [*words, f"launch.num_processes={ranks}"]
    # The count of restarts does not tell: torchrun omits restarts for a node that came back.
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0)
    if restarts and not any(re.match("(resume|mode|preflight)=", word) for word in words):
        words = [*words, "resume=auto"]
    return words


def _of_the_run(word: str) -> str:
    """Prefix a word with "++" if only some files declare its key: the resumed run may have it."""
    part, key = all_keys().get(word.partition("=")[0], ("", None))
    return f"++{word}" if key and "=" in part else word


def _refuse_removal(word: str) -> None:
    key = word.lstrip("~").partition("=")[0]
    if not word.startswith("~") or key not in all_keys():
        return
    if files := sorted(path.stem for path in (FOLDER / key).glob("*.yaml")):
        remedy = f"{key}={'|'.join(files)}"
        if key == "kl":
            remedy += "; kl.coeff=0 charges no KL"
        raise ValueError(f"{word}: a group is replaced, never removed: {remedy}")
    raise ValueError(f"{word}: a key of leash is set, never removed: {key}=<value>")


@hydra.main(version_base="1.3", config_path=".", config_name="config")
def run(cfg: DictConfig) -> float:
    """Run one job, usually in fresh processes; return the metric of a sweep."""
    set_up()  # a launcher may call this in a separate process
    job = HydraConfig.get()
    folder, in_sweep = Path(job.runtime.output_dir), job.mode == RunMode.MULTIRUN
    compose = partial(compose_experiment, allow_targets=cfg.allow_targets)
    try:
        if in_sweep and read_yaml(Path(job.sweep.dir) / PLAN).get("ended"):  # the sweep was stopped
            raise Interrupted(STOPPED)
        config = read_job(cfg, folder, job.overrides.task, in_sweep=in_sweep)
        if config["resume"]:
            from trainer.runs.discover import nothing_left  # a run that begins does not need it

            if why := nothing_left(config):
                say(f"{folder.name}: finished already" if in_sweep else why)
                return float(read_status(Path(config["resume"]))["objective"])
        if not config["resume"] and not folder.name.startswith(TEMPORARY):
            write_defaults(folder, job)
        if int(os.environ.get("WORLD_SIZE") or 1) > 1:  # started by torchrun: become a worker
            with locked(folder), run_log(folder):
                prepare(config, folder, compose=compose, worker=worker)
            os.execv(sys.executable, worker_command(config, folder))
        in_turn = not in_sweep or job.launcher._target_.endswith(".BasicLauncher")
        on_cpu = config["policy"]["device"] == "cpu"
        with reserved_gpus(0 if in_turn or on_cpu else config["launch"]["num_processes"]):
            objective = start(config, folder, compose=compose, worker=worker)
    except (ValueError, RuntimeError, OSError) as error:
        print_error(f"{folder.name}: {error}" if in_sweep else error)
        if in_sweep:
            raise RuntimeError from error  # Hydra continues with the other jobs
        raise SystemExit(1 if isinstance(error, RuntimeError) else 2) from None
    if folder.name.startswith(TEMPORARY):
        raise SystemExit(int(objective > 0))  # 1 if preflight found problems
    return objective
