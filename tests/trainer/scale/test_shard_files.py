"""Checkpoints in parts: what any number of ranks reads is what the ranks that saved it had."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import part_files
from support.sharded import ranks_of, start

from trainer.checkpoint import SHARDS, Checkpoints
from trainer.optimizer import make_optimizer
from trainer.runtime import Runtime

pytestmark = pytest.mark.runs
WAYS = ("2 fsdp2", "4 fsdp2", "1 ddp")
SCRIPT = ("-m", "support.part_files")
DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "other bytes": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"),
    "missing": Path.unlink,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    at = tmp_path_factory.mktemp("parts")
    for way, first in zip(WAYS[:2], (["save"], []), strict=True):
        start(at, *ranks_of(way), first, SCRIPT)
    part_files.main(str(at), *WAYS[2].split())
    return at


@pytest.mark.parametrize("case", part_files.CASES)
@pytest.mark.parametrize("way", WAYS)
def test_any_ranks_restore_weights_and_moments_to_the_bit(case, way, place):
    saved, got = (load_file(place / case / f"{name}.safetensors") for name in ("saved", way))
    if case == "lora":  # the base is the model's, not the checkpoint's
        saved, got = ({n: t for n, t in all_.items() if "lora_" in n} for all_ in (saved, got))
    keys = {name.rpartition("/")[2] for name in saved}
    assert keys >= {"weight", "step", "exp_avg", "exp_avg_sq"}
    assert ("master" in keys) == (case == "bfloat16")
    assert got.keys() == saved.keys()
    assert all(torch.equal(got[name], saved[name]) for name in saved)
    assert {name: t.dtype for name, t in got.items()} == {n: t.dtype for n, t in saved.items()}


@pytest.mark.parametrize("way", ["2 fsdp2", "4 fsdp2"])
def test_no_rank_has_a_full_copy_of_the_weights(way, place):
    """In memory at a time: one saved part of a weight."""
    size = sum(p.nbytes for p in part_files.make("float32").scorer.parameters())
    for path in (place / "float32").glob(f"{way} * bytes"):
        peak, largest = map(int, path.read_text().split())
        assert 0 < peak <= largest < size / 2


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_part_that_is_damaged_or_missing_is_noticed(damage, place, tmp_path):
    shutil.copytree(place / "float32" / "checkpoints", tmp_path / "checkpoints")
    policy = part_files.make("float32")
    found = Checkpoints(Runtime(tmp_path), policy, make_optimizer(policy.model, lr=1.0))
    (folder,) = found.folder.iterdir()
    assert found.newest() == folder
    DAMAGES[damage](max((folder / SHARDS).glob("*.safetensors")))
    with pytest.raises(ValueError, match="iteration_000001"):
        found.newest()
