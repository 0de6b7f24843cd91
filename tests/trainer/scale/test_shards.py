"""Runs of two ranks and four, with shards and without: what they train, log and save is one's.

The ranks of a way start once. Gradients of all algorithms, in float64:
tests/trainer/test_invariance.py.
"""

from pathlib import Path

import pytest
import torch
from support.runs import metrics
from support.sharded import (
    CASES,
    ROUNDED,
    far,
    linked,
    make_models,
    prepare,
    ranks_of,
    resume,
    run,
    start,
    tensors,
)

pytestmark = pytest.mark.scale

CROSSED = ("ppo, one step", "grpo, LoRA, refresh", "grpo, bfloat16")
FOUR = (*CROSSED, "grpo", "grpo, LoRA", "sft", "sft, packed")  # a prompt a rank
WAYS = {"2 ddp": FOUR, "2 fsdp2": tuple(CASES), "4 ddp": FOUR, "4 fsdp2": FOUR}
EVERY = ("1", *WAYS)
NEWEST = "checkpoints/iteration_000003"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Return a folder with <way>/many/<case> of all cases and ways."""
    at = tmp_path_factory.mktemp("shards")
    make_models(at / "model")
    for name in CASES:
        run(name, at / "1" / "many" / name, at / "model", ranks=1)
    for way, names in WAYS.items():
        start(linked(at, way), *ranks_of(way), names)
    return at


@pytest.fixture(scope="module")
def resumed(place) -> Path:
    """Return that folder, in which each way went on with what every way has saved."""
    for way in EVERY:
        at = linked(place, f"{way} on")
        for source in EVERY:
            prepare(place / source / "many", at, CROSSED, of=source)
        if way == "1":
            resume(at, place / "model", ranks=1)
        else:
            start(at, *ranks_of(way), [])
    return place


def limit(name: str) -> float:
    """Return how far weights may be apart, relative to their norm, in float32 or rounded."""
    return 0.05 if name in ROUNDED else 1e-6


@pytest.mark.parametrize(("name", "way"), [(n, way) for way in WAYS for n in WAYS[way]])
def test_several_ranks_train_the_weights_of_one(name, way, place):
    """The model's, and all that the checkpoints hold: critic, adapter, reference, moments."""
    one, many = (tensors(place / w / "many" / name) for w in ("1", way))
    assert far(many, one, "model/") < limit(name)
    assert far(many, one, "checkpoints/") < limit(name)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ROUNDED])
def test_two_ranks_with_shards_log_the_losses_and_sample_the_frontier_of_one(name, place):
    one, two = (place / way / "many" / name for way in ("1", "2 fsdp2"))
    for mine, want in zip(metrics(two), metrics(one), strict=True):
        assert mine == pytest.approx(want, rel=1e-4, abs=1e-5)
    frontiers = [path.read_text() for at in (one, two) for path in at.glob("frontier.json")]
    assert frontiers[:1] == frontiers[1:]


def test_half_precision_has_its_masters_in_the_shards(place):
    """As MasterAdamW has them without shards: float32, and the model is what they round to."""
    for way in ("1", "2 fsdp2"):
        saved = tensors(place / way / "many" / "grpo, bfloat16" / NEWEST)
        masters = {key: value for key, value in saved.items() if key.endswith("/master")}
        assert len(masters) > 10
        for key, master in masters.items():
            name = key.removeprefix("optimizer.safetensors:model.").removesuffix("/master")
            weight = saved[f"model/model.safetensors:{name}"]
            assert (master.dtype, weight.dtype) == (torch.float32, torch.bfloat16)
            assert torch.equal(master.bfloat16(), weight)
            assert not torch.equal(master, weight.float())


@pytest.mark.parametrize("name", CROSSED)
@pytest.mark.parametrize("source", EVERY)
@pytest.mark.parametrize("way", EVERY)
def test_every_number_of_ranks_goes_on_with_the_checkpoints_of_every_other(
    name, source, way, resumed
):
    want = tensors(resumed / "1" / "many" / name / NEWEST)
    got = tensors(resumed / f"{way} on" / "on" / f"{name} of {source}" / NEWEST)
    assert far(got, want) < limit(name)
