"""Trackers: what is logged is what can be read back, nothing leaks, and no failure ends a run."""

import contextlib
import json
import math
import sqlite3
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from accelerate import PartialState
from omegaconf import OmegaConf
from support.pages import write_words
from support.runs import lines

from conf.build import make_tracker
from conf.compose import compose_checked
from trainer.pages.trackers.accelerate import AccelerateTracker
from trainer.pages.trackers.jsonl import JsonlTracker
from trainer.pages.trackers.wandb import WandbTracker

pytestmark = pytest.mark.usefixtures("no_wandb_account")
QUICK = {"x_disable_stats": True, "x_disable_machine_info": True, "disable_git": True}


def begun(tracker, iteration: int | None = None):
    """Begin a run, or go on after an iteration, as the loop does."""
    if iteration is not None:
        tracker.resume(iteration, "from there", again=False, seconds=9.0)
    tracker.begin()
    return tracker


def offline(folder: Path, iteration: int | None = None, **options) -> WandbTracker:
    return begun(WandbTracker(folder, mode="offline", settings=QUICK, **options), iteration)


def warnings_in(caplog) -> int:
    """Count what a user sees; W&B's own loggers have no handler outside of pytest."""
    return sum(record.name.startswith("trainer.pages.trackers") for record in caplog.records)


def test_a_line_is_in_the_file_when_log_returns_and_what_is_not_finite_is_null(tmp_path):
    tracker = JsonlTracker(tmp_path)
    tracker.log({"reward/mean": np.float32(0.5), "kl/ref": math.nan, "progress/step": 3}, 1)
    text = (tmp_path / "metrics.jsonl").read_text()
    wanted = '{"kl/ref": null, "progress/iteration": 1, "progress/step": 3, "reward/mean": 0.5}'
    assert text == f"{wanted}\n"
    row = {"prompt": "p", "parts": {"x": math.nan}, "kl": math.inf}
    tracker.responses([row], 1, kind="train")
    expected = {"prompt": "p", "parts": {"x": None}, "kl": None, "iteration": 1}
    assert lines(tmp_path / "transcripts.jsonl") == [expected]
    with pytest.raises(ValueError, match="resume="):
        JsonlTracker(tmp_path)
    JsonlTracker(tmp_path, resume=True, keep_transcripts=False).responses([row], 2, kind="train")
    assert lines(tmp_path / "transcripts.jsonl") == [expected]


@pytest.mark.parametrize(("done", "again"), [(3, False), (3, True), (0, True)])
def test_a_resume_gives_the_files_of_an_uninterrupted_run(tmp_path, done, again):
    def log(tracker: JsonlTracker, first: int, last: int, *, cut_off: bool = False) -> None:
        for i in range(first, last + 1):
            if not (cut_off and i == first):  # what was sampled is known, its evaluation is not
                tracker.responses([{"prompt": f"p{i}"}], i, kind="train")
            tracker.log({"a": i / 7}, i)
            tracker.responses([{"prompt": f"q{i}"}] if i != done else [], i, kind="eval")

    log(JsonlTracker(tmp_path / "whole"), 0, 6)
    log(JsonlTracker(tmp_path / "cut"), 0, 5)
    with open(tmp_path / "cut" / "metrics.jsonl", "a") as file:
        file.write('{"a": 0.85, "progr')  # the kill came inside a line
    tracker = JsonlTracker(tmp_path / "cut", resume=True)
    tracker.resume(done, "from there", again=again, seconds=9.0)
    log(tracker, done + 1 - again, 6, cut_off=again and done > 0)
    for name in ("metrics.jsonl", "transcripts.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert len(list((tmp_path / "cut").iterdir())) == 2


def response(i: int) -> dict:
    """Return a row as the trainer gives it."""
    row = {"kind": "train", "prompt": f"p{i}", "response": "| *a*\nb", "reward": i / 7}
    return {**row, "answer": f"a{i}", "parts": {"x": 1.0}, "advantage": None, "kl": 0.5}


def records_of_wandb(folder: Path) -> dict[str, list[dict]]:
    """Read every offline run below a folder with W&B's own tool; return its records by kind."""
    tool, found = Path(sys.executable).with_name("wandb"), defaultdict(list)
    for run in sorted((folder / "wandb").glob("offline-run-*")):
        printed = subprocess.check_output([tool, "leet", "inspect", "--json", run], text=True)
        for record in map(json.loads, printed.splitlines()):
            found[record["type"]].append(record.get(record["type"]))
    return found


def test_wandb_holds_what_the_files_hold_over_a_resume_and_no_secret(tmp_path, monkeypatch):
    config = {"kl": {"coeff": 0.1}, "env": {"api_key": "planted-1"}}
    about = {"config": config, "name": "kl.coeff=0.1", "group": "sweep", "table_every": 2}
    monkeypatch.setattr(sys, "argv", ["train.py", "env.api_key=planted-1"])
    for begin, end in ((0, 5), (5, 6)):
        tracker = offline(tmp_path, begin - 1 if begin else None, **about, resume=begin > 0)
        for i in range(begin, end):
            tracker.responses([response(i)], i, kind="train")
            tracker.log({"reward/mean": i / 7, "kl/ref_sequence": -i * 1e-5}, i)
        tracker.alert("Responses truncated", "100% of the responses were cut", error=begin > 0)
        tracker.end("finished" if begin else "preempted", saved=None)
    tables = [json.loads(p.read_text()) for p in tmp_path.rglob("media/table/*.json")]
    column = tables[0]["columns"].index("prompt")
    prompts = sorted([row[column] for row in table["data"]] for table in tables)
    every = [f"p{i}" for i in range(6)]
    assert prompts == [every[:3], every, every[3:5]], "resumed, it begins with all responses"
    records = records_of_wandb(tmp_path)
    history = [record["item"] for record in records["history"]]
    other = ("_", "transcripts.")
    seen = [{k: v for k, v in item.items() if not k.startswith(other)} for item in history]
    written = lines(tmp_path / "metrics.jsonl")
    assert seen == written[:5] + written, "the file of a resumed run holds the whole of it"
    assert [alert["level"] for alert in records["alert"]] == ["WARN", "ERROR"]
    run = records["run"][0]
    assert len({run["run_id"] for run in records["run"]}) == 1
    assert (run["run_group"], run["display_name"]) == ("sweep", "kl.coeff=0.1")
    assert run["config"]["update"]["kl"] == {"coeff": 0.1}
    axes = [(m.get("glob_name"), m.get("step_metric")) for m in records["metric"]]
    assert ("*", "progress/iteration") in axes
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and b"planted-1" in p.read_bytes()]


def tensorboard(folder: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "run" / "tensorboard" / "leash"))
    read.Reload()
    return [(event.step, event.value) for event in read.Scalars("reward/mean")]


def trackio(folder: Path) -> list[tuple[int, float]]:
    with contextlib.closing(sqlite3.connect(folder / "trackio" / "leash.db")) as database:
        query = "select step, metrics, run_name from metrics order by id"
        found = database.execute(query).fetchall()
    assert len({name for _, _, name in found}) == 1, "one run"
    return [(step, json.loads(text)["reward/mean"]) for step, text, _ in found]


def mlflow(folder: Path) -> list[tuple[int, float]]:
    """Read MLflow's own files: `<time> <value> <step>` a line."""
    (path,) = (folder / "mlruns").glob("*/*/metrics/reward/mean")
    assert (path.parents[2] / "params/kl.coeff").read_text() == "0.1"
    found = [line.split()[1:] for line in path.read_text().splitlines()]
    return [(int(step), float(value)) for value, step in found]


@pytest.mark.parametrize(("read", "cut"), [(tensorboard, 5), (trackio, 3), (mlflow, 3)])
def test_a_service_has_each_iteration_once_and_no_secret(tmp_path, monkeypatch, read, cut):
    """Of TensorBoard even those that are repeated."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    PartialState(cpu=True)  # Accelerate's trackers ask for it
    config = {"kl": {"coeff": 0.1}, "api_key": "k1-secret"}
    for begin, end in ((0, cut), (3, 6)):
        about = {"kind": read.__name__, "config": config, "resume": begin > 0}
        tracker = AccelerateTracker(tmp_path / "run", **about)
        tracker = begun(tracker, begin - 1 if begin else None)
        for i in range(begin, end):
            tracker.responses([response(i)], i, kind="train")
            tracker.log({"reward/mean": i / 7, "eval/pass@8": math.nan if i == 2 else 1.0}, i)
        tracker.alert("Responses truncated", "all of them")
        tracker.end("finished", saved=None)
    assert read(tmp_path) == [(i, pytest.approx(i / 7, rel=1e-6)) for i in range(6)]
    assert not any(b"k1-secret" in p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())


NO_ACCOUNT = {
    "not logged in (WANDB_API_KEY invalid": {"WANDB_API_KEY": "abc"},
    # nobody listens there
    "no connection": {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"},
}


@pytest.mark.parametrize("why", NO_ACCOUNT)
def test_without_account_or_server_the_run_is_offline(tmp_path, caplog, capsys, monkeypatch, why):
    for name, value in NO_ACCOUNT[why].items():
        monkeypatch.setenv(name, value)
    tracker = begun(WandbTracker(tmp_path, init_timeout=1.0, settings={"x_disable_stats": True}))
    tracker.log({"a": 1.0}, 1)
    tracker.end("finished", saved=None)
    assert warnings_in(caplog) == 1
    assert why in caplog.text
    (kept,) = (tmp_path / "wandb").glob("offline-run-*")
    assert f"wandb sync {kept}\n" in capsys.readouterr().out


def test_a_failing_tracker_does_not_stop_the_run(tmp_path, caplog):
    (tmp_path / "wandb").write_text("a file where W&B wants its folder")
    tracker = begun(WandbTracker(tmp_path, mode="offline", settings={"not_a_setting": 1}))
    for i in (1, 2):
        tracker.log({"a": float(i)}, i)
    tracker.end("finished", saved=None)
    assert [line["a"] for line in lines(tmp_path / "metrics.jsonl")] == [1.0, 2.0]
    assert warnings_in(caplog) == 1


def test_a_run_is_named_by_its_changes_and_a_job_is_grouped_by_its_sweep(tmp_path):
    folder = tmp_path / "sft_tiny" / "2026-01-01" / "seed=3"
    words = ["experiment=sft_tiny", "trainer.num_iterations=9", "tracker=tensorboard"]
    write_words(folder, *words, "allow_targets=true", "kl.reference=./start")  # of a path its end
    cfg = OmegaConf.create(compose_checked(words))
    alone = make_tracker(cfg, folder).about
    assert alone["name"] == "sft_tiny trainer.num_iterations=9 kl.reference=start"
    (folder.parent / "sweep.json").write_text("{}")
    job = make_tracker(cfg, folder).about
    assert (job["name"], job["group"]) == ("sft_tiny seed=3", "sft_tiny/2026-01-01")
    assert (alone["group"], alone["job_type"]) == (None, "sft")
