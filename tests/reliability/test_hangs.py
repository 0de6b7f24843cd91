"""Ranks and rewards that hang: a line says so, and the first SIGTERM ends them."""

import json
import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from processes import gone
from runs import launch, metrics, train, wait_for
from small_faults import TINY, lines_of

from trainer.runs.run_files import read_status

pytestmark = pytest.mark.reliability
LONG = [word.replace("iterations=6", "iterations=20") for word in TINY]  # not over before a signal
# It hangs at its 30th reply, once: where a file says so, on rank 1 if there is one.
TASK = """
import os, time
from pathlib import Path
from envs.tasks import SortDigits

class Task(SortDigits):
    count = 0

    def reward(self, row, reply):
        self.count += 1
        here = Path(__file__).with_name("hang")
        late = self.count * int(os.environ.get("WORLD_SIZE", "1")) > 30
        while late and os.environ.get("RANK", "1") == "1" and here.exists():
            try:
                here.with_name("hangs").touch()
                time.sleep(0.1)
            except BaseException:  # as some people write it
                pass
        return super().reward(row, reply)
"""


def workers_of(process: subprocess.Popen) -> list[int]:
    """Return the process of each rank."""
    found = {}
    for child in psutil.Process(process.pid).children():
        with suppress(psutil.Error):  # others come and go
            if "--worker" in child.cmdline():
                found[child.environ().get("RANK", "0")] = child.pid
    return [found[rank] for rank in sorted(found)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Return the folder of a run that nothing happened to, by its number of ranks."""
    place, done = tmp_path_factory.mktemp("straight"), {}

    def get(ranks: int) -> Path:
        if ranks not in done:
            done[ranks] = place / str(ranks)
            words = [*LONG, f"launch.num_processes={ranks}", f"output_dir={done[ranks]}"]
            assert train(*words).code == 0
        return done[ranks]

    return get


def goes_on(folder: Path, whole: Path) -> None:
    done = train(f"resume={folder}", "allow_targets=true")
    assert done.code == 0, done.text
    assert metrics(folder) == metrics(whole)
    assert read_status(folder)["objective"] == read_status(whole)["objective"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_is_stopped_is_told_of_and_ends_at_the_first_signal(tmp_path, ranks, straight):
    folder = tmp_path / "run"
    process = launch(*LONG, f"launch.num_processes={ranks}", f"output_dir={folder}")
    wait_for(lambda: lines_of(folder) > 3, process)
    pids = workers_of(process)
    os.kill(pids[-1], signal.SIGSTOP)
    told = ""
    while "note: " not in told and (line := process.stdout.readline()):
        told += line
    said = r"note: \w+ has taken \d+ min \d+ s, usually (?!0\.0 )\S+ s \(.*stopped by a sig"
    assert re.search(said, told)
    assert f"kill -CONT {pids[-1]}" in told
    os.kill(process.pid, signal.SIGTERM)
    text = process.communicate(timeout=300)[0]
    assert process.returncode == 143
    assert all(map(gone, pids))
    assert "go on with: " in text
    status = read_status(folder)
    assert (status["state"], status["reason"]) == ("preempted", "stopped by SIGTERM")
    goes_on(folder, straight(ranks))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reward_without_end_is_ended_by_the_first_signal(tmp_path, ranks, straight):
    (tmp_path / "own_task.py").write_text(TASK)
    (tmp_path / "hang").touch()
    folder = tmp_path / "run"
    words = [*LONG, f"launch.num_processes={ranks}", f"output_dir={folder}"]
    words += ["allow_targets=true", "env.task._target_=own_task.Task"]
    process = launch(*words, PYTHONPATH=str(tmp_path))
    wait_for((tmp_path / "hangs").exists, process)
    pids = workers_of(process)
    wait_for(lambda: read_status(folder)["phase"] == "collect", process)
    status = read_status(folder)
    assert status["state"] == "running"
    assert -0.01 <= time.time() - status["phase_since"] < 300  # it is rounded
    os.kill(process.pid, signal.SIGTERM)
    text = process.communicate(timeout=300)[0]
    assert process.returncode == 143
    assert all(map(gone, pids))
    who = "rank 1" if ranks == 2 else "it"
    told = rf"{who} was at collect for [\w ]+ s and was ended"
    assert re.search(rf"{told}; go on with: python train.py resume=", text)
    status = read_status(folder)
    assert status["state"] == "preempted"
    assert re.fullmatch(f"stopped by SIGTERM; {told}", status["reason"])
    (tmp_path / "hang").unlink()
    done = train(f"resume={folder}", "allow_targets=true", PYTHONPATH=str(tmp_path))
    assert done.code == 0, done.text
    assert metrics(folder) == metrics(straight(ranks))


def test_status_says_what_a_run_does_and_since_when(tmp_path):
    folder = tmp_path / "run"
    process = launch(*TINY, f"output_dir={folder}")
    seen = {}
    while process.poll() is None:
        status = read_status(folder)
        if phase := status.get("phase"):
            assert -0.01 <= time.time() - status["phase_since"] < 300
            seen[phase] = status.get("phase_share")
        time.sleep(0.002)
    process.communicate()
    assert {"evaluate", "collect", "update"} <= {*seen}  # of the short ones see test_every_write.py
    assert seen["collect"] is None
    assert 0 <= seen["evaluate"] <= 1
    assert not [key for key in json.loads((folder / "status.json").read_text()) if "phase" in key]
