"""Starting runs in fresh processes: status, failures, signals, sweeps; with a plain worker."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.runs import ROOT, gone

from conf.cli import expand
from conf.compose import compose_checked, compose_experiment
from conf.run import worker
from envs.rewards.trl_function import register
from trainer.runs.experiment_models import resolve_experiment
from trainer.runs.folders import unique_folder
from trainer.runs.launch import allocator, cores, run
from trainer.runs.launch import start as start_run
from trainer.runs.lock import is_free, locked, locked_by_rank, reserved_gpus
from trainer.runs.run_files import read_status

WORKER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
if sys.argv[1] == "--check":
    sys.exit()
folder, how = Path(sys.argv[2]), os.environ.get("HOW", "finish")
rank = os.environ.get("RANK", "0")
folder.mkdir(parents=True, exist_ok=True)
def say(state, **more):
    (folder / "status.json").write_text(json.dumps({"state": state, "objective": 0.25, **more}))
def stop(number, _):
    if how != "stubborn":
        say("preempted")
        sys.exit(143)
def fail(line):
    say("failed", reason=line)
    (folder / "errors").mkdir(exist_ok=True)
    (folder / "errors" / f"rank{rank}.txt").write_text(f"{line}\\n\\nTraceback: long\\n")
    sys.exit(1)
if how == "load":  # torch: nothing is written yet
    time.sleep(60)
signal.signal(signal.SIGTERM, stop)
about = {"pid": os.getpid(), "child": 0}
if how == "stubborn":
    about["child"] = subprocess.Popen(["sleep", "60"]).pid
about |= {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "WORLD_SIZE")}
(folder / f"rank{rank}.part").write_text(json.dumps(about))
(folder / f"rank{rank}.part").rename(folder / f"rank{rank}.json")
if how == "raise" and folder.name == "seed=2":
    fail("lr is sour")
if how in ("lose", "slow") and rank == "0":  # what a rank says when another one is gone
    time.sleep(0.3 if how == "lose" else 60)
    fail("RuntimeError: Connection closed by peer")
if how == "lose":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "slow":
    fail("the real reason")
if how in ("wait", "stubborn"):
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
def script(tmp_path) -> Path:
    (tmp_path / "here").mkdir()
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


def start(script: Path, *words: str, how: str) -> subprocess.Popen[str]:
    """Start train.py's command line in the folder "here" with the plain worker."""
    command = [sys.executable, "-c", DRIVER.format(root=str(ROOT), script=str(script)), *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    place = script.with_name("here")
    return subprocess.Popen(command, cwd=place, env={**os.environ, "HOW": how}, **pipes)


def run_here(script: Path, folder: Path, **options) -> dict:
    folder.mkdir(exist_ok=True)
    return run([sys.executable, str(script), "--worker", str(folder)], folder, **options)


def wait_for_ranks(script: Path, count: int = 1) -> list[dict]:
    """Wait until ranks have begun; return what they wrote about themselves."""
    for _ in range(600):
        found = sorted(script.with_name("here").rglob("rank?.json"))
        if len(found) >= count:
            return [json.loads(path.read_text()) for path in found]
        time.sleep(0.05)
    raise AssertionError("no rank began")


def end(process: subprocess.Popen[str], *signals: signal.Signals) -> tuple[int, str]:
    """Send signals, wait for the end; return exit code and output. Nothing is an error."""
    for number in signals:
        process.send_signal(number)
        time.sleep(0.01)
    out, err = process.communicate(timeout=60)
    assert err == ""
    return process.returncode, out


def outcome(folder: Path) -> tuple[str, str]:
    status = read_status(folder)
    return status["state"], status["reason"]


def test_status_comes_back_and_threads_are_set(script, tmp_path, monkeypatch):
    def threads(**options) -> str:
        assert run_here(script, tmp_path / "a run", **options)["objective"] == 0.25
        about = json.loads((tmp_path / "a run" / "rank0.json").read_text())
        assert about["WORLD_SIZE"] is None
        return about["OMP_NUM_THREADS"]

    monkeypatch.setenv("WORLD_SIZE", "4")  # of an outer launcher: it does not reach the run
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads() == "5", "the user's own counts"
    assert threads(threads=3) == "3", "launch.threads is for this run"
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("trainer.runs.launch.cores", lambda: 6)
    assert threads() == "6", "else the cores are shared out"


QUOTAS = {"max 100000": 4, "250000 100000": 2, "50000 100000": 1, "900000 100000": 4, "": 4}


@pytest.mark.parametrize(("quota", "count"), QUOTAS.items())
def test_the_cores_are_those_of_the_mask_within_the_quota(monkeypatch, quota, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(Path, "read_text", lambda path: quota if path.name == "cpu.max" else "")
    assert cores() == count


REASONS = {"lose": "rank 1 was killed (signal 9, SIGKILL", "slow": "the real "}


@pytest.mark.parametrize(("how", "reason"), REASONS.items())
def test_the_rank_that_failed_is_the_reason_and_ends_the_others(
    script, tmp_path, monkeypatch, how, reason
):
    monkeypatch.setenv("HOW", how)
    monkeypatch.setattr("trainer.runs.launch.RANK_EXIT_SECONDS", 0.5)
    with pytest.raises(RuntimeError) as caught:
        run_here(script, tmp_path / "a run", ranks=2)
    assert outcome(tmp_path / "a run") == ("failed", str(caught.value))
    assert str(caught.value).startswith(reason), "not what the other rank says"
    assert gone(json.loads((tmp_path / "a run" / "rank0.json").read_text())["pid"])


def test_a_signal_is_passed_on_once_and_stops_the_sweep(script):
    process = start(script, "-m", "seed=1,2", how="wait")
    wait_for_ranks(script)
    code, out = end(process, signal.SIGTERM)
    assert code == 143
    assert "sweep.html" in out
    (path,) = script.with_name("here").rglob("status.json")  # the second job never started
    assert outcome(path.parent) == ("preempted", "stopped by SIGTERM")


def test_a_run_stopped_before_it_began_says_so(script):
    process = start(script, "output_dir=run", how="load")
    assert "starting" in process.stdout.readline()
    code, out = end(process, signal.SIGINT)
    assert code == 130
    assert out.splitlines()[-1].startswith("stopped before it began")
    assert outcome(script.with_name("here") / "run")[0] == "preempted"


def test_hammering_ctrl_c_leaves_no_process_and_a_true_status(script):
    process = start(script, "output_dir=run", "launch.num_processes=2", how="stubborn")
    ranks = wait_for_ranks(script, 2)
    assert [rank["WORLD_SIZE"] for rank in ranks] == ["2", "2"]
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None, "the first one waits for a safe point"
    assert end(process, *[signal.SIGINT] * 40)[0] == 130
    assert gone(*(rank[name] for rank in ranks for name in ("pid", "child")))
    assert outcome(script.with_name("here") / "run") == ("preempted", "stopped by Ctrl-C")


@pytest.mark.runs
def test_a_run_that_is_still_running_is_neither_resumed_nor_touched(script):
    first, folder = start(script, "output_dir=run", how="wait"), script.with_name("here") / "run"
    (rank,) = wait_for_ranks(script)
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    again = start(script, "resume=run", how="finish")
    out, err = again.communicate(timeout=30)
    assert (again.returncode, out) == (2, "")
    assert err == f"error: {folder}: this run is still running; stop it first\n"
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == before
    first.kill()
    os.kill(rank["pid"], signal.SIGKILL)
    first.communicate()
    assert end(start(script, "resume=run", how="finish"))[0] == 0
    assert read_status(folder)["state"] == "finished"


def test_the_rank_0_of_a_launcher_that_was_killed_locks_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.runs.lock.WAIT", 0.3)
    with locked(tmp_path), pytest.raises(ValueError, match="still running"), locked(tmp_path):
        pass
    with locked_by_rank(tmp_path):
        assert not is_free(tmp_path)
        with pytest.raises(ValueError, match="still running"):
            start_run({}, tmp_path, compose=lambda _: {}, worker=worker)
    assert is_free(tmp_path)


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = unique_folder("outputs")
    assert unique_folder("outputs") == first
    unique_folder.cache_clear()
    assert unique_folder("outputs") != first


@pytest.mark.runs
def test_a_failed_job_is_named_and_it_alone_runs_when_the_sweep_is_started_again(script):
    words = ("-m", "seed=1,2", "trainer.num_iterations=8", "hydra.sweep.dir=sweep")
    jobs = [script.with_name("here") / "sweep" / f"seed={seed}" for seed in (1, 2)]
    first = start(script, *words, how="raise")
    assert "error: seed=2: lr is sour\n" in first.communicate(timeout=60)[1]
    assert [read_status(job)["state"] for job in jobs] == ["finished", "failed"]
    began = [(job / "rank0.json").stat().st_mtime_ns for job in jobs]
    assert (first.returncode, end(start(script, *words, how="finish"))[0]) == (1, 0)
    assert read_status(jobs[1])["state"] == "finished"
    same = [(job / "rank0.json").stat().st_mtime_ns for job in jobs]
    assert [a == b for a, b in zip(began, same, strict=True)] == [True, False]


def test_a_sweep_under_an_outside_launcher_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert expand(["seed=1"]) == ["seed=1", "launch.num_processes=2"]
    with pytest.raises(ValueError, match="a sweep starts its own ranks"):
        expand(["-m", "seed=1,2"])


def test_jobs_side_by_side_get_gpus_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with reserved_gpus(2):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")  # as in another process
        with reserved_gpus(1):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"
    with reserved_gpus(0):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2"


# What the experiment `warm` reads. The task imports the rest of the code, the policy of `warm`
# is the model of `first`, whose model is an adapter of `base`.
READ = {
    "task_of_mine.py": "from base_of_mine import Base\nclass Task(Base): pass\n",
    "base_of_mine.py": "def late():\n    import mine.words\nclass Base: pass\n",
    "mine/__init__.py": "",
    "mine/words.py": "from . import more\n",
    "mine/more.py": "WORDS = []\n",
    "rows.jsonl": "{}\n",
    "prices.csv": "1\n",
    "chat.jinja": "{{ messages }}\n",
    "held_out/a.jsonl": "{}\n",
    "adapter/adapter_config.json": '{"base_model_name_or_path": "base"}\n',
    "adapter/adapter_model.safetensors": "a",
    "base/tokenizer.json": "{}\n",
    "base/model.safetensors": "b",
}


def warm_up(name: str) -> dict:
    """Return the configuration of an experiment in the current folder."""
    task = {"_target_": "task_of_mine.Task", "prices": "prices.csv"}
    env = {"task": task, "dataset": "${oc.env:MINE}/rows.jsonl", "eval_dataset": "held_out"}
    of_warm = {"policy": {"model": "experiment:first", "chat_template": "chat.jinja"}, "env": env}
    return {"first": {"policy": {"model": "adapter"}}, "warm": of_warm}[name]


@pytest.fixture
def reads(tmp_path, monkeypatch) -> Path:
    """Return the current folder with the files of READ."""
    for name, text in READ.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for variable, place in {"MINE": tmp_path, "LEASH_CACHE": tmp_path / "cache"}.items():
        monkeypatch.setenv(variable, str(place))
    return tmp_path


def test_a_warm_up_runs_once_for_all_that_it_reads(reads):
    made = []

    def train_it(config: dict, folder: Path) -> None:
        made.append(folder)
        (folder / "model").mkdir(parents=True)

    def find() -> str:
        return resolve_experiment("experiment:warm", warm_up, train_it)

    assert Path(first := find()).is_dir()
    assert find() == first
    assert len(made) == 1
    for number, name in enumerate(READ, start=2):
        with (reads / name).open("a") as file:
            file.write("\n")
        assert find() != first, name
        first = find()
        assert len(made) == number, name


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_a_run_in_this_process_too(tmp_path, monkeypatch, number, code):
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
    for name in ("LEASH_PARENT", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))  # for later tests
    words = ["experiment=grpo_tiny", "policy.model=tiny", "launch.in_process=true"]
    register("stop", lambda row, response: os.kill(os.getpid(), number) or 0.0)
    words += ["eval.every=0", "+env.rewards.stop={_target_: envs.rewards.Registered, name: stop}"]
    try:
        with pytest.raises(SystemExit) as stopped:
            start_run(compose_checked(words), tmp_path, compose=compose_experiment, worker=worker)
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
    assert stopped.value.code == code
    assert read_status(tmp_path)["state"] == "preempted"


def test_the_allocator_is_mimalloc_of_pypi_else_tcmalloc_of_the_python(tmp_path, monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    file = tmp_path / "lib" / "libtcmalloc.so.4"
    file.parent.mkdir()
    file.touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert allocator()["LD_PRELOAD"] == str(file)
    mimalloc = tmp_path / "cmeel.prefix/lib/libmimalloc.so"
    mimalloc.parent.mkdir(parents=True)
    mimalloc.touch()
    assert allocator()["LD_PRELOAD"] == str(mimalloc)
    shutil.copytree(tmp_path, tmp_path / "a b")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "a b")])
    assert allocator()["LD_PRELOAD"] == str(file), "LD_PRELOAD has no form for a blank"
    monkeypatch.setenv("LD_PRELOAD", str(file))  # the user's, with the settings for it
    assert allocator() == {"LD_PRELOAD": str(file), "TCMALLOC_RELEASE_RATE": "0"}
