"""Whole runs through `python train.py`: the files they leave, seeds, resume, sweeps, trackers."""

import hashlib
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from safetensors.torch import load_file
from support.pages import Page
from support.runs import SMALL, asked, launch, lines, metrics, train, wait_for

from train import train as train_config
from trainer.pages.report import write_report
from trainer.runs.run_files import read_lines, read_status

pytestmark = pytest.mark.runs


def iterations(folder: Path) -> int:
    """Return how many iterations metrics.jsonl holds, while it may be being written."""
    rows = read_lines(folder / "metrics.jsonl")
    return max((row["progress/iteration"] for row in rows), default=-1)


def outcome(folder: Path) -> tuple[str, str]:
    status = read_status(folder)
    return status["state"], status["reason"]


def test_a_run_leaves_what_the_contract_lists(small_run, cache):
    folder = small_run.folder
    names = {path.name for path in folder.iterdir()}
    files = "config.yaml metrics.jsonl transcripts.jsonl report.html status.json model checkpoints"
    assert {*files.split()} <= names
    assert not [name for name in names if "part" in name or "tmp" in name]
    status = read_status(folder)
    assert (status["state"], status["reason"], status["iteration"]) == ("finished", None, 16)
    (warm,) = (cache / "experiments").glob("sft_tiny-*/model")
    sha256 = hashlib.sha256((warm / "model.safetensors").read_bytes()).hexdigest()
    assert status["model"] == {"name": str(warm), "origin": "folder", "sha256": sha256}
    assert status["objective"] == metrics(folder)[-1]["eval/sampled_accuracy"]
    last = [line.split() for line in small_run.text.splitlines() if line.strip()][-4:]
    assert [words[0] for words in last] == ["report", "metrics", "model", "chat"]


def test_metrics_and_transcripts_are_of_the_whole_run(small_run):
    rows = lines(small_run.folder / "metrics.jsonl")
    assert [row["progress/iteration"] for row in rows] == list(range(17))
    assert {name.partition("/")[0] for name in rows[0]} == {"progress", "eval"}
    for i, row in enumerate(rows[1:], start=1):
        assert row["progress/samples"] == 32 * i
        assert row["kl/coeff"] == 1
        assert row["optim/grad_norm"] > 0
        whole = row["kl/ref"] * row["response/length_mean"]
        assert row["kl/ref_sequence"] == pytest.approx(whole, rel=1e-5, abs=1e-9)
    assert abs(rows[1]["kl/ref_sequence"]) < 1e-4, "the reference is the start policy"
    assert rows[-1]["kl/ref_k3"] > 1e-3
    texts = lines(small_run.folder / "transcripts.jsonl")
    assert {row["kind"] for row in texts} == {"before", "train", "after"}
    for row in texts:
        digits, reverse = re.findall(r"\d", row["prompt"]), "descending" in row["prompt"]
        assert row["answer"] == "".join(sorted(digits, reverse=reverse))


def test_tokens_add_up_to_their_response(small_run):
    rows = lines(small_run.folder / "transcripts.jsonl")
    last = [r for r in rows if r["kind"] == "train" and r["iteration"] == 16]
    kept = {r["rank"]: r for r in last if "rank" in r}
    assert {"best", "worst"} <= set(kept) <= {"best", "median", "worst"}
    assert kept["worst"]["reward"] <= kept["best"]["reward"]
    for row in kept.values():
        pieces = row["pieces"]
        assert sum(pieces["kl"]) == pytest.approx(row["kl"], abs=0.02)  # three digits each
        same = [row["advantage"]] * len(pieces["text"])
        assert pieces["advantage"] == pytest.approx(same, rel=0.01)
        assert "".join(pieces["text"]).removesuffix("<|im_end|>") == row["response"]
        assert len(pieces["log_prob"]) == len(same)
        assert max(pieces["log_prob"]) <= 0


def test_a_run_stopped_and_killed_goes_on_as_if_nothing_had_happened(small_run, tmp_path):
    """SIGTERM, a damaged newest checkpoint, kill -9: the metrics are the straight run's."""
    folder = tmp_path / "run"
    process = launch(*SMALL, f"output_dir={folder}")
    wait_for(lambda: iterations(folder) >= 5, process)
    assert read_status(folder)["state"] == "running"
    assert Page(folder / "report.html").goes_on
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=120)[0]
    assert process.returncode == 143, text
    assert outcome(folder) == ("preempted", "stopped by SIGTERM")
    assert not (folder / "model").exists()
    reached = iterations(folder)
    assert 5 <= reached < 16, "the run should have been stopped half way"
    newest = sorted((folder / "checkpoints").glob("iteration_*"))[-1]
    assert newest.name == f"iteration_{reached:06d}", "a stop saves what is done"

    damaged = newest / "model" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-5] + b"wrong")
    (folder / "checkpoints" / "iteration_000099").mkdir()  # half a checkpoint: no manifest
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"progress/iteration": 99, "rew')  # a torn line
    process = launch(f"resume={folder}")
    wait_for(lambda: iterations(folder) < reached, process)  # it went back to the older one
    wait_for(lambda: iterations(folder) >= 9, process)
    (worker,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.killpg(int(worker), signal.SIGKILL)
    text = process.communicate(timeout=120)[0]
    assert process.returncode not in (0, 143), text
    assert outcome(folder)[0] == "failed"
    assert not Page(write_report(folder)).goes_on
    assert iterations(folder) < 16, "the run should have been killed half way"

    finished = train(f"resume={folder}")
    assert finished.code == 0, finished.text
    assert metrics(folder) == metrics(small_run.folder)
    weights = [load_file(f / "model/model.safetensors") for f in (folder, small_run.folder)]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[1])


def test_a_resumed_run_refuses_another_reference(small_run, tmp_path):
    folder = shutil.copytree(small_run.folder, tmp_path / "run")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["policy"]["model"] = str(small_run.folder / "model")  # trained: not where it started
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    config = asked([f"resume={folder}", "trainer.num_iterations=18"])
    with pytest.raises(ValueError, match="expected the reference"):
        train_config(OmegaConf.create(config), folder)
