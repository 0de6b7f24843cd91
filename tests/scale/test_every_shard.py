"""launch=fsdp2 once more, with every case there is, on two ranks and on four."""

from pathlib import Path

import pytest
from sharded import CASES, ROUNDED, far, make_models, prepare, run, run_ranks, tensors

pytestmark = pytest.mark.scale

FOUR = ["grpo", "grpo, LoRA", "grpo, refresh", "grpo, bfloat16", "sft"]  # a prompt a rank


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    """Return a folder with the cases on one rank."""
    at = tmp_path_factory.mktemp("shards")
    make_models(at / "model")
    for name in CASES:
        run(name, at / "one" / name, at / "model", ranks=1)
    return at


def several(one: Path, ranks: int, names: list[str]) -> Path:
    """Train cases on several ranks, which go on with what one has saved; return the folder."""
    at = one / str(ranks)
    at.mkdir()
    (at / "model").symlink_to(one / "model")
    prepare(one / "one", at, names)
    run_ranks(at, names, ranks=ranks, timeout=1800)
    return at


@pytest.fixture(scope="module")
def two(one) -> Path:
    return several(one, 2, list(CASES))


@pytest.fixture(scope="module")
def four(one) -> Path:
    return several(one, 4, FOUR)


def same(one: Path, many: Path, name: str) -> None:
    """Compare the weights, and all that a checkpoint holds, of a run and of one that went on."""
    limit = 0.05 if name in ROUNDED else 1e-6
    straight = tensors(one / "one" / name)
    assert far(tensors(many / "many" / name), straight, "model/") < limit
    assert far(tensors(many / "many" / name), straight, "checkpoints/") < limit
    newest = "checkpoints/iteration_000003"
    went_on, want = tensors(many / "on" / name / newest), tensors(one / "one" / name / newest)
    assert far(went_on, want) < limit


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_the_weights_of_one(name, one, two):
    same(one, two, name)


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_train_the_weights_of_one(name, one, four):
    same(one, four, name)
