"""Sampling ahead: which weights sample which batch, to the bit, and what a stop leaves."""

from pathlib import Path

import pytest
from overlapped import ahead, slowly
from runs import metrics
from small_runs import train


def learnt(folder: Path) -> tuple[list[dict], bytes]:
    """Return the metrics of a run that do not say how it sampled, and its model."""
    own = ("sync/", "policy/staleness")
    rows = [{k: v for k, v in row.items() if not k.startswith(own)} for row in metrics(folder)]
    return rows, (folder / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> dict[int, tuple]:
    out = {}
    for behind in (0, 1, 2):
        folder = tmp_path_factory.mktemp(f"behind{behind}")
        train(folder, change=slowly(behind))
        out[behind] = learnt(folder)
    return out


def test_a_slow_loop_by_older_weights_learns_something_else(slow, tmp_path):
    train(tmp_path)
    assert learnt(tmp_path) == slow[0]
    assert len({model for _, model in slow.values()}) == 3


@pytest.mark.parametrize("number", [1, 2])
def test_batch_j_is_sampled_by_the_weights_of_j_less_the_number_ahead(number, slow, tmp_path):
    train(tmp_path, change=ahead(number))
    assert learnt(tmp_path) == slow[number]
    said = [row.get("policy/staleness") for row in metrics(tmp_path)]
    assert said == [None, *(min(j, number) for j in range(4))]
