"""Starting runs in fresh processes: status, failures, signals, sweeps; with a plain worker."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra.types import RunMode
from omegaconf import OmegaConf
from processes import gone
from runs import ROOT, environment

from conf.cli import expand
from conf.compose import compose_checked, compose_experiment
from conf.sweep import gpus_of_a_job
from envs.rewards.trl_function import hold
from trainer.runs.experiment_models import cache_folder, resolve_experiment
from trainer.runs.folders import unique_folder
from trainer.runs.launch import run
from trainer.runs.launch import start as start_run
from trainer.runs.lock import held, held_by_rank, is_free
from trainer.runs.run_files import read_status

WORKER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
folder, how = Path(sys.argv[2]), os.environ.get("HOW", "finish")
rank = os.environ.get("RANK", "0")
folder.mkdir(parents=True, exist_ok=True)
def say(state, **more):
    (folder / "status.json").write_text(json.dumps({"state": state, "objective": 0.25, **more}))
def stop(number, _):
    if how != "stubborn":
        say("preempted")
        sys.exit(143)
if how == "load":  # torch: nothing is written yet
    time.sleep(60)
signal.signal(signal.SIGTERM, stop)
names = ("OMP_NUM_THREADS", "WORLD_SIZE")
about = {"pid": os.getpid(), **{name: os.environ.get(name) for name in names}}
(folder / f"rank{rank}.part").write_text(json.dumps(about))
(folder / f"rank{rank}.part").rename(folder / f"rank{rank}.json")
def fail(line):
    say("failed", reason=line)
    (folder / "errors").mkdir(exist_ok=True)
    (folder / "errors" / f"rank{rank}.txt").write_text(f"{line}\\n\\nTraceback: long\\n")
    sys.exit(1)
if how == "die":
    os._exit(9)
if how == "raise":
    fail("lr is sour")
if how in ("lose", "slow") and rank == "0":  # what a rank says when another one is gone
    time.sleep(0.3 if how == "lose" else 60)
    fail("RuntimeError: Connection closed by peer")
if how == "lose":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "slow":
    fail("the real reason")
if how == "wait":
    time.sleep(60)
if how == "stubborn":
    child = subprocess.Popen(["sleep", "60"])
    (folder / f"child{rank}.json").write_text(str(child.pid))
    time.sleep(60)
(folder / "model").mkdir(exist_ok=True)
say("finished", iteration=8)
"""
DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
import conf.cli, trainer.runs.launch
trainer.runs.launch.SCRIPT = Path({script!r})
sys.exit(conf.cli.cli())
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "a run"
    path.mkdir()
    return path


def start(script: Path, *words: str, how: str) -> subprocess.Popen[str]:
    """Start train.py's command line in an empty folder with the plain worker."""
    place = script.parent / "here"
    place.mkdir(exist_ok=True)
    command = [sys.executable, "-c", DRIVER.format(root=str(ROOT), script=str(script)), *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=place, env={**os.environ, "HOW": how}, **pipes)


def command(script: Path, folder: Path) -> list[str]:
    return [sys.executable, str(script), "--worker", str(folder)]


def wait_for(pattern: str, place: Path, count: int = 1) -> list[Path]:
    for _ in range(600):
        found = sorted(place.rglob(pattern))
        if len(found) >= count:
            return found
        time.sleep(0.05)
    raise AssertionError(f"no {pattern} in {place}")


def test_status_comes_back_and_threads_are_set(script, folder, monkeypatch):
    def threads(**options) -> str:
        assert run(command(script, folder), folder, **options)["objective"] == 0.25
        about = json.loads((folder / "rank0.json").read_text())
        assert about["WORLD_SIZE"] is None
        assert about["pid"] != os.getpid()
        return about["OMP_NUM_THREADS"]

    monkeypatch.setenv("WORLD_SIZE", "4")  # of an outer launcher: it does not reach the run
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads() == "5", "the user's own counts"
    assert threads(threads=3) == "3", "launch.threads is for this run"
    monkeypatch.delenv("OMP_NUM_THREADS")
    allowed = os.sched_getaffinity(0)  # else the cores are shared out, those that may be used
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert threads() == "1"
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_killed_rank_is_the_reason_not_what_the_others_say(script, folder, monkeypatch):
    monkeypatch.setenv("HOW", "lose")
    with pytest.raises(RuntimeError, match=r"^rank 1 was killed \(signal 9, SIGKILL\)") as caught:
        run(command(script, folder), folder, ranks=2)
    status = read_status(folder)
    assert (status["state"], status["reason"]) == ("failed", str(caught.value))
    assert "Connection closed" in (folder / "errors" / "rank0.txt").read_text()


def test_a_rank_that_waits_for_a_failed_one_is_ended(script, folder, monkeypatch):
    monkeypatch.setenv("HOW", "slow")
    monkeypatch.setattr("trainer.runs.launch.PATIENCE", 0.5)
    with pytest.raises(RuntimeError, match=r"^the real reason$"):
        run(command(script, folder), folder, ranks=2)
    assert gone(json.loads((folder / "rank0.json").read_text())["pid"])
    assert read_status(folder)["reason"] == "the real reason"


def test_a_signal_is_passed_on_once_and_stops_the_sweep(script):
    process = start(script, "-m", "seed=1,2", how="wait")
    place = script.parent / "here"
    wait_for("rank0.json", place)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (143, "")
    (path,) = place.rglob("status.json")  # the second job never started
    status = json.loads(path.read_text())
    assert (status["state"], status["reason"]) == ("preempted", "stopped by SIGTERM")
    assert "sweep.html" in out


def test_a_run_stopped_before_it_began_says_so(script):
    process = start(script, "output_dir=run", how="load")
    assert "starting" in process.stdout.readline()
    place = script.parent / "here" / "run"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
    assert out.splitlines()[-1].startswith("stopped before it began")
    assert read_status(place)["state"] == "preempted"


def test_hammering_ctrl_c_leaves_no_process_and_a_true_status(script):
    process = start(script, "output_dir=run", "launch.num_processes=2", how="stubborn")
    place = script.parent / "here"
    ranks = [json.loads(path.read_text()) for path in wait_for("rank?.json", place, 2)]
    assert [rank["WORLD_SIZE"] for rank in ranks] == ["2", "2"]
    wait_for("child?.json", place, 2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None, "the first one waits for a safe point"
    for _ in range(40):
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
    children = [int(path.read_text()) for path in place.rglob("child?.json")]
    assert gone(*children, *(rank["pid"] for rank in ranks))
    status = read_status(place / "run")
    assert (status["state"], status["reason"]) == ("preempted", "stopped by Ctrl-C")


@pytest.mark.runs
def test_a_run_that_is_still_running_is_neither_resumed_nor_touched(script):
    first = start(script, "seed=1", "output_dir=run", how="wait")
    (path,) = wait_for("rank0.json", script.parent)
    worker, folder = json.loads(path.read_text())["pid"], path.parent
    (folder / "errors").mkdir()
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    again = start(script, "resume=run", how="finish")
    out, err = again.communicate(timeout=30)
    assert (again.returncode, out) == (2, "")
    assert err == f"error: {folder}: this run is still running; stop it first\n"
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == before
    first.kill()
    os.kill(worker, signal.SIGKILL)
    first.communicate()
    again = start(script, "resume=run", how="finish")
    assert again.communicate(timeout=30)[1] == ""
    assert (again.returncode, read_status(folder)["state"]) == (0, "finished")


def test_the_rank_0_of_a_launcher_that_was_killed_locks_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.runs.lock.WAIT", 0.3)
    with held(tmp_path):
        assert not is_free(tmp_path)
        with pytest.raises(ValueError, match="still running"), held(tmp_path):
            pass
    with held_by_rank(tmp_path):
        assert not is_free(tmp_path)
        with pytest.raises(ValueError, match="still running"):
            start_run({}, tmp_path, compose=lambda _: {})
    assert is_free(tmp_path)
    assert not is_free(tmp_path / "never locked")


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = unique_folder("outputs")
    assert unique_folder("outputs") == first
    unique_folder.cache_clear()
    assert unique_folder("outputs") != first


@pytest.mark.runs
def test_failed_jobs_are_named_and_the_others_still_run(script):
    process = start(script, "-m", "experiment=grpo_smollm,sft_tiny", how="raise")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    names = ["experiment=grpo_smollm", "experiment=sft_tiny"]
    assert errors == [f"error: {name}: lr is sour" for name in names]


@pytest.mark.runs
def test_finished_jobs_of_a_sweep_stay_when_it_is_started_again(script):
    words = ("-m", "seed=1,2", "trainer.num_iterations=8", "hydra.sweep.dir=sweep")
    first = start(script, *words, how="finish")
    assert first.communicate(timeout=60)[1] == ""
    marks = sorted((script.parent / "here" / "sweep").glob("seed=*/rank0.json"))
    before = [mark.stat().st_mtime_ns for mark in marks]
    again = start(script, *words, how="die")
    assert again.communicate(timeout=60)[1] == ""
    assert (len(marks), again.returncode) == (2, 0)
    assert [mark.stat().st_mtime_ns for mark in marks] == before


def test_a_sweep_under_an_outside_launcher_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert expand(["seed=1"]) == ["seed=1", "launch.num_processes=2"]
    with pytest.raises(ValueError, match="a sweep starts its own ranks"):
        expand(["-m", "seed=1,2"])


def test_jobs_side_by_side_get_gpus_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    job = OmegaConf.create({"mode": RunMode.MULTIRUN, "launcher": {"_target_": "a.JoblibLauncher"}})

    def config(ranks: int, device: str | None = None) -> dict:
        return {"launch": {"num_processes": ranks}, "policy": {"device": device}}

    with gpus_of_a_job(job, config(2)):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")  # as in another process
        with gpus_of_a_job(job, config(1)):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"
    with gpus_of_a_job(job, config(1, "cpu")):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2"


def test_a_warm_up_runs_once_and_is_then_taken_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LEASH_CACHE", str(tmp_path / "cache"))
    made = []

    def train_it(config: dict, folder: Path) -> None:
        made.append(config["seed"])
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "weights").write_text("w")

    def find(seed: int) -> Path:
        return Path(resolve_experiment("experiment:warm", lambda _: {"seed": seed}, train_it))

    first = find(1)
    assert (first / "weights").read_text() == "w"
    assert find(1) == first
    assert find(2) != first  # another configuration is another model
    assert made == [1, 2]
    assert resolve_experiment("some/model", lambda _: {}, train_it) == "some/model"


def test_an_edited_task_or_base_of_one_has_another_warm_up(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    base, task = tmp_path / "base_of_mine.py", tmp_path / "task_of_mine.py"
    base.write_text("class Base: pass\n")
    task.write_text("from base_of_mine import Base\nclass Task(Base): pass\n")
    config = {"env": {"task": {"tasks": {"one": {"_target_": "task_of_mine.Task"}}}}}
    folders = [cache_folder("warm", config)]
    assert cache_folder("warm", config) == folders[0]
    for file in (base, task):
        file.write_text(file.read_text() + "hard = True\n")
        folders.append(cache_folder("warm", config))
    assert len(set(folders)) == 3


@pytest.mark.runs
def test_pdb_sees_a_run_in_its_own_process(tmp_path):
    """With commands from a pipe, and a reward that lies beside the command."""
    code = "stop, paid = [breakpoint], 0.5\ndef reward(row, reply):\n    while stop:\n        "
    (tmp_path / "own.py").write_text(f"{code}stop.pop()()\n    return paid\n")
    (tmp_path / "yaml.py").write_text("raise ImportError('in front of the packages')\n")
    node = "{_target_: envs.rewards.Function, function: {_target_: own.reward, _partial_: true}}"
    words = ["experiment=grpo_tiny", "policy.model=tiny", "allow_targets=true", "output_dir=run"]
    words += ["trainer.num_iterations=1", "eval.max_rows=4", f"+env.rewards.own={node}"]
    said = subprocess.run(
        [sys.executable, "-m", "pdb", str(ROOT / "train.py"), *words, "launch.in_process=true"],
        input="c\np paid, '--worker' in __import__('sys').argv\nc\nq\n",
        **{"cwd": tmp_path, "env": environment(), "capture_output": True, "text": True},
    )
    assert "(0.5, False)" in said.stdout, said
    assert read_status(tmp_path / "run")["state"] == "finished"
    assert " INFO leash: iteration 1/1 " in (tmp_path / "run" / "run.log").read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_a_run_in_this_process_as_one_in_its_own(
    tmp_path, monkeypatch, number, code
):
    before = signal.getsignal(number)
    for name in ("LEASH_PARENT", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))  # for later tests
    words = ["experiment=grpo_tiny", "policy.model=tiny", "launch.in_process=true"]
    hold("stop", lambda row, reply: os.kill(os.getpid(), number) or 0.0)
    words += ["eval.every=0", "+env.rewards.stop={_target_: envs.rewards.Given, name: stop}"]
    try:
        with pytest.raises(SystemExit) as stopped:
            start_run(compose_checked(words), tmp_path, compose=compose_experiment)
        assert stopped.value.code == code
    finally:
        for kind in (signal.SIGINT, signal.SIGTERM):
            signal.signal(kind, signal.default_int_handler)
        signal.signal(number, before)
    assert read_status(tmp_path)["state"] == "preempted"
