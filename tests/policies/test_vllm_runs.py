"""Runs whose responses real vLLM samples (make test-vllm), in this process and as a server."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from support.runs import lines, train

from policies.engines.vllm_policy import make_vllm_generator
from policies.load import load_policy
from trainer.weight_sync import weight_sync

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, of each engine
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]
KEPT = "optimizer.schedule=constant"  # a short run is the beginning of a longer one
TINY = ["experiment=grpo_tiny", "eval.max_rows=40", KEPT, "policy/engine=vllm"]
FEW = ["trainer.num_iterations=2", "eval.max_rows=4", KEPT, "policy/engine=vllm"]


def run(folder: Path, *words: str) -> list[dict]:
    """Run `python train.py words...` to its end; return its metrics."""
    done = train(*words, f"output_dir={folder}")
    assert done.code == 0, done.text
    return lines(folder / "metrics.jsonl")


@pytest.fixture(scope="module")
def colocated(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("colocated") / "run"
    run(folder, *TINY, "trainer.num_iterations=20", "checkpoint.every=3")
    return folder


@contextmanager
def start_server() -> Iterator[tuple[str, subprocess.Popen]]:
    """Start the server that docs/scaling.md tells to start; yield its address and process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    words += [str(load_policy("tiny").files.folder), "--port", str(port), "--dtype", "float32"]
    words += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--enforce-eager"]
    words += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "65536"]
    words += ["--enable-lora", "--max-lora-rank", "8"]
    more = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    env = {**os.environ, **more}
    process = subprocess.Popen(
        words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        limit = time.monotonic() + 400
        while not answers(f"http://127.0.0.1:{port}/version"):
            assert process.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}", process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def server():
    with start_server() as started:
        yield started


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).is_success
    except httpx.HTTPError:
        return False


def proved(rows: list[dict]) -> None:
    """Assert that every hand-over of a run has arrived, and that the engine needed it."""
    for row in rows[1:]:
        assert row["sync/probe"] < 1e-4 < row["sync/probe_before"]
        assert row["kl/mismatch"] < 1e-5
        assert row["policy/importance_limited"] == 0


def same(rows: list[dict], others: list[dict]) -> None:
    for name in ("loss/total", "reward/raw_mean", "kl/mismatch", "sync/probe"):
        assert [row[name] for row in rows] == [row[name] for row in others]


def test_what_vllm_samples_teaches(colocated):
    rows = lines(colocated / "metrics.jsonl")
    proved(rows)
    assert rows[-1]["eval/sampled_accuracy"] > rows[0]["eval/sampled_accuracy"] + 0.3


def test_a_server_trains_to_the_bit_as_one_in_the_process_and_goes_on(colocated, server, tmp_path):
    folder, whole = tmp_path / "run", lines(colocated / "metrics.jsonl")
    words = [TINY[0], *FEW[1:], "trainer.num_iterations=3", "checkpoint.every=3"]
    rows = run(folder, *words, f"policy.engine.url={server[0]}")
    proved(rows)
    same(rows[1:], whole[1:4])
    assert not (folder / ".engine").exists()
    done = train(f"resume={folder}", "trainer.num_iterations=5")
    assert done.code == 0, done.text
    same(lines(folder / "metrics.jsonl")[4:6], whole[4:6])


def test_two_servers_train_to_the_bit_as_an_engine_in_the_process(colocated, server, tmp_path):
    with start_server() as (other, _):
        rows = run(tmp_path / "run", TINY[0], *FEW, f"policy.engine.url=[{server[0]},{other}]")
    proved(rows)
    same(rows[1:], lines(colocated / "metrics.jsonl")[1:3])


def test_of_a_lora_the_adapter_alone_is_handed_over_to_a_server_and_within(server, tmp_path):
    words = ["experiment=grpo_tiny", *FEW, "policy.lora.r=4", "optimizer.lr=0.01"]
    url = f"policy.engine.url={server[0]}"
    within, served = run(tmp_path / "within", *words), run(tmp_path / "served", *words, url)
    proved(within)
    same(served[1:], within[1:])
    words += ["launch=fsdp2", "launch.num_processes=2"]
    sharded = run(tmp_path / "sharded", *words, url)
    proved(sharded)
    whole = [row["loss/total"] for row in within[1:]]
    assert [row["loss/total"] for row in sharded[1:]] == pytest.approx(whole, rel=1e-3)
    policy = load_policy("tiny", lora={"r": 4})
    assert make_vllm_generator(policy, folder=tmp_path / "share", url=server[0]).takes_trained


@pytest.mark.parametrize(("launch", "served"), [("ddp", True), ("fsdp2", True), ("fsdp2", False)])
def test_two_ranks_sample_by_a_server_or_an_engine_each_what_one_rank_does(
    launch, served, colocated, server, tmp_path
):
    words = [TINY[0], *FEW, f"launch={launch}", "launch.num_processes=2"]
    words += [f"policy.engine.url={server[0]}"] if served else []
    rows, whole = run(tmp_path / "run", *words), lines(colocated / "metrics.jsonl")
    proved(rows)
    for name in ("loss/total", "reward/raw_mean", "kl/ref", "sync/probe_before"):
        want = [row[name] for row in whole[1:3]]
        assert [row[name] for row in rows[1:]] == pytest.approx(want, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", ["ppo_tiny", "dapo_tiny", "grpo_tools_tiny"])
def test_every_kind_of_run_samples_by_vllm(name, tmp_path):
    proved(run(tmp_path / "run", f"experiment={name}", *FEW))


def test_a_server_samples_ahead(server, tmp_path):
    words = [TINY[0], *FEW[1:], "trainer.num_iterations=3", "trainer.overlap=1"]
    rows = run(tmp_path / "run", *words, f"policy.engine.url={server[0]}")[1:]
    assert [row["policy/staleness"] for row in rows] == [0, 1, 1]
    assert max(row["sync/probe"] for row in rows) < 1e-4 < rows[-1]["sync/probe_before"]
    assert rows[0]["kl/mismatch"] < 1e-5 < rows[1]["kl/mismatch"]


def test_a_server_that_does_not_fit_is_refused(server, tmp_path):
    options = {"folder": tmp_path / "share", "url": server[0]}
    for policy, wrong, key in (
        (load_policy("tiny"), {"url": "http://127.0.0.1:9"}, "vllm serve"),
        (load_policy("tiny"), {"dtype": "bfloat16"}, "--dtype bfloat16"),
        (load_policy("tiny", lora={"r": 9}), {}, "--max-lora-rank 16"),
    ):
        with pytest.raises(ValueError, match=key):
            make_vllm_generator(policy, **(options | wrong))


def test_a_server_that_dies_ends_the_run_with_a_line(server, tmp_path):
    url, process = server  # the last test of this file that needs it
    policy = load_policy("tiny")
    generator = make_vllm_generator(policy, folder=tmp_path / "share", url=url)
    assert weight_sync(policy, generator).after < 1e-4
    wrong = {"model.embed_tokens.weight": torch.zeros(3, 5)}  # as of another model
    (tmp_path / "wrong").mkdir()
    with pytest.raises(ConnectionError, match=r"/collective_rpc: 500 .* vllm serve"):
        # Its engine does not survive this.
        generator.scorer._reload_from(tmp_path / "wrong", wrong.items())
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.raises(ConnectionError, match=r"vllm serve"):
        weight_sync(policy, generator)
