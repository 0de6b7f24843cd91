"""Starting runs in fresh processes: status, failures, signals, folders; with a plain worker."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from faulty import at_call, forked, full, kill
from processes import gone

from trainer.runs.experiment_models import cache_folder, resolve_experiment
from trainer.runs.launch import prepare, run
from trainer.runs.launch import start as start_run
from trainer.runs.lock import held, held_by_rank, is_free
from trainer.runs.run_files import read_status

ROOT = Path(__file__).parents[1]
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
    (folder / f"child{rank}.part").write_text(str(child.pid))
    (folder / f"child{rank}.part").rename(folder / f"child{rank}.json")
    time.sleep(60)
(folder / "model").mkdir(exist_ok=True)
say("finished")
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
    code = DRIVER.format(root=str(ROOT), script=str(script))
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        cwd=place,
        env={**os.environ, "HOW": how},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


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
    monkeypatch.setenv("WORLD_SIZE", "4")  # of an outer launcher: it does not reach the run
    status = run(command(script, folder), folder, threads=3)
    assert status["objective"] == 0.25
    about = json.loads((folder / "rank0.json").read_text())
    assert (about["OMP_NUM_THREADS"], about["WORLD_SIZE"]) == ("3", None)
    assert about["pid"] != os.getpid()

    def threads(**options) -> str:
        run(command(script, folder), folder, **options)
        return json.loads((folder / "rank0.json").read_text())["OMP_NUM_THREADS"]

    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads() == "5", "the user's own counts"
    assert threads(threads=3) == "3", "launch.threads is said for this run"
    monkeypatch.delenv("OMP_NUM_THREADS")
    allowed = os.sched_getaffinity(0)  # else the cores are shared out, those that may be used
    assert 1 <= int(threads()) <= len(allowed)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert threads() == "1"
    finally:
        os.sched_setaffinity(0, allowed)


def test_killed_rank_is_the_reason_not_what_the_others_say(script, folder, monkeypatch):
    monkeypatch.setenv("HOW", "lose")
    with pytest.raises(RuntimeError) as caught:
        run(command(script, folder), folder, ranks=2)
    reason = str(caught.value)
    assert reason.startswith("rank 1 was killed (signal 9, SIGKILL); out of memory? lower trainer.")
    status = read_status(folder)
    assert (status["state"], status["reason"]) == ("failed", reason)
    assert "Connection closed" in (folder / "errors" / "rank0.txt").read_text()


def test_rank_that_waits_for_a_failed_one_is_ended(script, folder, monkeypatch):
    monkeypatch.setenv("HOW", "slow")
    monkeypatch.setattr("trainer.runs.launch.PATIENCE", 0.5)
    with pytest.raises(RuntimeError, match=r"^the real reason$"):
        run(command(script, folder), folder, ranks=2)
    assert gone(json.loads((folder / "rank0.json").read_text())["pid"])
    assert read_status(folder)["reason"] == "the real reason"


def test_signal_is_passed_on_once_and_stops_the_sweep(script):
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
    assert process.stdout.readline() == "grpo_smollm: starting in run\n"
    wait_for("config.yaml", script.parent / "here" / "run")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
    assert out == "stopped before it began; nothing new is saved\n"
    assert read_status(script.parent / "here" / "run")["state"] == "preempted"


@pytest.mark.parametrize("fault", [kill, full])
@pytest.mark.parametrize("asked", [8, 9])
def test_a_fault_at_any_write_of_a_resume_leaves_a_whole_config(fault, asked, tmp_path):
    """One that changes nothing does not write it at all."""
    config = {"trainer": {"num_iterations": 8}, "mode": "train", "resume": None}
    saved = tmp_path / "run" / "config.yaml"
    prepare(config, tmp_path / "run", compose=lambda _: {})
    new = {**config, "trainer": {"num_iterations": asked}, "resume": "run"}
    before, codes = saved.stat().st_mtime_ns, []
    for number in range(1, 16):

        def work(number: int = number) -> int:
            at_call(number, fault)
            prepare(new, tmp_path / "run", compose=lambda _: {})
            return 0

        codes.append(forked(work))
        assert yaml.safe_load(saved.read_text()) in (config, config | {"trainer": new["trainer"]})
        assert asked != 8 or saved.stat().st_mtime_ns == before
    assert codes[-1] == 0, "every write had its turn"
    assert not [*saved.parent.glob(".*.tmp")], "of the kills nothing stays"
    assert min(codes) < 0 if fault is kill else max(codes) > 0 or asked == 8
    assert yaml.safe_load(saved.read_text())["trainer"] == new["trainer"]


def test_hammering_ctrl_c_leaves_no_process_and_a_true_status(script):
    process = start(script, "output_dir=run", "launch.num_processes=2", how="stubborn")
    place = script.parent / "here"
    abouts = [json.loads(path.read_text()) for path in wait_for("rank?.json", place, 2)]
    assert [about["WORLD_SIZE"] for about in abouts] == ["2", "2"]
    children = [int(path.read_text()) for path in wait_for("child?.json", place, 2)]
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None, "the first one waits for a safe point"
    for _ in range(40):
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (130, "")
    assert all(gone(pid) for pid in [*children, *(about["pid"] for about in abouts)])
    status = read_status(place / "run")
    assert (status["state"], status["reason"]) == ("preempted", "stopped by Ctrl-C")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_signal_ends_a_rank_that_was_stopped(script, ranks):
    process = start(script, "output_dir=run", f"launch.num_processes={ranks}", how="wait")
    place = script.parent / "here"
    pids = [json.loads(path.read_text())["pid"] for path in wait_for("rank?.json", place, ranks)]
    os.kill(pids[-1], signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (143, "")
    assert all(map(gone, pids))
    assert read_status(place / "run")["reason"] == "stopped by SIGTERM"


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
    assert again.communicate(timeout=30) == ("grpo_smollm: going on in run\n", "")
    assert again.returncode == 0
    assert read_status(folder)["state"] == "finished"


def test_the_rank_0_of_a_launcher_that_was_killed_holds_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.runs.lock.WAIT", 0.3)
    with held(tmp_path):
        assert not is_free(tmp_path)
        with pytest.raises(ValueError, match="still running; stop it"), held(tmp_path):
            pass
    with held_by_rank(tmp_path):
        assert not is_free(tmp_path)
        with pytest.raises(ValueError, match="still running; stop it"):
            start_run({}, tmp_path, compose=lambda _: {})
    assert is_free(tmp_path)
    assert not is_free(tmp_path / "never held")


def test_runs_of_the_same_second_have_folders_of_their_own(script):
    both = [start(script, how="finish") for _ in range(2)]
    assert [(process.communicate(timeout=30), process.returncode)[1] for process in both] == [0, 0]
    place = script.parent / "here" / "outputs" / "grpo_smollm"
    folders = sorted(place.iterdir())
    assert len(folders) == 2
    for each in folders:
        names = {path.name for path in each.iterdir()}
        assert {".hydra", "config.yaml", "rank0.json", "status.json"} <= names


def test_failed_jobs_are_named_and_the_others_still_run_also_of_several_experiments(script):
    process = start(script, "-m", "experiment=grpo_smollm,sft_tiny", how="raise")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    names = ["experiment=grpo_smollm", "experiment=sft_tiny"]
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert errors == [f"error: {name}: lr is sour" for name in names]
    assert "Traceback (most recent" not in err
    (page,) = (script.parent / "here").rglob("sweep.html")
    assert sorted(path.parent.name for path in page.parent.glob("*/status.json")) == names


def test_warm_up_runs_once_and_is_then_taken_from_the_cache(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LEASH_CACHE", str(tmp_path / "cache"))
    made = []

    def start_run(config: dict, folder: Path) -> None:
        made.append(config)
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "weights").write_text("w")

    def find(seed: int) -> Path:
        return Path(resolve_experiment("experiment:warm", lambda _: {"seed": seed}, start_run))

    first = find(1)
    assert (first / "weights").read_text() == "w"
    assert "running it first" in capsys.readouterr().out
    assert find(1) == first
    assert [config["seed"] for config in made] == [1]
    assert find(2) != first  # another configuration is another model
    assert [config["seed"] for config in made] == [1, 2]
    assert resolve_experiment("some/model", lambda _: {}, start_run) == "some/model"


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_edited_task_or_base_of_one_has_another_warm_up(wrapped, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"base_of_{wrapped}".lower()
    (tmp_path / f"on_{name}.py").write_text(f"from {name} import Base\nclass Task(Base): pass\n")
    base = tmp_path / f"{name}.py"
    base.write_text("class Base: pass\n")
    task = {"_target_": f"on_{name}.Task"}
    config = {"env": {"task": {"tasks": {"one": task}} if wrapped else task}}
    before = cache_folder("warm", config)
    assert cache_folder("warm", config) == before
    base.write_text("class Base: hard = True\n")
    edited = cache_folder("warm", config)
    assert edited != before
    with (tmp_path / f"on_{name}.py").open("a") as file:
        file.write("hard = True\n")
    assert cache_folder("warm", config) not in (before, edited)


def test_status_of_an_earlier_attempt_does_not_hide_a_death(script, folder, monkeypatch):
    config = {"policy": {"model": "some/model"}}
    for how, reason in (("raise", "lr is sour"), ("die", "code 9")):
        monkeypatch.setenv("HOW", how)
        prepare(config, folder, compose=lambda _: {})
        with pytest.raises(RuntimeError, match=reason):
            run(command(script, folder), folder)
        assert reason in read_status(folder)["reason"]


def test_errors_of_a_failed_warm_up_stay_readable(script, tmp_path, monkeypatch):
    monkeypatch.setenv("LEASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOW", "raise")

    def start_run(config: dict, folder: Path) -> None:
        run(command(script, folder), folder)

    with pytest.raises(RuntimeError, match="lr is sour") as caught:
        resolve_experiment("experiment:warm", lambda _: {"seed": 1}, start_run)
    assert str(caught.value) == "lr is sour"
    (path,) = (tmp_path / "cache").rglob("rank0.txt")
    assert "Traceback: long" in path.read_text()


def test_sweep_under_an_outside_launcher_is_refused_with_a_hint(script, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    process = start(script, "-m", "seed=1,2", how="finish")
    _, err = process.communicate(timeout=30)
    assert (process.returncode, len(err.splitlines())) == (2, 1)
    assert "python train.py -m" in err
