"""Sweeps that come with an experiment file, and that are continued."""

import html
import json
import os
import re
import shlex
import signal
from pathlib import Path

import pytest
import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from runs import SMALL, launch, metrics, train, wait_for

import train as script
from conf.compose import compose_checked, compose_raw
from conf.shell import run_command
from conf.start import read_command, set_up
from conf.sweep import list_jobs
from trainer.reports.sweep_page import write_sweep
from trainer.runs.run_files import read_lines, read_status

ROOT = Path(__file__).parents[1]
NAMES = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("kl_sweep_*.yaml"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("words", [[], ["seed=7,8,9", "trainer.num_iterations=3"], ["kl.coeff=5"]])
def test_the_jobs_are_those_that_hydra_makes(name, words):
    words = [f"experiment={name}", *words]
    params = compose_raw([f"experiment={name}"], with_hydra=True).hydra.sweeper.params
    given = [*(f"{key}={values}" for key, values in params.items()), *words]
    parsed = OverridesParser.create().parse_overrides(given)
    (jobs,) = BasicSweeper.split_arguments(parsed, None)
    assert list_jobs(words) == jobs
    assert compose_checked(jobs[-1])["kl"]["coeff"] == float(jobs[-1][0].partition("=")[2])


def test_a_sweep_of_tiny_models_is_grpo_tiny_but_for_what_is_swept():
    job = list_jobs(["experiment=kl_sweep_tiny"])[0]
    plain = ["experiment=grpo_tiny", "kl.coeff=0", "seed=1"]
    assert compose_checked(job) == compose_checked(plain)


def test_a_sweep_without_the_flag_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    set_up()
    word = "experiment=kl_sweep_tiny"
    remedy = f"python train.py -m {word}; for one run give kl.coeff=... seed=..."
    with pytest.raises(ValueError, match=re.escape(f"a sweep over kl.coeff, seed: {remedy}")):
        read_command([word])
    with pytest.raises(ValueError, match=r"a sweep over seed: .* give seed=\.\.\.$"):
        read_command([word, "kl.coeff=1", "launch.num_processes=2"])
    assert list(tmp_path.iterdir()) == []
    read_command([word, "kl.coeff=1", "seed=3"])  # as sweep.html words a job


WORKER = """
import json, sys
from pathlib import Path
folder = Path(sys.argv[3])
done = {"state": "finished", "objective": 0.5, "iteration": 1, "times": 1}
(folder / "status.json").write_text(json.dumps(done))
with open(folder / "begun", "a") as file:
    file.write("x")
"""


@pytest.fixture
def sweep(tmp_path, monkeypatch, capfd):
    """Return what runs a sweep with a worker that only says it is finished: exit code and text."""
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str]:
        code = run_command([*words], script=tmp_path / "worker.py", worker=script.worker)
        return code, "".join(capfd.readouterr())

    return run


def test_the_same_command_continues_a_sweep_where_it_is(sweep, tmp_path):
    words = ["-m", "experiment=grpo_smollm", "kl.coeff=0,0.1,1", "seed=3"]
    quoted = f"hydra.sweep.dir='{tmp_path / 'a sweep'}'"
    assert sweep(*words, quoted)[0] == 0
    jobs = [tmp_path / "a sweep" / f"kl.coeff={c}" for c in ("0", "0.1", "1")]
    assert all((job / "begun").read_text() == "x" for job in jobs)
    (jobs[1] / "status.json").write_text('{"state": "preempted"}')
    for path in sorted(jobs[2].rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    jobs[2].rmdir()
    page = html.unescape(write_sweep(tmp_path / "a sweep").read_text())
    assert "3 jobs: 1 finished, 1 preempted, 1 not begun" in page
    again = quoted.replace("'", '"')
    command = f"python train.py {shlex.join([*words, again])}"
    assert f'Continue it: <code class="command">{command}</code>' in page
    before = (jobs[0] / "status.json").stat().st_mtime_ns
    code, text = sweep(*shlex.split(command)[2:])
    assert code == 0, text
    said = [line for line in text.splitlines() if line.startswith(("job", "grpo_smollm"))]
    assert said[0] == "job 1 of 3: kl.coeff=0: finished already"
    assert said[1].startswith("job 2 of 3: kl.coeff=0.1")
    assert "going on" in said[2]
    assert said[3].startswith("job 3 of 3: kl.coeff=1 (about ")
    assert "starting" in said[4]
    assert (jobs[0] / "status.json").stat().st_mtime_ns == before
    assert [(job / "begun").read_text() for job in jobs] == ["x", "xx", "x"]
    assert "Continue it" not in (tmp_path / "a sweep" / "sweep.html").read_text()


def test_a_job_that_is_another_than_that_in_its_folder_is_refused_before_the_first(sweep, tmp_path):
    words = ["-m", "kl.coeff=0,1", f"hydra.sweep.dir={tmp_path / 's'}"]
    assert sweep(*words, "seed=3")[0] == 0
    files = {path: path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file()}
    code, text = sweep(*words, "seed=4", "policy.model=HuggingFaceTB/SmolLM2-135M-Instruct")
    assert code == 2
    assert "kl.coeff=0 holds a job with seed=3, got 4; give the words of that sweep" in text
    code, text = sweep("-m", "kl.coeff=0,2", words[-1], "seed=3")
    assert code == 2
    assert "holds kl.coeff=1, which is none of these jobs" in text
    code, text = sweep("hydra.run.dir='s/kl.coeff=0'", "seed=3")
    assert code == 2
    assert "already holds a run; go on with it by resume=" in text
    now = {path: path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file()}
    assert {path for path in now if files.get(path) != now[path]} <= {tmp_path / "s" / ".lock"}


def test_jobs_that_share_a_folder_do_not_pass_for_each_other(sweep, tmp_path):
    place = f"hydra.sweep.dir={tmp_path / 's'}"
    code, text = sweep("-m", "seed=1,2", place, "hydra.sweep.subdir=one")
    assert code == 1
    assert "holds a job with seed=1, got 2" in text
    assert read_status(tmp_path / "s" / "one")["state"] == "finished"


def test_a_killed_sweep_is_continued_by_the_command_of_its_page(small_run, tmp_path):
    plain = [word for word in SMALL if not word.startswith("kl.coeff")]
    words = [*plain, "kl.coeff=0,1", f"hydra.sweep.dir={tmp_path}"]
    ended, killed = tmp_path / "kl.coeff=0", tmp_path / "kl.coeff=1"
    ended.mkdir()
    (ended / "config.yaml").write_text(yaml.safe_dump(compose_checked([*plain, "kl.coeff=0"])))
    (ended / "status.json").write_text(json.dumps({"state": "finished", "objective": 0.5}))
    before = {path.name: path.read_bytes() for path in ended.iterdir()}
    process = launch("-m", *words)
    wait_for(lambda: any((killed / "checkpoints").glob("iteration_*4")), process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    done = train(*words_of(write_sweep(tmp_path)))
    assert done.code == 0, done.text
    assert "job 1 of 2: kl.coeff=0: finished already" in done.text
    resumed = read_status(killed)["resumed"]
    assert re.fullmatch(r"from iteration (4|6|8|10|12|14|16)", resumed)
    assert metrics(killed) == metrics(small_run.folder), "as if it had never been killed"
    assert {name: (ended / name).read_bytes() for name in before} == before
    assert len(read_lines(killed / "metrics.jsonl")) == 17


def words_of(page: Path) -> list[str]:
    """Return the arguments of the command that a page gives to continue its sweep."""
    (command,) = re.findall(r"Continue it: <code[^>]*>(.*?)</code>", page.read_text())
    return shlex.split(html.unescape(command))[2:]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seed=range(0,1000000)"], "at most 1,000 jobs"),
        (["seed=range(0,100)", "kl.coeff=range(0,11)"], "got 1,100"),
        (["seed=range(0,1000000000000)"], "at most 1,000 jobs"),
        (["seed=range(0,0)"], "gives no value"),
    ],
)
def test_a_sweep_of_too_many_jobs_or_none_is_told_at_once(words, said):
    with pytest.raises(ValueError, match=said):
        list_jobs(words)
