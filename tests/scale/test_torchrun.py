"""Runs of two ranks under torchrun, of which somebody is stopped or killed: one line, no orphan.

They go on to the bit. The same faults without torchrun: tests/test_train.py, tests/reliability/.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from processes import gone
from runs import ROOT, SMALL, environment, metrics, wait_for

from trainer.runs.run_files import load_run, read_status

pytestmark = pytest.mark.scale
TRAIN = str(ROOT / "train.py")


def start(*words: str) -> subprocess.Popen:
    """Start torchrun, which starts two ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", TRAIN]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, *launcher, *words]
    return subprocess.Popen(command, env=environment(), start_new_session=True, **both)


def ranks(process: subprocess.Popen) -> dict[int, psutil.Process]:
    """Return the processes that train, by rank."""
    found = psutil.Process(process.pid).children(recursive=True)
    found = [p for p in found if TRAIN in p.cmdline()]
    return {int(p.environ()["RANK"]): p for p in found if "RANK" in p.environ()}


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("straight") / "run"
    process = start(*SMALL, f"output_dir={folder}")
    text = process.communicate(timeout=300)[0]
    assert process.returncode == 0, text
    return folder


LOST = "error: lost contact with another rank, which failed or was killed (out of memory?)"
FAULTS = {
    ("torchrun", signal.SIGTERM): ("preempted", "stopped by SIGTERM"),
    ("torchrun", signal.SIGINT): ("preempted", "stopped by"),
    ("torchrun", signal.SIGKILL): ("preempted", "the process that started the run is gone"),
    ("rank 0", signal.SIGTERM): ("preempted", "stopped by SIGTERM"),
    ("rank 1", signal.SIGTERM): ("preempted", "stopped by SIGTERM"),
    ("rank 0", signal.SIGKILL): ("killed", ""),
    ("rank 1", signal.SIGKILL): ("failed", "lost contact with another rank"),
}


@pytest.mark.parametrize(("who", "kind"), FAULTS, ids=lambda x: getattr(x, "name", x))
def test_a_run_under_torchrun_says_one_line_leaves_nobody_and_goes_on(
    who, kind, straight, tmp_path
):
    folder = tmp_path / "run"
    process = start(*SMALL, f"output_dir={folder}")
    wait_for(lambda: read_status(folder).get("iteration", 0) >= 4, process)
    trained = ranks(process)
    assert sorted(trained) == [0, 1]
    victim = process.pid if who == "torchrun" else trained[int(who[-1])].pid
    os.kill(victim, kind)
    text = process.communicate(timeout=120)[0]
    assert process.returncode, text
    pids = [p.pid for p in trained.values()]
    assert gone(*pids, within=60), "nobody is left"
    assert read_status(folder)["iteration"] < 16, "it should have ended half way"
    state, reason = FAULTS[who, kind]
    found = load_run(folder)
    told = found.status.get("reason") or ""
    assert (found.state, reason in told) == (state, True), f"{found.state}: {told}"
    said = [line for line in text.splitlines() if line.startswith("error: ")]
    assert said in ([], [LOST]), text
    again = start(f"resume={folder}")
    text = again.communicate(timeout=300)[0]
    assert again.returncode == 0, text
    assert metrics(folder) == metrics(straight)
    weights = [at / "model" / "model.safetensors" for at in (folder, straight)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_ctrl_c_twice_ends_a_run_under_torchrun_at_once(tmp_path):
    folder = tmp_path / "run"
    words = [word for word in SMALL if not word.startswith("trainer.num_iterations")]
    process = start(*words, "trainer.num_iterations=1000", f"output_dir={folder}")
    wait_for(lambda: read_status(folder).get("iteration", 0) >= 2, process)
    trained = [p.pid for p in ranks(process).values()]
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.3)
    process.communicate(timeout=120)
    assert gone(*trained, within=60)
    assert load_run(folder).state in ("preempted", "failed")
