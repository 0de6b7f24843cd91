"""launch=fsdp2: two ranks with a part of every weight each train, save and resume what one does.

More cases, and four ranks: tests/scale/test_every_shard.py. Gradients of all algorithms, in
float64: tests/test_invariance.py.
"""

import json
from pathlib import Path

import pytest
import torch
from refusals import refusal
from runs import lines
from sharded import ROUNDED, far, make_models, prepare, resume, run, start, tensors

pytestmark = pytest.mark.scale

NAMES = (
    "ppo",
    "grpo, LoRA",
    "grpo_full, by layers",
    "grpo, refresh",
    "grpo, limit",
    "grpo, a rank without rows",
    "grpo, bfloat16",
)
RESUMED = ("ppo", "grpo, bfloat16")  # which has a reference that follows, too
TOLERANCE = 1e-6  # relative, in float32


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Return a folder with every case of one rank and of two."""
    at = tmp_path_factory.mktemp("shards")
    make_models(at / "model")
    for name in NAMES:
        run(name, at / "one" / name, at / "model", ranks=1)
    prepare(at / "one", at, RESUMED)
    start(at, 2, "fsdp2", NAMES)
    return at


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ROUNDED])
def test_two_ranks_train_the_weights_of_one(name, place):
    """The critic's, the adapter's, the reference's and the moments too."""
    one, two = (tensors(place / ranks / name) for ranks in ("one", "many"))
    assert far(two, one, "model/") < TOLERANCE
    assert far(two, one, "checkpoints/") < TOLERANCE
    moved = tensors(place / "one" / name / "checkpoints" / "iteration_000001")
    assert far(tensors(place / "one" / name / "checkpoints" / "iteration_000003"), moved) > 1e-3


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ROUNDED])
def test_two_ranks_log_the_losses_of_one(name, place):
    one, two = (lines(place / ranks / name / "metrics.jsonl") for ranks in ("one", "many"))
    assert len(one) == 4
    for mine, want in zip(two, one, strict=True):
        assert mine.keys() == want.keys()
        timed = ("time/", "perf/")
        same = {key: value for key, value in want.items() if not key.startswith(timed)}
        assert {key: mine[key] for key in same} == pytest.approx(same, rel=1e-4, abs=1e-5)


def test_two_ranks_sample_the_limit_of_one(place):
    """Of three rows, one rank has two; kl/efficiency is compared with what else is logged."""
    one, two = (
        (place / ranks / "grpo, limit" / "limit.json").read_text() for ranks in ("one", "many")
    )
    assert one == two
    assert len(json.loads(one)["reward"]) == 3


def test_one_rank_may_have_no_rows_to_learn_from(place):
    logged = lines(place / "many" / "grpo, a rank without rows" / "metrics.jsonl")
    assert all(line["reward/dropped_fraction"] == 0.75 for line in logged[1:])
    assert all(line["optim/skipped_steps"] == 0 for line in logged[1:])


def test_half_precision_has_its_masters_in_the_shards(place):
    """As MasterAdamW has them without shards: float32, and the model is what they round to."""
    one, two = (place / ranks / "grpo, bfloat16" for ranks in ("one", "many"))
    for run_folder in (one, two):
        saved = tensors(run_folder / "checkpoints" / "iteration_000003")
        masters = {key: value for key, value in saved.items() if key.endswith("/master")}
        assert len(masters) > 10
        for key, master in masters.items():
            name = key.removeprefix("optimizer.safetensors:model.").removesuffix("/master")
            assert master.dtype == torch.float32
            weight = saved[f"model/model.safetensors:{name}"]
            assert weight.dtype == torch.bfloat16
            assert torch.equal(master.bfloat16(), weight)
            assert not torch.equal(master, weight.float())
    first = [lines(f / "metrics.jsonl")[1]["optim/grad_norm"] for f in (one, two)]
    assert first[1] == pytest.approx(first[0], rel=0.05)  # without shards it is a bfloat16 itself
    assert far(tensors(two), tensors(one), "model/") < 0.02


@pytest.fixture(scope="module")
def back(place) -> Path:
    """Return a folder in which one rank went on with what two have saved."""
    at = place / "back"
    prepare(place / "many", at, RESUMED)
    resume(at, place / "model", ranks=1)
    return at


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("way", ["", "back"], ids=["one to two", "two to one"])
def test_a_checkpoint_goes_on_with_shards_and_without(name, way, place, back):
    source = place / ("many" if way else "one") / name / "checkpoints" / "iteration_000003"
    straight, here = tensors(source), place / way
    again = tensors(here / "again" / name / "checkpoints" / "iteration_000009")
    assert again.keys() == straight.keys()
    assert all(torch.equal(again[key], straight[key]) for key in straight), "to the bit"
    went_on = tensors(here / "on" / name / "checkpoints" / "iteration_000003")
    assert far(went_on, straight) < (0.02 if name in ROUNDED else TOLERANCE)


def test_what_cannot_be_spread_is_refused():
    two = ("launch=fsdp2", "launch.num_processes=2")
    ahead = refusal("experiment=grpo_tiny", *two, "trainer.overlap=1")
    assert "trainer.overlap needs launch=ddp" in ahead
    for words in (("launch=ddp", "launch.num_processes=2"), ("launch=fsdp2",)):
        told = refusal("experiment=grpo_tiny", *words, "launch.offload=true")
        assert "launch.offload needs launch=fsdp2 and launch.num_processes >= 2" in told
    assert "launch.strategy to be one of ddp, fsdp2" in refusal(
        "experiment=grpo_tiny", "launch.strategy=zero3"
    )
