"""Whole runs through the command line, and what they leave behind."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose_checked

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join([str(ROOT), str(ROOT / "tests")])  # of a process that imports `support`


# A run of seconds that does all that a long one does.
SMALL = (
    "experiment=grpo_tiny",
    "seed=5",
    "kl.coeff=1",
    "trainer.num_iterations=16",
    "trainer.prompts_per_iteration=8",
    "optimizer.schedule=constant",  # a short run is the beginning of a longer one
    "algorithm.group_size=4",
    "eval.max_rows=16",
    "eval.num_samples=2",
    "checkpoint.every=2",
)


WANDB = ("tracker=wandb", "tracker.mode=offline")


@dataclass(frozen=True)
class Finished:
    """How a command ended: its exit code, all it wrote, the seconds it took, its run folder."""

    code: int
    text: str
    seconds: float
    folder: Path = Path()


def environment(**changes: str) -> dict[str, str]:
    """Return an environment without accounts and without the network."""
    hidden = ("WANDB_API_KEY", "WANDB_MODE", "WORLD_SIZE", "PYTHONPATH")
    env = {k: v for k, v in os.environ.items() if k not in hidden}
    return {**env, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **changes}


def launch(*overrides: str, **changes: str) -> subprocess.Popen:
    """Start `python train.py overrides...`; its output is one text."""
    command = [sys.executable, str(ROOT / "train.py"), *overrides]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment(**changes), start_new_session=True, **both)


def train(*overrides: str, **changes: str) -> Finished:
    """Run `python train.py overrides...` to its end."""
    start = time.perf_counter()
    process = launch(*overrides, **changes)
    text = process.communicate(timeout=900)[0]
    return Finished(process.returncode, text, time.perf_counter() - start)


def on_two_ranks(script: str, folder: Path) -> None:
    """Run a module on two ranks, which write into `folder`, without a launcher."""
    with socket.socket() as held:  # as trainer/runs/launch.py does
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = str(held.getsockname()[1])
        env = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, PYTHONPATH=PATH)
        env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        words = [sys.executable, "-m", script, str(folder)]
        with (folder / "said").open("w") as file:
            both = {"stdout": file, "stderr": file}
            envs = [env | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
            ranks = [subprocess.Popen(words, env=env, **both) for env in envs]
        try:
            codes = [rank.wait(timeout=400) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert codes == [0, 0], (folder / "said").read_text()


def train_here(folder: Path, *words: str) -> list[dict]:
    """Run in this process what words compose, in a folder; return the lines of its metrics."""
    from omegaconf import OmegaConf

    import train as script
    from conf.compose import compose_checked

    script.train(OmegaConf.create(compose_checked(words)), folder)
    return lines(folder / "metrics.jsonl")


def asked(words: Sequence[str]) -> dict[str, Any]:
    """Return the checked configuration of what words ask for: training, a resume or a mode."""
    from conf.compose import compose
    from conf.job import read_job

    cfg = compose(words)
    return read_job(cfg, Path(cfg.output_dir or "no such folder"), words, in_sweep=False)


def do(folder: Path, *words: str) -> float:
    """Do in this process what words ask for beside training; `folder` is the one to be removed."""
    from omegaconf import OmegaConf

    import train as script

    return script.train(OmegaConf.create(asked(words)), folder)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(folder: Path) -> list[dict]:
    """Return metrics.jsonl without what depends on the machine."""
    return [
        {k: v for k, v in line.items() if not k.startswith(("time/", "perf/"))}
        for line in lines(folder / "metrics.jsonl")
    ]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen, seconds: float = 300):
    """Wait until a condition holds; fail if the process ends before, or after `seconds`."""
    limit = time.perf_counter() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.perf_counter() < limit, "the run did not get that far in time"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(*pids: int, within: float = 10.0) -> bool:
    end = time.monotonic() + within
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


def refusal(*words: str) -> str:
    """Return the one line that says why words do not compose."""
    with pytest.raises(ValueError, match=r".") as caught:
        compose_checked(words)
    message = str(caught.value)
    assert "\n" not in message
    return message
