"""Trackers: what is logged is what can be read back, and nothing leaks."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wandb

from trainer.redact import HIDDEN, redact, redact_text
from trainer.tracker import JsonlTracker, WandbTracker


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def offline(folder: Path, **options) -> WandbTracker:
    quick = {"x_disable_stats": True, "x_disable_machine_info": True, "disable_git": True}
    return WandbTracker(folder, mode="offline", settings=quick, **options)


def warnings_in(caplog) -> int:
    """Count what a user sees; W&B's own loggers have no handler outside of pytest."""
    return sum(record.name == "trainer.tracker" for record in caplog.records)


def inspect(folder: Path) -> list[dict]:
    """Read every offline run below a folder with W&B's own tool."""
    records = []
    for run in sorted((folder / "wandb").glob("offline-run-*")):
        tool = Path(sys.executable).with_name("wandb")
        command = [str(tool), "leet", "inspect", "--json", str(run)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        records += [json.loads(line) for line in done.stdout.splitlines()]
    return records


@pytest.fixture(autouse=True)
def _no_wandb_account(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "home"))
    yield
    wandb.teardown()  # its settings outlive a run


def test_a_line_is_in_the_file_when_log_returns(tmp_path):
    tracker = JsonlTracker(tmp_path)
    metrics: dict[str, Any] = {"reward/mean": np.float32(0.5), "kl/ref": 0.1, "progress/step": 3}
    tracker.log(metrics, 1)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert (
        text == '{"kl/ref": 0.1, "progress/iteration": 1, "progress/step": 3, "reward/mean": 0.5}\n'
    )


def test_what_is_not_finite_becomes_null(tmp_path):
    tracker = JsonlTracker(tmp_path)
    tracker.log({"a": math.nan, "b": -math.inf, "c": 1.0}, 1)
    tracker.transcripts([{"prompt": "p", "parts": {"x": math.nan}, "kl": math.inf}], 1)
    assert lines(tmp_path / "metrics.jsonl")[0] | {"progress/iteration": 0} == {
        "a": None,
        "b": None,
        "c": 1.0,
        "progress/iteration": 0,
    }
    expected = {"prompt": "p", "parts": {"x": None}, "kl": None, "iteration": 1}
    assert lines(tmp_path / "transcripts.jsonl") == [expected]


@pytest.mark.parametrize("value", ["0.5", None, True, [1.0]])
def test_only_numbers_are_metrics(tmp_path, value):
    with pytest.raises(ValueError, match="expected a number for metric 'a'"):
        JsonlTracker(tmp_path).log({"a": value}, 1)


def test_another_iteration_inside_the_metrics_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected progress/iteration 2, got 1"):
        JsonlTracker(tmp_path).log({"progress/iteration": 1}, 2)


def test_a_folder_with_a_run_is_refused_unless_resumed(tmp_path):
    JsonlTracker(tmp_path).log({"a": 1.0}, 1)
    with pytest.raises(ValueError, match="resume="):
        JsonlTracker(tmp_path)
    JsonlTracker(tmp_path, resume=True).log({"a": 2.0}, 2)
    assert [line["a"] for line in lines(tmp_path / "metrics.jsonl")] == [1.0, 2.0]


def test_rewind_and_repeat_gives_the_files_of_an_uninterrupted_run(tmp_path):
    def run(folder: Path, *, until: int, begin: int = 0, resume: bool = False) -> None:
        tracker = JsonlTracker(folder, resume=resume)
        tracker.rewind(begin - 1)
        for i in range(begin, until + 1):
            tracker.log({"a": i / 7}, i)
            tracker.transcripts([{"prompt": f"p{i}"}, {"prompt": f"q{i}"}], i)

    run(tmp_path / "whole", until=6)
    run(tmp_path / "cut", until=5)
    with open(tmp_path / "cut" / "metrics.jsonl", "a") as file:
        file.write('{"a": 0.85, "progr')  # the kill came inside a line
    run(tmp_path / "cut", begin=4, until=6, resume=True)
    for name in ("metrics.jsonl", "transcripts.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert sorted(p.name for p in (tmp_path / "cut").iterdir()) == [
        "metrics.jsonl",
        "transcripts.jsonl",
    ]


def test_transcripts_can_be_switched_off(tmp_path):
    tracker = JsonlTracker(tmp_path, keep_transcripts=False)
    tracker.transcripts([{"prompt": "private"}], 1)
    assert list(tmp_path.iterdir()) == []


def test_wandb_holds_the_values_of_metrics_jsonl_and_no_secret(tmp_path, monkeypatch):
    config = {
        "kl": {"coeff": 0.1},
        "env": {"api_key": "planted-1"},
        "policy": {"max_new_tokens": 9},
    }
    about = {"config": config, "name": "kl.coeff=0.1", "group": "sweep", "tags": ["grpo", "tiny"]}
    monkeypatch.setattr(sys, "argv", ["train.py", "env.api_key=planted-1"])
    tracker = offline(tmp_path, **about)
    for i in range(3):
        tracker.log({"reward/mean": i / 7, "kl/ref_sequence": -i * 1e-5, "progress/step": 4 * i}, i)
    tracker.finish("preempted")
    first_id = (tmp_path / "wandb_id.txt").read_text().strip()

    tracker = offline(tmp_path, **about, resume=True)
    tracker.rewind(2)
    tracker.log({"reward/mean": 0.875, "kl/ref_sequence": 2.0, "progress/step": 12}, 3)
    tracker.finish("finished")

    records = inspect(tmp_path)
    history = [r["history"]["item"] for r in records if r["type"] == "history"]
    seen = [{k: v for k, v in item.items() if not k.startswith("_")} for item in history]
    assert seen == lines(tmp_path / "metrics.jsonl")
    runs = [r["run"] for r in records if r["type"] == "run"]
    assert {run["run_id"] for run in runs} == {first_id}
    assert runs[0]["run_group"] == "sweep"
    assert runs[0]["display_name"] == "kl.coeff=0.1"
    assert runs[0]["job_type"] == "train"
    assert sorted(runs[0]["tags"]) == ["grpo", "tiny"]
    stored = runs[0]["config"]["update"]
    assert stored["kl"] == {"coeff": 0.1}
    assert stored["policy"] == {"max_new_tokens": 9}
    axes = [r["metric"].get("step_metric") for r in records if r["type"] == "metric"]
    assert "progress/iteration" in axes
    everything = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert b"planted-1" not in everything


def test_without_login_one_warning_says_how_to_sync(tmp_path, caplog):
    tracker = WandbTracker(tmp_path, settings={"x_disable_stats": True})
    tracker.log({"a": 1.0}, 1)
    tracker.finish("finished")
    assert warnings_in(caplog) == 1
    assert "not logged in" in caplog.text
    assert f"wandb sync {tmp_path}/wandb/offline-run-*" in caplog.text
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1


def test_a_server_that_does_not_answer_leaves_an_offline_run(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    tracker = WandbTracker(tmp_path, init_timeout=1.0, settings={"x_disable_stats": True})
    tracker.log({"a": 1.0}, 1)
    tracker.finish("finished")
    assert warnings_in(caplog) == 1
    assert "no connection" in caplog.text
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1


def test_a_failing_wandb_does_not_stop_the_run(tmp_path, caplog):
    (tmp_path / "wandb").write_text("a file where W&B wants its folder")
    options = {"x_disable_stats": True, "not_a_setting": 1}
    tracker = WandbTracker(tmp_path, mode="offline", settings=options)
    tracker.log({"a": 1.0}, 1)
    tracker.log({"a": 2.0}, 2)
    tracker.finish("finished")
    assert [line["a"] for line in lines(tmp_path / "metrics.jsonl")] == [1.0, 2.0]
    assert warnings_in(caplog) == 1
    assert "going on with" in caplog.text


def test_an_unknown_mode_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"expected tracker\.mode null, online, offline"):
        WandbTracker(tmp_path / "run", mode="of")
    assert not (tmp_path / "run").exists()


def test_secrets_are_hidden_by_name_and_by_value(monkeypatch):
    monkeypatch.setenv("MY_HF_TOKEN", "hf_0123456789")
    config = {
        "api_key": "a",
        "nested": [{"db-password": 12345, "apiKey": "b", "url": "https://u:hf_0123456789@x"}],
        "secrets": {"any": "c"},
        "value": "hf_0123456789",
        "max_new_tokens": 16,
        "aggregation": "token_mean",
        "hf_token": None,
        "keyword": "sort",
    }
    assert redact(config) == {
        "api_key": HIDDEN,
        "nested": [{"db-password": HIDDEN, "apiKey": HIDDEN, "url": f"https://u:{HIDDEN}@x"}],
        "secrets": {"any": HIDDEN},
        "value": HIDDEN,
        "max_new_tokens": 16,
        "aggregation": "token_mean",
        "hf_token": None,
        "keyword": "sort",
    }
    text = "policy.max_new_tokens=9,env.wandb_key=abc,kl.coeff=0.1"
    assert redact_text(text) == f"policy.max_new_tokens=9,env.wandb_key={HIDDEN},kl.coeff=0.1"
