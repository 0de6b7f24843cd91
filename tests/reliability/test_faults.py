"""Real runs with a fault put in: a full disk, closed streams, a reward that ends the process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from faulty import TINY, one_error
from runs import ROOT, environment, launch, metrics, train, wait_for

from trainer.runs.run_files import read_status

pytestmark = pytest.mark.reliability
TASK = """
from envs.tasks import SortDigits

class Task(SortDigits):
    count = 0

    def reward(self, row, reply):
        self.count += 1
        if self.count == 40:
            raise {fault}("by a reward")
        return super().reward(row, reply)
"""
FULL = """
mkdir -p {disk} && mount -t tmpfs -o size={size}k tmpfs {disk} || exit 77
cd {root}; {python} train.py {words} output_dir={disk}/run 2>&1; code=$?
cat {disk}/run/status.json > {out}/status.json
exit $code
"""


@pytest.mark.parametrize("size", [24, 200, 600])
def test_a_full_disk_is_one_line_and_a_true_status(tmp_path, size):
    """Disks of several sizes, in kB, full at another write each."""
    if not shutil.which("unshare"):
        pytest.skip("needs unshare")
    parts = {"disk": tmp_path / "disk", "size": size, "out": tmp_path, "words": " ".join(TINY)}
    code = FULL.format(root=ROOT, python=sys.executable, **parts)
    done = subprocess.run(
        ["unshare", "-rm", "bash", "-c", code], env=environment(), capture_output=True, text=True
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("may not mount a disk of its own")
    assert done.returncode in (1, 2), done.stdout
    assert "No space left on device" in one_error(done.stdout)
    if text := (tmp_path / "status.json").read_text():
        assert json.loads(text)["state"] == "failed"


def test_a_run_needs_no_open_streams(tmp_path):
    words = " ".join([*TINY, f"output_dir={tmp_path}/run"])
    command = f"{sys.executable} {ROOT}/train.py {words} <&- >&- 2>&-"
    done = subprocess.run(["bash", "-c", command], env=environment(), timeout=600)
    assert done.returncode == 0
    assert read_status(tmp_path / "run")["state"] == "finished"
    assert metrics(tmp_path / "run")[-1]["progress/iteration"] == 4
    assert "\n" not in (tmp_path / "run" / ".lock").read_text(), "no print went into a file"


def test_an_optimised_python_trains_too(tmp_path):
    done = train(*TINY, f"output_dir={tmp_path}/run", PYTHONOPTIMIZE="2")
    assert done.code == 0, done.text


@pytest.mark.parametrize("fault", ["KeyboardInterrupt", "SystemExit"])
def test_what_ends_a_process_fails_a_run_when_a_reward_raises_it(tmp_path, fault):
    (tmp_path / "own_task.py").write_text(TASK.format(fault=fault))
    words = ["allow_targets=true", "env.task._target_=own_task.Task"]
    done = train(*TINY, *words, f"output_dir={tmp_path}/run", PYTHONPATH=str(tmp_path))
    assert done.code == 1
    assert fault in one_error(done.text)
    assert read_status(tmp_path / "run")["state"] == "failed"


def test_a_longer_run_is_the_one_that_was_never_ended_but_for_its_evaluation_there(tmp_path):
    short, whole = tmp_path / "short", tmp_path / "whole"
    steady = [*TINY, "optimizer.schedule=constant"]  # a linear one depends on the length
    words = [word.replace("num_iterations=4", "num_iterations=6") for word in steady]
    for done in (
        train(*steady, f"output_dir={short}"),
        train(f"resume={short}", "trainer.num_iterations=6"),
        train(*words, f"output_dir={whole}"),
    ):
        assert done.code == 0, done.text
    rows = metrics(short)
    measured = {key for key in rows[4] if key.startswith("eval/")}
    assert measured, "what was measured at its end stays"
    rows[4] = {key: value for key, value in rows[4].items() if key not in measured}
    assert rows == metrics(whole)
    assert read_status(short)["objective"] == read_status(whole)["objective"]


def test_a_signal_after_the_end_leaves_a_run_finished_with_exit_code_0(tmp_path):
    folder = tmp_path / "run"
    process = launch(*TINY, f"output_dir={folder}")
    wait_for(lambda: read_status(folder).get("state") == "finished", process)
    for _ in range(3):
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.02)
    text = process.communicate(timeout=300)[0]
    assert (process.returncode, read_status(folder)["state"]) == (0, "finished"), text
