"""Runs on two nodes, each of one process on this machine: torchrun and accelerate launch."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from runs import ROOT, environment, metrics, train, wait_for

from trainer.runs.run_files import read_status, read_yaml

pytestmark = pytest.mark.scale
TRAIN = str(ROOT / "train.py")
TINY = [
    *("experiment=sft_tiny", "policy.model=tiny", "trainer.num_iterations=4", "seed=5"),
    *("trainer.prompts_per_iteration=4", "eval.max_rows=4", "checkpoint.every=2"),
]


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def torchrun(node: int, port: str) -> tuple[list[str], dict[str, str]]:
    words = ["--nnodes=2", f"--node_rank={node}", "--nproc_per_node=1"]
    words += ["--master_addr=127.0.0.1", f"--master_port={port}"]
    return ["-m", "torch.distributed.run", *words], {}


def rendezvous(node: int, port: str) -> tuple[list[str], dict[str, str]]:
    words = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=7"]
    return ["-m", "torch.distributed.run", *words, f"--rdzv_endpoint=localhost:{port}"], {}


def accelerate(node: int, port: str) -> tuple[list[str], dict[str, str]]:
    words = ["--multi_gpu", "--num_machines=2", f"--machine_rank={node}", "--num_processes=2"]
    words += ["--main_process_ip=127.0.0.1", f"--main_process_port={port}"]
    return ["-m", "accelerate.commands.launch", *words], {}


def start(place: Path, launcher, *words: str) -> list[subprocess.Popen]:
    """Start a command on both nodes, whose folders are not the same."""
    nodes, port = [], free_port()
    for node in range(2):
        (here := place / f"node{node}").mkdir(exist_ok=True, parents=True)
        before, changes = launcher(node, port)
        command = [sys.executable, *before, TRAIN, *words]
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        env = environment(**changes)
        nodes.append(subprocess.Popen(command, cwd=here, env=env, start_new_session=True, **both))
    return nodes


def finish(nodes: Sequence[subprocess.Popen]) -> tuple[list[int], str]:
    """Return the exit codes of both nodes, and what they said."""
    text = "".join(node.communicate(timeout=300)[0] for node in nodes)
    return [node.returncode for node in nodes], text


def run(place: Path, launcher, *words: str) -> str:
    codes, text = finish(start(place, launcher, *words))
    assert codes == [0, 0], text
    return text


@pytest.fixture(scope="module")
def one_node(tmp_path_factory) -> Path:
    """Return a run of two ranks that leash started itself."""
    folder = tmp_path_factory.mktemp("one node") / "run"
    done = train(*TINY, f"output_dir='{folder}'", "launch.num_processes=2")
    assert done.code == 0, done.text
    return folder


@pytest.mark.parametrize("launcher", [torchrun, rendezvous, accelerate])
def test_two_nodes_give_the_run_of_one_to_the_bit(launcher, one_node, tmp_path):
    run(tmp_path, launcher, *TINY, f"output_dir={tmp_path / 'run'}")
    assert metrics(tmp_path / "run") == metrics(one_node)
    weights = [folder / "model" / "model.safetensors" for folder in (tmp_path / "run", one_node)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert (tmp_path / "run" / ".hydra" / "overrides.yaml").is_file()


def test_a_run_goes_on_on_two_nodes_as_on_one(one_node, tmp_path):
    more = ["trainer.num_iterations=6", "launch.num_processes=2"]
    for name in ("own", "theirs"):
        shutil.copytree(one_node, tmp_path / name)
    done = train(f"resume={tmp_path / 'own'}", *more)
    assert done.code == 0, done.text
    text = run(tmp_path, torchrun, f"resume={tmp_path / 'theirs'}", *more)
    assert "going on" in text
    assert metrics(tmp_path / "theirs") == metrics(tmp_path / "own")
    saved = read_yaml(tmp_path / "theirs" / "config.yaml")
    assert saved["trainer"]["num_iterations"] == 6
    assert read_status(tmp_path / "theirs")["resumed"] == "from iteration 4"
    assert not list((tmp_path / "theirs").glob(".config*"))
    text = run(tmp_path, torchrun, f"resume={tmp_path / 'theirs'}")
    assert "is finished: 6 of 6 iterations" in text


def test_modes_and_the_preflight_go_on_two_nodes(one_node, tmp_path):
    assert run(tmp_path, torchrun, *TINY, "preflight=true").count("preflight: no problem") == 1
    shutil.copytree(one_node, tmp_path / "run")
    resume = f"resume={tmp_path / 'run'}"
    run(tmp_path, torchrun, resume, "mode=evaluate")
    theirs = (tmp_path / "run" / "eval.json").read_text()
    assert train(resume, "mode=evaluate", "launch.num_processes=2").code == 0
    assert (tmp_path / "run" / "eval.json").read_text() == theirs
    codes, text = finish(start(tmp_path, torchrun, resume, "mode=chat"))
    assert all(codes)
    assert "error: mode=chat is one process" in text


TASK = """
import os, time
from pathlib import Path
from envs.tasks import SortDigits

class Task(SortDigits):
    def reward(self, row, reply):
        if os.environ["RANK"] == "1":
            raise ValueError("this reward is sour")
        return super().reward(row, reply)
"""


def test_a_rank_that_fails_on_the_other_node_is_the_reason(tmp_path, monkeypatch):
    (tmp_path / "sour.py").write_text(TASK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = [word for word in TINY if not word.startswith("experiment")]
    words += ["experiment=grpo_tiny", "env.task._target_=sour.Task", "allow_targets=true"]

    def with_path(node: int, port: str) -> tuple[list[str], dict[str, str]]:
        before, changes = torchrun(node, port)
        return before, changes | {"PYTHONPATH": str(tmp_path)}

    codes, text = finish(start(tmp_path, with_path, *words, f"output_dir={tmp_path / 'run'}"))
    assert all(codes), text
    status = read_status(tmp_path / "run")
    assert (status["state"], "this reward is sour" in status["reason"]) == ("failed", True), status
    assert "this reward is sour" in (tmp_path / "run" / "errors" / "rank1.txt").read_text()


def test_a_signal_to_one_node_saves_and_the_run_goes_on(one_node, tmp_path):
    words = [word for word in TINY if not word.startswith("trainer.num_iterations")]
    folder = tmp_path / "run"
    nodes = start(tmp_path, torchrun, *words, "trainer.num_iterations=4000", f"output_dir={folder}")
    wait_for(lambda: any((folder / "checkpoints").glob("iteration_*")), nodes[0])
    os.kill(nodes[1].pid, signal.SIGTERM)
    codes, text = finish(nodes)
    assert all(codes), text
    status = read_status(folder)
    assert status["state"] == "preempted"
    run(tmp_path, torchrun, f"resume={folder}", f"trainer.num_iterations={status['iteration'] + 2}")
    assert read_status(folder)["resumed"] == f"from iteration {status['iteration']}"


SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
"$@" & other=$!
"$@"; code=$?
wait $other || exit
exit $code
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo localhost; else echo "$@" > requeued; fi
"""


def test_the_script_for_sbatch_runs_and_goes_on_when_it_is_queued_again(tmp_path):
    for name, text in ("srun", SRUN), ("scontrol", SCONTROL):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = environment(PATH=f"{tmp_path}:{os.environ['PATH']}", MASTER_PORT=free_port())
    env |= {"SLURM_JOB_ID": "77", "SLURM_SUBMIT_DIR": str(tmp_path)}
    env |= {"SLURM_JOB_NUM_NODES": "2", "TORCHRUN": f"{sys.prefix}/bin/torchrun"}
    long = [word for word in TINY if not word.startswith("trainer.num_iterations")]
    command = ["bash", str(ROOT / "docs" / "slurm.sh"), *long, "trainer.num_iterations=4000"]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    both |= {"env": env | {"TRAIN": TRAIN}, "cwd": tmp_path}
    folder = tmp_path / "outputs" / "slurm" / "77"
    for time in (1, 2):
        process = subprocess.Popen(command, start_new_session=True, **both)
        done = read_status(folder).get("iteration", 0)
        wait_for(lambda done=done: read_status(folder).get("iteration", 0) > done + 2, process)
        ranks = psutil.Process(process.pid).children(recursive=True)
        for rank in (rank for rank in ranks if TRAIN in rank.cmdline()):
            rank.terminate()  # as --signal=TERM@300
        text = process.communicate(timeout=300)[0]
        assert process.returncode, text
        assert (tmp_path / "requeued").read_text() == "requeue 77\n"
        assert ("going on" in text) == (time == 2)
    assert read_status(folder)["state"] == "preempted"
