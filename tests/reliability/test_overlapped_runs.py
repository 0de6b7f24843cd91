"""Runs that sample ahead: a kill of any of their processes, and stops in each phase."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from overlapped import Slow
from processes import gone
from runs import launch, metrics, train, train_here, wait_for
from safetensors.torch import load_file
from small_faults import TINY

import conf.build
from trainer.runs.run_files import read_status

pytestmark = pytest.mark.reliability
GIVEN = {"trainer.num_iterations": 16, "checkpoint.every": 1, "eval.every": 3, "trainer.overlap": 2}
WORDS = [word for word in TINY if word.partition("=")[0] not in GIVEN]
WORDS += [f"{key}={value}" for key, value in GIVEN.items()]
TASK = """
import time
from pathlib import Path
from envs.tasks import SortDigits

class Task(SortDigits):
    count = 0

    def reward(self, row, reply):
        self.count += 1
        here = Path(__file__).with_name("hang")
        while self.count > 30 and here.exists():
            here.with_name("hangs").touch()
            time.sleep(0.1)
        return super().reward(row, reply)
"""


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert train(*WORDS, f"output_dir={folder}").code == 0
    return folder


def learnt(folder: Path) -> tuple[list[dict], bytes]:
    rows = metrics(folder)
    for row in rows:
        row.pop("sync/probe_before", None)  # after what it came depends on the stop
    return rows, (folder / "model" / "model.safetensors").read_bytes()


def processes_of(run: subprocess.Popen) -> dict[str, list[int]]:
    """Return the processes of a run: who started it, its ranks, and those that sample."""
    found = {"parent": [run.pid], "rank": list[int](), "second": list[int]()}
    for child in psutil.Process(run.pid).children(recursive=True):
        with suppress(psutil.Error):  # others come and go
            words = " ".join(child.cmdline())
            found["rank"] += [child.pid] if "--worker" in words else []
            found["second"] += [child.pid] if "policies.beside" in words else []
    return found


def goes_on(folder: Path, whole: Path) -> None:
    done = train(f"resume={folder}", "allow_targets=true")
    assert done.code == 0, done.text
    assert learnt(folder) == learnt(whole)


@pytest.mark.parametrize("who", ["parent", "rank", "second"])
def test_a_run_that_samples_ahead_goes_on_after_a_kill_of_any_process(who, straight, tmp_path):
    folder = tmp_path / "run"
    run = launch(*WORDS, f"output_dir={folder}")
    wait_for(lambda: (folder / "checkpoints" / "iteration_000004").exists(), run)
    every = processes_of(run)
    assert len(every["rank"]) == len(every["second"]) == 1
    os.kill(every[who][0], signal.SIGKILL)
    text = run.communicate(timeout=100)[0]
    assert run.returncode != 0
    assert gone(*every["rank"], *every["second"]), "nothing lives on"
    if who == "second":
        told = "the process that samples beside this one (trainer.overlap) died: signal SIGKILL"
        assert told in " ".join(text.split())
        assert read_status(folder)["state"] == "failed"
    goes_on(folder, straight)


@pytest.mark.parametrize("phase", ["update", "evaluate"])
def test_a_stop_in_any_phase_of_a_run_that_samples_ahead_loses_nothing(phase, straight, tmp_path):
    folder = tmp_path / "run"
    run = launch(*WORDS, f"output_dir={folder}")
    wait_for(lambda: (folder / "checkpoints" / "iteration_000002").exists(), run)
    every = processes_of(run)
    wait_for(lambda: read_status(folder).get("phase") == phase, run)
    run.send_signal(signal.SIGTERM)
    text = run.communicate(timeout=100)[0]
    assert run.returncode == 143, text
    assert gone(*every["rank"], *every["second"])
    goes_on(folder, straight)


def test_a_stop_does_not_wait_for_what_is_being_sampled(tmp_path):
    (tmp_path / "own_task.py").write_text(TASK)
    (tmp_path / "hang").touch()
    words = [*WORDS, "allow_targets=true", "env.task._target_=own_task.Task"]
    run = launch(*words, f"output_dir={tmp_path / 'run'}", PYTHONPATH=str(tmp_path))
    wait_for(lambda: (tmp_path / "hangs").exists(), run)
    every = processes_of(run)
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=100)
    assert run.returncode == 143
    assert (tmp_path / "hang").exists()
    assert gone(*every["rank"], *every["second"])
    assert read_status(tmp_path / "run")["state"] == "preempted"


def test_two_ranks_sample_ahead_what_one_does(tmp_path):
    words = ["experiment=dapo_tiny", "trainer.num_iterations=3", "eval.max_rows=4"]
    words += ["trainer.overlap=1", "algorithm.minibatches=1", "policy.model=tiny"]
    straight = train_here(tmp_path / "one", *words)
    done = train(*words, "launch.num_processes=2", f"output_dir={tmp_path / 'two'}")
    assert done.code == 0, done.text
    rows = metrics(tmp_path / "two")
    assert len(rows) == len(straight) == 4
    for row, want in zip(rows, metrics(tmp_path / "one"), strict=True):
        assert row == pytest.approx(want, rel=1e-3, abs=1e-4)
    assert rows[-1]["policy/staleness"] == 1


def test_a_lora_by_a_second_process_learns_what_the_slow_loop_does(tmp_path, monkeypatch):
    words = ["experiment=ppo_tiny", "policy.lora.r=4", "optimizer.lr=0.01", "eval.max_rows=4"]
    words += ["trainer.num_iterations=4", "checkpoint.every=2", "policy.model=tiny"]
    words += ["trainer.prompts_per_iteration=8"]
    train_here(tmp_path / "beside", *words, "trainer.overlap=2")
    make = conf.build.make_source

    def slow_source(cfg, ahead, *, policy, generator, **parts):
        return Slow(make(cfg, None, policy=policy, generator=policy, **parts), policy, 2)

    monkeypatch.setattr(conf.build, "make_source", slow_source)
    train_here(tmp_path / "slow", *words)
    both = [metrics(tmp_path / name) for name in ("beside", "slow")]
    for name in ("loss/total", "reward/raw_mean", "kl/ref", "kl/behaviour"):
        first, second = ([row[name] for row in rows[1:]] for rows in both)
        assert first == second, name
    assert [row["policy/staleness"] for row in both[0][1:]] == [0, 1, 2, 2]
    assert both[0][-1]["sync/probe"] < 1e-3 < both[0][-1]["sync/probe_before"]
    saved = tmp_path / "beside" / "checkpoints" / "iteration_000002" / "ahead"
    adapter = load_file(saved / "version_000001.safetensors")
    assert all(".lora_" in name for name in adapter)
