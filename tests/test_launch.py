"""Starting runs in fresh processes: status, failures, signals, folders; with a plain worker."""

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from faulty import at_call, forked, full, kill
from processes import alive, gone

from trainer.runs.experiment_models import cache_folder, resolve_experiment
from trainer.runs.launch import Interrupted, prepare, put_in_place, run
from trainer.runs.lock import held, lock_folder, write_holders
from trainer.runs.run_files import read_status
from trainer.runs.watch import Watch

ROOT = Path(__file__).parents[1]
WORKER = """
import json, os, signal, subprocess, sys, time
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
    said = "wait" if (rank, os.environ.get("WORLD_SIZE")) == ("0", "2") else "collect"
    os.write(int(os.environ["LEASH_WORDS"]), f"{rank} {said}\\n".encode())
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
import train
from conf.shell import run_command
sys.exit(run_command(sys.argv[1:], script=Path({script!r}), worker=train.worker))
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


def test_status_comes_back_and_threads_are_set(script, folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")  # of an outer launcher: it does not reach the run
    status = run(script, folder / "config.yaml", folder, threads=3)
    assert status["objective"] == 0.25
    about = json.loads((folder / "rank0.json").read_text())
    assert (about["OMP_NUM_THREADS"], about["WORLD_SIZE"]) == ("3", None)
    assert about["pid"] != os.getpid()

    def threads(**options) -> str:
        run(script, folder / "config.yaml", folder, **options)
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
        run(script, folder / "config.yaml", folder, ranks=2)
    reason = str(caught.value)
    assert reason.startswith("rank 1 was killed (signal 9, SIGKILL); out of memory? lower trainer.")
    status = read_status(folder)
    assert (status["state"], status["reason"]) == ("failed", reason)
    assert "Connection closed" in (folder / "errors" / "rank0.txt").read_text()


def test_rank_that_waits_for_a_failed_one_is_ended(script, folder, monkeypatch):
    monkeypatch.setenv("HOW", "slow")
    monkeypatch.setattr("trainer.runs.launch.PATIENCE", 0.5)
    with pytest.raises(RuntimeError, match=r"^the real reason$"):
        run(script, folder / "config.yaml", folder, ranks=2)
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


@pytest.mark.parametrize("named", ["", "output_dir"])
def test_a_run_stopped_before_it_began_says_so_and_leaves_no_dated_folder(script, named):
    words = [f"{named}=run"] if named else []
    process = start(script, *words, how="load")
    first = process.stdout.readline()
    (words_kept,) = wait_for("overrides.yaml", script.parent / "here")
    folder = words_kept.parents[1]
    assert first == f"grpo_smollm: starting in {folder.relative_to(script.parent / 'here')}\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
    assert out == "stopped before it began; nothing is saved\n"
    assert folder.exists() == bool(named)
    if named == "output_dir":
        assert read_status(folder)["state"] == "preempted"


def test_a_stop_before_a_run_goes_on_keeps_what_it_had(script):
    place = script.parent / "here"
    start(script, "output_dir=run", how="finish").communicate(timeout=30)
    (place / "run" / "status.json").unlink()
    with (place / "run" / "config.yaml").open("a") as file:
        file.write("# as an older leash wrote it\n")
    before = {path: path.read_bytes() for path in (place / "run").glob("*.y*ml")}
    process = start(script, "resume=run", "eval.every=3", how="raise")
    assert "lr is sour" in process.communicate(timeout=30)[1]
    assert (place / "run" / "config.yaml").read_bytes() == before[place / "run" / "config.yaml"]
    process = start(script, "resume=run", "eval.every=3", how="load")
    assert process.stdout.readline() == "grpo_smollm: going on in run\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    said = "stopped before it went on; what was saved before is still there\n"
    assert (process.returncode, out) == (130, said)
    (place / "run" / "status.json").unlink()
    assert {path: path.read_bytes() for path in (place / "run").glob("*.y*ml")} == before
    start(script, "resume=run", "eval.every=3", how="finish").communicate(timeout=30)
    assert yaml.safe_load((place / "run" / "config.yaml").read_text())["eval"]["every"] == 3


@pytest.mark.parametrize("fault", [kill, full])
@pytest.mark.parametrize("asked", [8, 9])
def test_a_fault_at_any_write_of_a_resume_leaves_a_whole_config(fault, asked, tmp_path):
    """One that changes nothing does not write it at all."""
    config = {"trainer": {"num_iterations": 8}, "mode": "train", "resume": None}
    saved = tmp_path / "run" / "config.yaml"
    prepare(config, tmp_path / "run", script=Path(), compose=lambda _: {})
    new = {**config, "trainer": {"num_iterations": asked}, "resume": "run"}
    before, codes = saved.stat().st_mtime_ns, []
    for number in range(1, 16):

        def work(number: int = number) -> int:
            at_call(number, fault)
            path, _ = prepare(new, tmp_path / "run", script=Path(), compose=lambda _: {})
            put_in_place(path, tmp_path / "run", ended=True)
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


def test_ranks_that_all_wait_are_told_of_by_what_they_wait_in():
    """One of them was stopped, or its network went."""
    watch = Watch(2)
    for second in range(0, 40, 10):
        watch.hear("0 collect\n1 collect\n", second)
    watch.hear("0 wait\n1 wait\n", 34)
    assert watch.overdue(now=129) is None
    told = "collect has taken 1 min 41 s, usually 10 s (rank 0 waits; rank 1 waits)"
    assert watch.overdue(now=131) == told
    assert not watch.hangs(131, now=160)
    assert watch.hangs(131, now=162)
    assert watch.hung == "rank 0 was at collect for 2 min 12 s and was ended"


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_signal_ends_a_rank_that_hangs_after_a_while(
    script, folder, monkeypatch, capfd, ranks
):
    """What it said last is told, and that its usual time is waited for is not forgotten."""
    monkeypatch.setenv("HOW", "stubborn")
    for name, seconds in {"GRACE": 1.0, "LEAST": 0.5, "FIRST": 0.5}.items():
        monkeypatch.setattr(f"trainer.runs.watch.{name}", seconds)

    def ask() -> None:
        wait_for("child?.json", folder, ranks)
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask).start()
    with pytest.raises(Interrupted) as caught:
        run(script, folder / "config.yaml", folder, ranks=ranks)
    assert caught.value.code == 143
    assert [gone(int(path.read_text())) for path in folder.glob("child*")] == [True] * ranks
    status = read_status(folder)
    who = f"rank {ranks - 1}" if ranks > 1 else "it"
    assert status["state"] == "preempted"
    told = rf"stopped by SIGTERM; {who} was at collect for \d s and was ended"
    assert re.fullmatch(told, status["reason"])
    rest = " (rank 0 waits; rank 1 collect)" * (ranks > 1)
    line = rf"note: collect has taken \d(\.\d)? s, the first one{re.escape(rest)}; Ctrl-C or"
    assert re.match(line, capfd.readouterr().out)


def test_a_run_that_is_still_running_is_neither_resumed_nor_touched(script):
    first = start(script, "seed=1", "output_dir=run", how="wait")
    (path,) = wait_for("rank0.json", script.parent)
    worker, folder = json.loads(path.read_text())["pid"], path.parent
    (folder / "errors").mkdir()
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    try:
        again = start(script, "resume=run", how="finish")
        out, err = again.communicate(timeout=30)
        line = f"run: this run is still running (pid {first.pid}); stop it first"
        assert (again.returncode, out, err) == (2, "", f"error: {line}\n")
        assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == before
        first.kill()  # the worker lives on for a while
        first.wait()
        again = start(script, "resume=run", how="finish")
        assert again.stdout.readline() == (
            f"run: its last run is still ending (pid {worker}): waiting for it\n"
        )
        assert (folder / "errors").is_dir()
        assert alive(worker)
    finally:
        os.kill(worker, signal.SIGKILL)
        first.communicate()
    assert again.communicate(timeout=30) == ("grpo_smollm: going on in run\n", "")
    assert again.returncode == 0
    assert read_status(folder)["state"] == "finished"


def test_an_orphan_that_does_not_end_is_named_and_a_free_folder_can_be_taken_again(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("trainer.runs.lock.WAIT", 0.3)
    gone_pid, left = subprocess.Popen(["true"]), subprocess.Popen(["sleep", "60"])
    gone_pid.wait()
    try:
        with held(tmp_path) as lock:
            write_holders(lock, [gone_pid.pid, left.pid])
            with pytest.raises(ValueError, match=rf"still running \(pid {left.pid}\); stop it"):
                lock_folder(tmp_path)
    finally:
        left.kill()
        left.wait()
    with held(tmp_path):
        pass


def test_a_file_system_without_locks_is_noted_and_used(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with held(tmp_path):
        assert capsys.readouterr().out.startswith(f"note: {tmp_path} has no file locks")


def test_a_warm_up_whose_launcher_was_killed_is_not_removed_under_it(tmp_path, monkeypatch):
    monkeypatch.setenv("LEASH_CACHE", str(tmp_path))
    left: list[Path] = []

    def killed(config: dict, folder: Path) -> None:
        left.append(lock_folder(folder) and folder)  # as the worker of a killed launcher does
        (folder / "config.yaml").write_text("seed: 1")
        raise RuntimeError("killed")

    for error, reason in ((RuntimeError, "killed"), (ValueError, "still running")):
        with pytest.raises(error, match=reason):
            resolve_experiment("experiment:warm", lambda _: {"seed": 1}, killed)
    assert len(left) == 1
    assert (left[0] / "config.yaml").is_file()


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
    said = err.splitlines()
    assert said.count("error: lr is sour") == 2
    assert [line.split()[1] for line in said if line.startswith("failed")] == names
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
        path, _ = prepare(config, folder, script=script, compose=lambda _: {})
        with pytest.raises(RuntimeError, match=reason):
            run(script, path, folder)
        assert reason in read_status(folder)["reason"]


def test_errors_of_a_failed_warm_up_stay_readable(script, tmp_path, monkeypatch):
    monkeypatch.setenv("LEASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOW", "raise")

    def start_run(config: dict, folder: Path) -> None:
        run(script, folder / "config.yaml", folder)

    with pytest.raises(RuntimeError, match="lr is sour") as caught:
        resolve_experiment("experiment:warm", lambda _: {"seed": 1}, start_run)
    assert str(caught.value) == "lr is sour"
    (path,) = (tmp_path / "cache").rglob("rank0.txt")
    assert "Traceback: long" in path.read_text()


def test_a_launcher_that_names_no_number_of_ranks_is_told(script, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "abc")
    process = start(script, "seed=1", how="finish")
    assert "expected WORLD_SIZE to be a number of ranks, got 'abc'" in process.communicate()[1]
    assert process.returncode == 2


def test_sweep_under_an_outside_launcher_is_refused_with_a_hint(script, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    process = start(script, "-m", "seed=1,2", how="finish")
    _, err = process.communicate(timeout=30)
    assert (process.returncode, len(err.splitlines())) == (2, 1)
    assert "python train.py -m" in err


OUTER = """
import os, sys
from pathlib import Path
sys.path.insert(0, {root!r})
import train
from trainer.runs.lock import lock_folder
def fake(cfg, folder):
    (folder / ("saw" + os.environ["RANK"])).write_text(str(cfg.launch.num_processes))
    try:
        lock_folder(folder)
    except ValueError as error:
        (folder / ("refused" + os.environ["RANK"])).write_text(f"{{error}} {{os.getppid()}}")
train.train = fake
from conf.shell import run_command
sys.exit(run_command(sys.argv[1:], script=Path({script!r}), worker=train.worker))
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
    for path in (folder / "refused0", folder / "refused1"):
        text, _, launcher = path.read_text().rpartition(" ")
        assert text.endswith(f"this run is still running (pid {launcher}); stop it first")
    assert (folder / "config.yaml").is_file()
