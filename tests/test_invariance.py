"""What must not change a step of any algorithm: how its rows lie, in what order, on how many ranks.

The gradient of one optimiser step is that of the whole batch in one forward, to 1e-6 in float64.
Few whole runs of two ranks with shards are those of one, too (more: tests/scale/).
"""

from functools import cache
from pathlib import Path

import pytest
import sharded
import torch
from contracts import padded_left
from invariance import CASES, gradient, interleaved, step, turned
from runs import lines, on_two_ranks
from safetensors.torch import load_file
from torch import Tensor

from policies import layout, token_distribution

TOLERANCE = 1e-6  # relative


@cache
def whole(name: str) -> Tensor:
    return gradient(step(name))


def longest(name: str) -> int:
    return int(step(name).batch["masks", "all_attention_mask"].sum(-1).max())


def row_by_row(name: str) -> Tensor:
    """Accumulate over as many backwards as can be: a row each, a pair each of preferences."""
    return gradient(step(name), micro_batch_tokens=2 * longest(name) if name == "reward" else 1)


def without_shared_prompts(name: str) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step(name).policy.scorer, "share_prompts", False)
        return gradient(step(name))


def packed(name: str) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "choose", lambda ids, mask, keep, _: layout.packed(ids, mask, keep))
        return gradient(step(name))


def in_chunks_of_four_logits(name: str) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_distribution, "SLICE", 4 * step(name).policy.model.config.vocab_size)
        return gradient(step(name))


CHANGES = {
    "micro-batches": lambda name: gradient(step(name), micro_batch_tokens=4 * longest(name)),
    "row by row": row_by_row,
    "padded on the left": lambda name: gradient(step(name), padded_left),
    "another order": lambda name: gradient(step(name), turned),
    "groups interleaved": lambda name: gradient(step(name), interleaved),
    "no shared prompts": without_shared_prompts,
    "packed": packed,
    "chunks of four logits": in_chunks_of_four_logits,
}
# The tokens of a pair of preferences are compared by their place, so pairs are padded on the right.
TABLE = [(n, c) for n in CASES for c in CHANGES if (n, c) != ("reward", "padded on the left")]


def far(got: Tensor, want: Tensor) -> float:
    assert got.dtype == want.dtype == torch.float64
    assert want.norm() > 1e-4, "a gradient of nothing shows nothing"
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize(("name", "change"), TABLE)
def test_the_gradient_does_not_change(name, change) -> None:
    assert far(CHANGES[change](name), whole(name)) < TOLERANCE


def test_packing_changes_the_layout_alone() -> None:
    assert far(whole("sft, packed"), whole("sft")) < TOLERANCE


@pytest.mark.parametrize("name", ["rloo", "dr_grpo", "bnpo", "gspo", "reinforce_pp", "grpo_full"])
def test_algorithms_differ(name) -> None:
    """What is the same for all of them would be no test; cispo is grpo within its bounds."""
    assert far(whole(name), whole("grpo")) > 1e-3


# Two ranks.


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Path:
    """Return a folder with what two ranks made, of gradients and runs, and with runs of one."""
    folder = tmp_path_factory.mktemp("ranks")
    sharded.make_models(folder / "model", ())
    for name in sharded.FEW:
        sharded.run(name, folder / "one" / name, folder / "model", ranks=1)
    on_two_ranks("two_ranks.py", folder)
    return folder


@pytest.mark.runs
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_the_gradient_of_one_with_shards_too(name, ranks) -> None:
    two = load_file(ranks / "gradients.safetensors")
    assert far(two[name], whole(name)) < TOLERANCE
    assert far(two[f"{name}, shards"], whole(name)) < 1e-12


@pytest.mark.runs
@pytest.mark.parametrize("name", sharded.FEW)
def test_two_ranks_with_a_part_of_every_weight_make_the_run_of_one(name, ranks) -> None:
    """Its critic, adapter and moments too, and what it logs."""
    one, two = (sharded.tensors(ranks / made / name) for made in ("one", "many"))
    assert sharded.far(two, one, "model/") < TOLERANCE
    assert sharded.far(two, one, "checkpoints/") < TOLERANCE
    first, last = (f"checkpoints/iteration_00000{i}" for i in (1, 3))
    begun, ended = (sharded.tensors(ranks / "one" / name / at) for at in (first, last))
    assert sharded.far(ended, begun) > 1e-3, "nothing was learnt"
    logged = [lines(ranks / made / name / "metrics.jsonl") for made in ("one", "many")]
    assert len(logged[0]) == 4
    for want, got in zip(*logged, strict=True):
        same = {k: v for k, v in want.items() if not k.startswith(("time/", "perf/"))}
        assert {key: got[key] for key in same} == pytest.approx(same, rel=1e-4, abs=1e-5)


@pytest.mark.runs
def test_one_rank_goes_on_with_what_two_with_shards_have_saved(ranks) -> None:
    name, at = sharded.RESUMED, ranks / "back"
    sharded.prepare(ranks / "many", at, [name])
    sharded.resume(at, ranks / "model", ranks=1)
    saved = sharded.tensors(ranks / "many" / name / "checkpoints" / "iteration_000003")
    again = sharded.tensors(at / "again" / name / "checkpoints" / "iteration_000009")
    assert again.keys() == saved.keys()
    assert all(torch.equal(again[key], saved[key]) for key in saved), "to the bit"
    went_on = sharded.tensors(at / "on" / name / "checkpoints" / "iteration_000003")
    assert sharded.far(went_on, saved) < TOLERANCE
