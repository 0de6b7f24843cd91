"""Sweeps by Hydra's launchers and by Optuna, with a worker that only says what it was given."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import write_lines, write_status
from runs import environment

import train
from conf.search import Search
from conf.shell import run_command
from conf.sweep import read_sweep, split_launcher
from trainer.runs.run_files import read_status

ROOT = Path(__file__).parents[1]
# Two workers never have one GPU at a time: the second could not lock its file. seed=2 fails once.
WORKER = """
import fcntl, json, math, os, sys, time, yaml
from pathlib import Path
folder = Path(sys.argv[3])
config, gpu = yaml.safe_load(Path(sys.argv[2]).read_text()), os.environ["CUDA_VISIBLE_DEVICES"]
with open(folder / "begun", "a") as file:
    file.write("x")
if gpu:
    lock = open(folder.parent / f"gpu{gpu}", "w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    time.sleep(0.3)
if config["seed"] == 2 and (folder / "begun").read_text() == "x":
    (folder / "errors").mkdir(exist_ok=True)
    (folder / "errors" / "rank0.txt").write_text("lr is sour\\n\\nTraceback: long\\n")
    sys.exit(1)
objective = -abs(math.log10(config["optimizer"]["lr"]) + 3)
done = {"state": "finished", "objective": objective, "iteration": 1, "gpu": gpu}
(folder / "status.json").write_text(json.dumps(done))
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
def sweep(tmp_path):
    """Return what runs a sweep in a folder, on some GPUs: exit code, stdout and stderr."""
    (tmp_path / "worker.py").write_text(WORKER)
    code = DRIVER.format(root=str(ROOT), script=str(tmp_path / "worker.py"))

    def run(*words: str, gpus: str = "") -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-c", code, "-m", *words, "hydra.sweep.dir=s"],
            cwd=tmp_path,
            env=environment(CUDA_VISIBLE_DEVICES=gpus),
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout, done.stderr

    return run


def rows(folder: Path) -> dict[str, str]:
    with open(folder / "sweep.csv", newline="") as file:
        return {row["job"]: row["state"] for row in csv.DictReader(file)}


def test_jobs_share_the_gpus_fail_by_themselves_and_go_on_by_the_same_command(sweep, tmp_path):
    words = ["seed=1,2,3", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    code, text, err = sweep(*words, gpus="5,6")
    assert code == 1, err
    assert err.splitlines()[-1] == "failed   seed=2: lr is sour"
    assert any(line.startswith("job 2 of 3: seed=2: failed after") for line in text.splitlines())
    assert ": lr is sour" in text
    jobs = [tmp_path / "s" / f"seed={seed}" for seed in (1, 2, 3)]
    states = {job.name: "failed" if job is jobs[1] else "finished" for job in jobs}
    assert rows(tmp_path / "s") == states
    assert {read_status(job)["gpu"] for job in jobs if job is not jobs[1]} <= {"5", "6"}
    assert "error: lr is sour" in (jobs[1] / "output.txt").read_text()
    assert f"{' '.join(words)} hydra.sweep.dir={tmp_path / 's'}" in text, "how it goes on"
    code, text, err = sweep(*words, gpus="5,6")
    assert (code, text.count("finished already")) == (0, 2), err
    assert [(job / "begun").read_text() for job in jobs] == ["x", "xx", "x"]


def test_submitit_runs_the_jobs_of_a_sweep(sweep, tmp_path):
    code, text, err = sweep("seed=1,3", "hydra/launcher=submitit_local")
    assert code == 0, err
    assert rows(tmp_path / "s") == {"seed=1": "finished", "seed=3": "finished"}
    assert "job 2 of 2: seed=3: finished after" in text


def test_a_search_goes_on_as_if_it_had_never_ended(tmp_path, monkeypatch, capfd):
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = ["seed=1", "optimizer.lr=tag(log,interval(1e-5,1e-1))", "kl.coeff=0,1"]

    def search(folder: str, trials: int) -> str:
        more = ["hydra/sweeper=optuna", f"hydra.sweeper.n_trials={trials}"]
        command = ["-m", *words, *more, f"hydra.sweep.dir={tmp_path / folder}"]
        assert run_command(command, script=tmp_path / "worker.py", worker=train.worker) == 0
        return "".join(capfd.readouterr())

    assert "job 2 of 2" in search("in parts", 2)
    text = search("in parts", 4)
    jobs = sorted((tmp_path / "in parts").glob("kl.coeff=*"))
    found = {job.name: read_status(job)["objective"] for job in jobs}
    assert len(found) == 4
    best = max(found, key=lambda name: found[name])
    assert f"search   {best} is the best of it" in text
    assert [(job / "begun").read_text() for job in jobs] == ["x"] * 4
    search("straight", 4)
    assert {job.name for job in (tmp_path / "straight").glob("kl.coeff=*")} == found.keys()


def test_what_a_search_looks_for_is_the_objective_less_the_price_of_the_kl(tmp_path):
    parts = {"space": {}, "fixed": [], "settings": {"kl_price": 0.5}}
    search = Search(tmp_path, [], [], ["a", "b"], [], **parts)
    for name, state in ("a", "finished"), ("b", "failed"):
        write_lines(tmp_path / name, *({"kl/ref_sequence": kl} for kl in (9.0, 9.0, 9.0, 0.6)))
        write_status(tmp_path / name, state=state, objective=0.8)
    assert search._value(0) == pytest.approx(0.8 - 0.5 * 0.6), "the last quarter of the run"
    assert search._value(1) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hydra/launcher=nope"], "there is no such launcher here; joblib, submitit_local"),
        (["hydra.launcher.n_jobs=2"], "name it too, as hydra/launcher=joblib"),
        (["hydra/launcher=joblib", "hydra.launcher.jobs=2"], "override 'hydra.launcher.jobs'"),
        (["hydra/launcher=joblib", "hydra.launcher._target_=os.system"], "launcher is named by"),
        (["hydra/sweeper=ax"], "expected hydra/sweeper=optuna"),
        (["hydra/sweeper=optuna", "hydra.sweeper.trials=2"], "a search has the keys"),
        (["hydra/sweeper=optuna", "hydra.sweeper.n_trials=0"], "expected 1 to 1,000"),
        (["hydra/sweeper=optuna", "hydra.sweeper.direction=up"], "to be maximize or minimize"),
        (["hydra/sweeper=optuna", "seed=range(0,1000000000)"], "give values, a,b,c"),
        (["kl.coeff=interval(0,1)"], "interval() is for a search"),
        (["hydra/callbacks=mine"], "chosen beside -m, callbacks nowhere"),
    ],
)
def test_what_no_launcher_or_search_takes_is_one_line(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    swept = any("seed=" in word for word in words)
    with pytest.raises(ValueError, match=re.escape(said)):
        read_sweep(words if swept else ["seed=1,2", *words])
    assert list(tmp_path.iterdir()) == []


def test_slurm_arrays_are_composed_as_submitit_has_them():
    words = ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu"]
    words += ["+hydra.launcher.additional_parameters={constraint: a100}", "seed=1"]
    assert split_launcher(words) == (words[:-1], ["seed=1"])
