"""Starting runs in fresh processes: status, failures, signals, folders; with a plain worker."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.launch import explain_failure, read_status, resolve_experiment, run

ROOT = Path(__file__).parents[1]
WORKER = """
import json, os, signal, sys, time
from pathlib import Path
folder, how = Path(sys.argv[3]), os.environ.get("HOW", "finish")
rank = os.environ.get("RANK", "0")
folder.mkdir(parents=True, exist_ok=True)
def say(state, **more):
    (folder / "status.json").write_text(json.dumps({"state": state, "objective": 0.25, **more}))
def stop(number, _):
    if how != "stubborn":
        say("preempted")
        sys.exit(143)
signal.signal(signal.SIGTERM, stop)
names = ("OMP_NUM_THREADS", "WORLD_SIZE")
about = {"pid": os.getpid(), **{name: os.environ.get(name) for name in names}}
(folder / f"rank{rank}.part").write_text(json.dumps(about))
(folder / f"rank{rank}.part").rename(folder / f"rank{rank}.json")
if how == "die":
    os._exit(9)
if how == "raise":
    say("failed")
    (folder / "errors").mkdir()
    (folder / "errors" / "rank0.txt").write_text("Traceback\\nValueError: lr is sour\\n")
    sys.exit(1)
if how in ("wait", "stubborn"):
    time.sleep(60)
(folder / "model").mkdir(exist_ok=True)
say("finished")
"""
DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
import train
train.OURS["script"] = Path({script!r})
sys.exit(train.cli(sys.argv[1:]))
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


def wait_for(pattern: str, place: Path, count: int = 1) -> list[Path]:
    for _ in range(600):
        found = sorted(place.rglob(pattern))
        if len(found) >= count:
            return found
        time.sleep(0.05)
    raise AssertionError(f"no {pattern} in {place}")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int) -> bool:
    for _ in range(100):
        if not alive(pid):
            return True
        time.sleep(0.05)
    return False


def test_status_comes_back_and_threads_are_set(script, folder):
    status = run(script, folder / "config.yaml", folder, threads=3)
    assert status["objective"] == 0.25
    about = json.loads((folder / "rank0.json").read_text())
    assert about["OMP_NUM_THREADS"] == "3"
    assert about["pid"] != os.getpid()


def test_cores_are_shared_out_when_threads_are_not_given(script, folder):
    run(script, folder / "config.yaml", folder)
    about = json.loads((folder / "rank0.json").read_text())
    assert about["OMP_NUM_THREADS"] == str(os.cpu_count())


def test_failure_is_one_line_with_the_cause_and_the_file(script, folder, monkeypatch):
    monkeypatch.setenv("HOW", "raise")
    with pytest.raises(RuntimeError) as caught:
        run(script, folder / "config.yaml", folder)
    path = folder / "errors" / "rank0.txt"
    assert str(caught.value) == f"ValueError: lr is sour (traceback: {path})"


def test_first_rank_to_fail_is_the_cause(folder):
    (folder / "errors").mkdir()
    for rank, text, seconds in ((0, "lost contact", 2000), (1, "the real reason", 1000)):
        path = folder / "errors" / f"rank{rank}.txt"
        path.write_text(f"Traceback\nRuntimeError: {text}\n")
        os.utime(path, (seconds, seconds))
    assert explain_failure(folder).startswith("RuntimeError: the real reason")


def test_killed_worker_is_recorded_as_failed(script, folder, monkeypatch):
    monkeypatch.setenv("HOW", "die")
    with pytest.raises(RuntimeError, match="code 9"):
        run(script, folder / "config.yaml", folder)
    assert read_status(folder)["state"] == "failed"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_is_passed_on_once_and_stops_the_sweep(script, number, code):
    process = start(script, "-m", "seed=1,2", how="wait")
    place = script.parent / "here"
    wait_for("rank0.json", place)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    (status,) = place.rglob("status.json")  # the second job never started
    assert json.loads(status.read_text())["state"] == "preempted"
    assert "Traceback" not in err
    assert "sweep.html" in out


def test_second_signal_kills(script):
    process = start(script, "output_dir=run", how="stubborn")
    place = script.parent / "here"
    (about,) = wait_for("rank0.json", place)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 130
    process.communicate()
    assert gone(json.loads(about.read_text())["pid"])
    assert read_status(place / "run")["state"] == "preempted"


def test_runs_of_the_same_second_have_folders_of_their_own(script):
    both = [start(script, how="finish") for _ in range(2)]
    assert [(process.communicate(timeout=30), process.returncode)[1] for process in both] == [0, 0]
    place = script.parent / "here" / "outputs" / "grpo_smollm"
    folders = sorted(place.iterdir())
    assert len(folders) == 2
    for each in folders:
        names = {path.name for path in each.iterdir()}
        assert {".hydra", "config.yaml", "rank0.json", "status.json"} <= names


def test_sweep_runs_every_job_and_ends_with_the_report(script):
    process = start(script, "-m", "kl.coeff=0,0.1", "seed=3", how="finish")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    (sweep,) = (script.parent / "here" / "multirun" / "grpo_smollm").iterdir()
    jobs = {path.parent.name for path in sweep.glob("*/status.json")}
    assert jobs == {"kl.coeff=0,seed=3", "kl.coeff=0.1,seed=3"}
    assert (sweep / "sweep.csv").read_text().count("\n") == 3
    assert str(sweep.relative_to(script.parent / "here") / "sweep.html") in out


def test_failed_jobs_are_named_and_the_others_still_run(script):
    process = start(script, "-m", "kl.coeff=0,0.1", how="raise")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.count("error: ValueError: lr is sour") == 2
    assert [line.split()[1] for line in err.splitlines() if line.startswith("failed")] == [
        "kl.coeff=0",
        "kl.coeff=0.1",
    ]
    assert "Traceback (most recent" not in err


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
    assert made == [{"seed": 1}]
    assert find(2) != first  # another configuration is another model
    assert [config["seed"] for config in made] == [1, 2]
    assert resolve_experiment("some/model", lambda _: {}, start_run) == "some/model"


def test_status_of_an_earlier_attempt_does_not_hide_a_death(script, folder, monkeypatch):
    run(script, folder / "config.yaml", folder)
    monkeypatch.setenv("HOW", "die")
    with pytest.raises(RuntimeError, match="code 9"):
        run(script, folder / "config.yaml", folder)
    assert read_status(folder)["state"] == "failed"


def test_errors_of_a_failed_warm_up_stay_readable(script, tmp_path, monkeypatch):
    monkeypatch.setenv("LEASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOW", "raise")

    def start_run(config: dict, folder: Path) -> None:
        run(script, folder / "config.yaml", folder)

    with pytest.raises(RuntimeError, match="lr is sour") as caught:
        resolve_experiment("experiment:warm", lambda _: {"seed": 1}, start_run)
    path = Path(str(caught.value).rpartition("traceback: ")[2].rstrip(")"))
    assert "lr is sour" in path.read_text()


def test_sweep_over_experiments_is_one_sweep(script):
    process = start(script, "-m", "experiment=grpo_smollm,sft_tiny", how="finish")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    (page,) = (script.parent / "here").rglob("sweep.html")
    jobs = {path.parent.name for path in page.parent.glob("*/status.json")}
    assert jobs == {"experiment=grpo_smollm", "experiment=sft_tiny"}


def test_job_with_very_long_overrides_gets_a_folder(script):
    process = start(script, "-m", "seed=1,2", "policy.system_prompt=" + "x" * 400, how="finish")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert len(list((script.parent / "here").rglob("status.json"))) == 2


def test_environment_of_an_outer_launcher_does_not_reach_the_run(script, folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    run(script, folder / "config.yaml", folder)
    assert json.loads((folder / "rank0.json").read_text())["WORLD_SIZE"] is None


def test_sweep_under_an_outside_launcher_is_refused_with_a_hint(script, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    process = start(script, "-m", "seed=1,2", how="finish")
    _, err = process.communicate(timeout=30)
    assert (process.returncode, len(err.splitlines())) == (2, 1)
    assert "python train.py -m" in err


@pytest.mark.slow
def test_two_ranks_are_started_and_a_second_signal_leaves_none_behind(script):
    process = start(script, "output_dir=run", "launch.num_processes=2", how="stubborn")
    place = script.parent / "here"
    abouts = [json.loads(path.read_text()) for path in wait_for("rank?.json", place, 2)]
    assert [about["WORLD_SIZE"] for about in abouts] == ["2", "2"]
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143
    process.communicate()
    assert all(gone(about["pid"]) for about in abouts)


OUTER = """
import os, sys
from pathlib import Path
sys.path.insert(0, {root!r})
import train
def fake(cfg, folder):
    (folder / ("saw" + os.environ["RANK"])).write_text(str(cfg.launch.num_processes))
train.train = fake
train.OURS["script"] = Path({script!r})
sys.exit(train.cli(sys.argv[1:]))
"""


@pytest.mark.slow
def test_ranks_of_an_outside_launcher_agree_on_one_folder(script, tmp_path):
    outer = tmp_path / "outer.py"
    outer.write_text(OUTER.format(root=str(ROOT), script=str(script)))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(outer)]
    words = [sys.executable, *launcher, "seed=1"]
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    (folder,) = (tmp_path / "outputs" / "grpo_smollm").iterdir()
    saw = {path.name: path.read_text() for path in folder.glob("saw*")}
    assert saw == {"saw0": "2", "saw1": "2"}
    assert (folder / "config.yaml").is_file()
