"""What must not change a step of any algorithm: how its rows lie, in what order, on how many ranks.

The gradient of one optimiser step is that of the whole batch in one forward, to 1e-6 in float64.
Few whole runs of two ranks with shards are those of one, too (more: tests/trainer/scale/),
and so are prompts, samples and metrics without shards.
"""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import sharded
from support.first_step import HALF, TENSORS, first_step
from support.invariance import CASES, gradient, interleaved, step, turned
from support.policies import one_process, padded_left
from support.runs import SMALL, Finished, lines, metrics, on_two_ranks, train
from torch import Tensor

from policies import layout, token_distribution
from policies.models.fast import attention

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


def with_padding(name: str) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout.Layout, "unpadded", lambda self: self)
        return gradient(step(name))


def packed(name: str) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "choose", lambda *given: layout.packed(*given[:3], given[-1]))
        return gradient(step(name))


def response_by_response(name: str, largest: int = 0) -> Tensor:
    """Attend a response at a time, `largest` weights by plain products."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "LARGEST", largest)
        return gradient(step(name))


def in_chunks_of_four_logits(name: str) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_distribution, "SLICE", 0)
        patch.setattr(token_distribution, "NARROWEST", 4)
        return gradient(step(name))


def layers_computed_again(name: str) -> Tensor:
    network = step(name).policy.model
    new = hasattr(network, "activation_checkpointing_enable")
    kind = "activation" if new else "gradient"  # its name in older versions of transformers
    getattr(network, f"{kind}_checkpointing_enable")({"use_reentrant": False})
    try:
        return gradient(step(name))
    finally:
        getattr(network, f"{kind}_checkpointing_disable")()


CHANGES = {
    "micro-batches": lambda name: gradient(step(name), micro_batch_tokens=4 * longest(name)),
    "row by row": row_by_row,
    "padded on the left": lambda name: gradient(step(name), padded_left),
    "another order": lambda name: gradient(step(name), turned),
    "groups interleaved": lambda name: gradient(step(name), interleaved),
    "no shared prompts": without_shared_prompts,
    "with padding": with_padding,
    "packed": packed,
    "attention response by response": response_by_response,
    "chunks of four logits": in_chunks_of_four_logits,
    "layers computed again": layers_computed_again,
}
# The tokens of a pair of preferences are compared by their place, so pairs are padded on the right.
NOT_OF_PAIRS = ("padded on the left", "layers computed again")  # the second is no setting of theirs
TABLE = [(n, c) for n in CASES for c in CHANGES if n != "reward" or c not in NOT_OF_PAIRS]


def far(got: Tensor, want: Tensor) -> float:
    assert got.dtype == want.dtype == torch.float64
    assert want.norm() > 1e-4, "a gradient of nothing shows nothing"
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize(("name", "change"), TABLE)
def test_the_gradient_does_not_change(name, change) -> None:
    assert far(CHANGES[change](name), whole(name)) < TOLERANCE


def test_packing_changes_the_layout_alone() -> None:
    assert far(whole("sft, packed"), whole("sft")) < TOLERANCE


def attends_response_by_response() -> None:
    """Check the plain products of each response, where those of the whole rows are too many."""
    batch, heads = step("grpo").batch, step("grpo").policy.model.config.num_attention_heads
    mask, group = batch["masks", "all_attention_mask"], batch["group_id"]
    rows, length = layout.shared(batch["tokens", "full"], mask, mask, group).input_ids.shape
    got = response_by_response("grpo", largest=rows * heads * length**2 - 1)
    assert far(got, whole("grpo")) < TOLERANCE


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
    on_two_ranks("support.sharded", folder)
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
    logged = [metrics(ranks / made / name) for made in ("one", "many")]
    assert len(logged[0]) == 4
    for want, got in zip(*logged, strict=True):
        assert got == pytest.approx(want, rel=1e-4, abs=1e-5)


@pytest.mark.runs
def test_one_rank_goes_on_with_what_two_with_shards_have_saved(ranks) -> None:
    name, at = sharded.RESUMED, ranks / "back"
    sharded.prepare(ranks / "many", at, [name], of="two")
    sharded.resume(at, ranks / "model", ranks=1)
    last = "checkpoints/iteration_000003"
    saved = sharded.tensors(ranks / "many" / name / last)
    went_on = sharded.tensors(at / "on" / f"{name} of two" / last)
    assert sharded.far(went_on, saved) < TOLERANCE


@pytest.fixture(scope="module")
def one() -> dict:
    return first_step(one_process())


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("two")
    on_two_ranks("support.first_step", folder)
    tensors = {name: load_file(folder / f"{name}.safetensors") for name in TENSORS}
    return json.loads((folder / "rows.json").read_text()) | tensors


@pytest.mark.runs
def test_two_ranks_have_the_prompts_and_samples_of_one(one, two) -> None:
    assert len(set(one["prompts"])) == 4
    assert two["prompts"] == one["prompts"]
    assert two["rows"] == one["rows"]
    lengths = [sum(map(len, part)) for part in (two["rows"][:8], two["rows"][8:])]
    assert lengths[0] != lengths[1], "the ranks should have different lengths"
    assert len(set(two["micro_batches"])) == 2, "and different numbers of micro-batches"


@pytest.mark.runs
def test_two_ranks_draw_again_what_one_does_in_as_many_rounds_each(one, two) -> None:
    assert two["drawn"] == one["drawn"]
    draws = [draws for *_, draws in two["drawn"]]
    assert (max(draws[:6]), max(draws[6:])) == (1, 3), "only one rank should have had idle places"
    assert one["rounds"] * 2 == two["rounds"] == [3, 3]


@pytest.mark.runs
def test_the_whole_gradient_of_two_ranks_is_that_of_one(one, two) -> None:
    cases = ("micro_batches", "half_empty")
    mine, theirs = ([run["gradients"][case].double() for case in cases] for run in (one, two))
    for a, b in zip(mine, theirs, strict=True):
        assert a.norm() > 1e-4
        assert (a - b).norm() / a.norm() < 1e-5
    assert (mine[0] - mine[1]).norm() / mine[0].norm() > 1e-2, "the cases differ"


@pytest.mark.runs
@pytest.mark.parametrize("case", HALF)
def test_ranks_stay_together_in_half_precision(case, one, two) -> None:
    """Gradients are reduced in every step, not in the first alone."""
    first, second = two["norms"][case]
    assert first == second
    assert two["sums"][case][0] == two["sums"][case][1]
    assert two["sums"][case][0], "nothing is trained"
    assert first == pytest.approx(one["norms"][case][0], rel=0.05)
    mine, theirs = one["moved"][case], two["moved"][case]
    assert mine.norm() > 0.1
    assert (mine - theirs).norm() / mine.norm() < 0.2, "rounding of the one against the other"


@pytest.mark.runs
def test_one_bit_on_one_rank_is_told(one, two) -> None:
    assert one["drift"] == ""
    assert "after iteration 4, 1 of " in two["drift"]


@pytest.mark.runs
def test_a_run_on_two_ranks_logs_what_one_logs(small_run: Finished, tmp_path: Path) -> None:
    words = [word for word in SMALL if not word.startswith("trainer.num_iterations")]
    ranks = ("trainer.num_iterations=2", "launch.num_processes=2")
    done = train(*words, *ranks, f"output_dir={tmp_path}")
    assert done.code == 0, done.text
    rows, straight = metrics(tmp_path), metrics(small_run.folder)[:3]
    assert [row["progress/iteration"] for row in rows] == [0, 1, 2]
    for row, want in zip(rows, straight, strict=True):
        assert want.keys() <= row.keys()
        assert {name: row[name] for name in want} == pytest.approx(want, rel=1e-3, abs=1e-4)
    assert (tmp_path / "model" / "model.safetensors").is_file()
    responses = [row for row in lines(tmp_path / "transcripts.jsonl") if row["kind"] == "train"]
    assert {row["group"] < 4 for row in responses} == {True, False}, "of both ranks' prompts"
