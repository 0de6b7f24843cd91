"""Runs under launchers: on two nodes, each of one process on this machine, and on one of two.

They give the run that leash starts itself, and go on to the bit when somebody is stopped or killed.
Sweeps side by side are those in turn, and go on when they were stopped.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support import faults
from support.runs import ROOT, environment, gone, launch, metrics, train, wait_for

from trainer.runs.run_files import load_run, read_status

pytestmark = pytest.mark.scale
TRAIN = str(ROOT / "train.py")
TORCHRUN = ["-m", "torch.distributed.run"]
TINY = [
    *("experiment=sft_tiny", "policy.model=tiny", "seed=5", "optimizer.schedule=constant"),
    *("trainer.prompts_per_iteration=4", "eval.max_rows=4", "checkpoint.every=2"),
]
FOUR = "trainer.num_iterations=4"


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def torchrun(node: int, port: str) -> list[str]:
    words = ["--nnodes=2", f"--node_rank={node}", "--nproc_per_node=1"]
    return [*TORCHRUN, *words, "--master_addr=127.0.0.1", f"--master_port={port}"]


def accelerate(node: int, port: str) -> list[str]:
    words = ["--multi_gpu", "--num_machines=2", f"--machine_rank={node}", "--num_processes=2"]
    words += ["--main_process_ip=127.0.0.1", f"--main_process_port={port}"]
    return ["-m", "accelerate.commands.launch", *words]


def start(*command: str, cwd: Path | None = None, **changes: str) -> subprocess.Popen:
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    env = environment(**changes)
    return subprocess.Popen(command, cwd=cwd, env=env, start_new_session=True, **both)


def start_nodes(place: Path, launcher, *words: str, **changes: str) -> list[subprocess.Popen]:
    """Start a command on both nodes, whose folders are not the same."""
    nodes, port = [], free_port()
    for node in range(2):
        (at := place / f"node{node}").mkdir(exist_ok=True, parents=True)
        command = [sys.executable, *launcher(node, port), TRAIN, *words]
        nodes.append(start(*command, cwd=at, **changes))
    return nodes


def finish(*processes: subprocess.Popen) -> tuple[list[int], str]:
    """Return the exit codes, and all that was printed."""
    text = "".join(process.communicate(timeout=300)[0] for process in processes)
    return [process.returncode for process in processes], text


def run(place: Path, launcher, *words: str) -> str:
    codes, text = finish(*start_nodes(place, launcher, *words))
    assert codes == [0, 0], text
    return text


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def one_node(tmp_path_factory) -> Path:
    """Return a run of two ranks that leash started itself."""
    folder = tmp_path_factory.mktemp("one node") / "run"
    done = train(*TINY, FOUR, f"output_dir='{folder}'", "launch.num_processes=2")
    assert done.code == 0, done.text
    return folder


@pytest.mark.parametrize("launcher", [torchrun, accelerate])
def test_two_nodes_give_the_run_of_one_to_the_bit(launcher, one_node, tmp_path):
    run(tmp_path, launcher, *TINY, FOUR, f"output_dir={tmp_path / 'run'}")
    assert metrics(tmp_path / "run") == metrics(one_node)
    assert weights(tmp_path / "run") == weights(one_node)


TASK = """
import os
from envs.tasks import SortDigits

class Task(SortDigits):
    def reward(self, row, response):
        if os.environ["RANK"] == "1":
            raise ValueError("this reward is sour")
        return super().reward(row, response)
"""


def test_a_rank_that_fails_on_the_other_node_is_the_reason(tmp_path):
    (tmp_path / "sour.py").write_text(TASK)
    words = ["experiment=grpo_tiny", *TINY[1:], FOUR, f"output_dir={tmp_path / 'run'}"]
    words += ["env.task._target_=sour.Task", "allow_targets=true"]
    codes, text = finish(*start_nodes(tmp_path, torchrun, *words, PYTHONPATH=str(tmp_path)))
    assert all(codes), text
    status = read_status(tmp_path / "run")
    assert (status["state"], "this reward is sour" in status["reason"]) == ("failed", True), status
    assert "this reward is sour" in (tmp_path / "run" / "errors" / "rank1.txt").read_text()


def trainers(process: subprocess.Popen) -> dict[int, psutil.Process]:
    """Return the processes below this one that train, by rank."""
    found = psutil.Process(process.pid).children(recursive=True)
    found = [p for p in found if TRAIN in p.cmdline()]
    return {int(p.environ()["RANK"]): p for p in found if "RANK" in p.environ()}


LOST = "error: lost contact with another rank, which failed or was killed (out of memory?)"
FAULTS = {
    ("torchrun", signal.SIGTERM): ("preempted", "stopped by SIGTERM"),
    ("torchrun", signal.SIGINT): ("preempted", "stopped by"),
    ("torchrun", signal.SIGKILL): ("preempted", "the process that started the run is gone"),
    ("rank 1", signal.SIGTERM): ("preempted", "stopped by SIGTERM"),
    ("rank 0", signal.SIGKILL): ("failed", "lost contact with another rank"),
    ("rank 1", signal.SIGKILL): ("failed", "lost contact with another rank"),
}


STANDALONE = [sys.executable, *TORCHRUN, "--standalone", "--nproc_per_node=2", TRAIN]
GRPO = [word.replace("num_iterations=4", "num_iterations=40") for word in faults.TINY]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """Return a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    done = train(*GRPO, "launch.num_processes=2", f"output_dir={folder}")
    assert done.code == 0, done.text
    return folder


@pytest.mark.parametrize(("who", "kind"), FAULTS, ids=lambda x: getattr(x, "name", x))
def test_a_run_whose_launcher_or_rank_ends_leaves_no_process_and_goes_on_to_the_bit(
    who, kind, straight, tmp_path
):
    folder = tmp_path / "run"
    process = start(*STANDALONE, *GRPO, f"output_dir={folder}")
    wait_for(lambda: read_status(folder).get("iteration", 0) >= 4, process)
    ranks = trainers(process)
    assert sorted(ranks) == [0, 1]
    os.kill(process.pid if who == "torchrun" else ranks[int(who[-1])].pid, kind)
    (code,), text = finish(process)
    assert code, text
    assert gone(*(p.pid for p in ranks.values()), within=60), "nobody is left"
    state, reason = FAULTS[who, kind]
    found = load_run(folder)
    assert (found.state, reason in (found.status.get("reason") or "")) == (state, True), text
    assert [line for line in text.splitlines() if line.startswith("error: ")] in ([], [LOST])
    codes, text = finish(start(*STANDALONE, f"resume={folder}"))
    assert codes == [0], text
    assert metrics(folder) == metrics(straight)
    assert weights(folder) == weights(straight)


ELASTIC = ["--nnodes=2", "--nproc_per_node=1", "--rdzv-backend=c10d", "--local-addr=127.0.0.1"]
DEATHS = {"rank 1": (False, 1), "the agent of rank 1": (True, 1), "the node of rank 0": (True, 0)}


@pytest.mark.parametrize("who", DEATHS)
def test_after_any_death_the_same_command_goes_on_to_the_bit(who, straight, tmp_path):
    """Agents that end are started again, as Slurm, Kubernetes and others do."""
    agent_dies, number = DEATHS[who]
    folder, endpoint = tmp_path / "run", f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    command = [sys.executable, *TORCHRUN, *ELASTIC, endpoint, "--max-restarts=2", TRAIN, *GRPO]
    command.append(f"output_dir={folder}")
    agents = [start(*command) for _ in range(2)]
    wait_for(lambda: read_status(folder).get("iteration", 0) >= 4, agents[0])
    node, rank = next(
        (node, ranks[number]) for node, ranks in enumerate(map(trainers, agents)) if number in ranks
    )
    if agent_dies:
        agents[node].kill()
    if who != "the agent of rank 1":
        rank.kill()
    if agent_dies and number == 0:
        wait_for(lambda: read_status(folder).get("state") == "failed", agents[1 - node], 60)
    states, text = [], ""
    for _ in range(300):
        ended = [n for n, agent in enumerate(agents) if agent.poll()]
        for n in ended:
            text += agents[n].communicate()[0]
            states.append(n)
            agents[n] = start(*command)
        if all(agent.poll() == 0 for agent in agents):
            break
        time.sleep(1)
    codes, more = finish(*agents)
    assert codes == [0, 0], text + more
    assert len(states) <= 3, text
    assert "going on" in text + more
    assert metrics(folder) == metrics(straight)
    assert weights(folder) == weights(straight)


SLOW = """
import time
from envs.tasks import SortDigits

class Task(SortDigits):
    def rewards(self, rows, responses):
        time.sleep(35)  # longer than torchrun's default from SIGTERM to SIGKILL
        return [super(Task, self).reward(*pair) for pair in zip(rows, responses)]
"""


def test_a_long_iteration_is_saved_after_sigterm(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    folder = tmp_path / "run"
    words = [*GRPO, f"output_dir={folder}", "env.task._target_=slow.Task", "allow_targets=true"]
    words += ["eval.num_samples=0", "eval.greedy=false"]
    more = {"PYTHONPATH": str(tmp_path), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "280"}
    process = start(*STANDALONE, *words, **more)
    wait_for(lambda: read_status(folder).get("iteration", 0) >= 1, process)
    os.kill(process.pid, signal.SIGTERM)
    (code,), text = finish(process)
    assert code, text
    assert load_run(folder).state == "preempted", text
    assert list((folder / "checkpoints").iterdir())


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
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MASTER_PORT": free_port()}
    env |= {"SLURM_JOB_ID": "77", "SLURM_SUBMIT_DIR": str(tmp_path), "TRAIN": TRAIN}
    env |= {"SLURM_JOB_NUM_NODES": "2", "TORCHRUN": f"{sys.prefix}/bin/torchrun"}
    command = ["bash", str(ROOT / "docs" / "slurm.sh"), *TINY, "trainer.num_iterations=4000"]
    folder = tmp_path / "outputs" / "slurm" / "77"
    for turn in (1, 2):
        done = read_status(folder).get("iteration", 0)
        process = start(*command, cwd=tmp_path, **env)
        wait_for(lambda done=done: read_status(folder).get("iteration", 0) > done + 2, process)
        for each in psutil.Process(process.pid).children(recursive=True):
            if each.name() != "srun" and {TRAIN, env["TORCHRUN"]} & {*each.cmdline()}:
                each.terminate()  # as --signal=TERM@300
        (code,), text = finish(process)
        assert code, text
        assert (tmp_path / "requeued").read_text() == "requeue 77\n"
        assert ("going on" in text) == (turn == 2)
    assert read_status(folder)["state"] == "preempted"


# Sweeps.


SEEDS = [word.replace("seed=5", "seed=1,2,3") for word in TINY]
JOBLIB = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
RAY = pytest.param(("hydra/launcher=ray",), marks=pytest.mark.ray)


@pytest.mark.parametrize("launcher", [JOBLIB, ("hydra/launcher=submitit_local",), RAY])
def test_jobs_side_by_side_are_those_in_turn_to_the_bit(launcher, tmp_path):
    words = ["-m", *SEEDS, FOUR]
    for place, more in ("in turn", ()), ("together", launcher):
        done = train(*words, *more, f"hydra.sweep.dir='{tmp_path / place}'")
        assert done.code == 0, done.text
    for seed in (1, 2, 3):
        one, two = (tmp_path / place / f"seed={seed}" for place in ("in turn", "together"))
        assert metrics(one) == metrics(two)
        for name in ("model/model.safetensors", "config.yaml"):
            assert (one / name).read_bytes() == (two / name).read_bytes()


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("launcher", [JOBLIB, ("hydra/launcher=submitit_local",)])
def test_a_sweep_that_ends_early_takes_its_jobs_along_and_goes_on(launcher, kind, tmp_path):
    words = ["-m", *SEEDS, *launcher, f"hydra.sweep.dir={tmp_path}"]
    process = launch(*words, "trainer.num_iterations=99999")
    saved = "checkpoints/iteration_*"
    wait_for(lambda: sum(any(job.glob(saved)) for job in tmp_path.glob("seed=*")) > 1, process)
    (os.killpg if kind == signal.SIGINT else os.kill)(process.pid, kind)  # as Ctrl-C and kill do
    text = process.communicate(timeout=120)[0]
    assert process.returncode == 128 + kind, text
    begun = [job for job in sorted(tmp_path.glob("seed=*")) if (job / "status.json").exists()]
    assert {load_run(job).state for job in begun} == {"preempted"}
    done = max(read_status(job).get("iteration", 0) for job in begun)
    for path in tmp_path.glob("seed=*/config.yaml"):
        text = path.read_text().replace("num_iterations: 99999", f"num_iterations: {done + 2}")
        path.write_text(text)
    again = train(*words, f"trainer.num_iterations={done + 2}")
    assert again.code == 0, again.text
    for seed in (1, 2, 3):
        job = tmp_path / f"seed={seed}"
        assert read_status(job)["state"] == "finished"
        assert [line["progress/iteration"] for line in metrics(job)] == [*range(done + 3)]
