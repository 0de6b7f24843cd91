"""The command line: Hydra's own, once per run and once per job of a sweep. Torch-free."""

import io
import os
import re
import sys
from contextlib import nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from conf.compose import FAULTS, compose_experiment, explain, set_up, write_defaults
from conf.resume import last_run
from conf.sweep import MULTIRUN, done, end_sweep, gpus_of_a_job, has_ended, read_job
from trainer.runs.failures import complain, say
from trainer.runs.folders import ASIDE, is_main_rank, quoted
from trainer.runs.launch import STOPPED, Compose, Interrupted, prepare, start, worker_command
from trainer.runs.lock import held
from trainer.runs.run_files import read_status


def cli() -> int:
    """Run what the command line asks for; return the exit code.

    0: done, 1: failed, 2: refused before anything started, 130 and 143: stopped by a signal.
    """
    show_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors
    try:
        sys.argv[1:] = expand(sys.argv[1:])
        set_up()
        run()
    except (*FAULTS, ValueError, OSError) as error:
        if show_traceback:
            raise
        if is_main_rank():
            complain(ValueError(explain(error)))
        return 2
    except RuntimeError:  # of a job of a sweep, which has told it
        return 1
    except KeyboardInterrupt:
        say("stopped before it began; nothing is saved")
        return 130
    finally:
        end_sweep()
    return 0


def expand(words: list[str]) -> list[str]:
    """Return the words of a command line with what is short for others, and what they imply.

    env.task=<name> is env.task.name=<name>, resume=last the newest run. A rank that torchrun
    started knows how many ranks there are.
    """
    words = [re.sub(r"^env\.task=(?=\w[\w,]*$)", "env.task.name=", word) for word in words]
    sweeps = not {*MULTIRUN}.isdisjoint(words)
    for place, word in enumerate(words):
        if word == "resume=last":
            trained = any(other.startswith("mode=") for other in words)
            words[place] = word = f"resume={last_run(Path('outputs'), trained=trained)}"
            say(word)
        folder = word.removeprefix("resume=")  # jobs of a sweep have = and , in their names
        if folder != word and not sweeps and re.search(r"^[^'\"].*[^\w./~@+-]", folder):
            words[place] = f"resume={quoted(folder)}"
    if (ranks := int(os.environ.get("WORLD_SIZE") or 1)) > 1:
        if sweeps:
            raise ValueError("a sweep starts its own ranks; type python train.py -m ...")
        words = [*words, f"launch.num_processes={ranks}"]
    return words


@hydra.main(version_base="1.3", config_path=".", config_name="config")
def run(cfg: DictConfig) -> float:
    """Run one job in fresh processes; return the metric of a sweep."""
    set_up()  # a launcher may call this in a process of its own
    job = HydraConfig.get()
    folder = Path(job.runtime.output_dir)
    in_sweep = job.mode == RunMode.MULTIRUN
    try:
        if in_sweep and has_ended(job.sweep.dir):
            raise Interrupted(STOPPED)
        config = read_job(cfg, folder, job.overrides.task, in_sweep=in_sweep)
        if why := done(config):
            say(f"{folder.name}: finished already" if in_sweep else why)
            return float(read_status(folder)["objective"])
        if not config["resume"] and not folder.name.startswith(ASIDE):
            write_defaults(folder, job)
        compose = partial(compose_experiment, allow_targets=cfg.allow_targets)
        if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE") or 1) > 1:
            be_rank(config, folder, compose)
        with gpus_of_a_job(job, config):
            objective = start(config, folder, compose=compose)
    except Interrupted:
        if read_status(folder).get("state") != "finished":
            raise
        return float(read_status(folder)["objective"])
    except (ValueError, RuntimeError, OSError) as error:
        if str(error):  # else the worker has told it
            complain(f"{folder.name}: {error}" if in_sweep else error)
        if in_sweep:
            raise RuntimeError from error  # Hydra goes on with the other jobs
        raise SystemExit(1 if isinstance(error, RuntimeError) else 2) from None
    if folder.name.startswith(ASIDE):
        raise SystemExit(int(objective > 0))  # it found problems
    return objective


def be_rank(config: dict[str, Any], folder: Path, compose: Compose) -> NoReturn:
    """Become the worker of a rank that torchrun or accelerate launch started.

    Each rank composed the same words; the folder is that of rank 0 (trainer/runtime.py).
    """
    with held(folder), nullcontext() if is_main_rank() else redirect_stdout(io.StringIO()):
        path = prepare(config, folder, compose=compose)
    sys.stdout.flush()
    os.execv(sys.executable, worker_command(config, path, folder))
