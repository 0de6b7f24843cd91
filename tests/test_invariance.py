"""What must not change a step of any algorithm: how its rows lie, in what order, on how many ranks.

The gradient of one optimiser step is that of the whole batch in one forward, to 1e-6 in float64.
"""

import pytest
import torch
from invariance import CASES, gradient, interleaved, padded_left, step, turned
from runs import on_two_ranks
from safetensors.torch import load_file
from torch import Tensor

from policies import layout, packed_layout, token_distribution

TOLERANCE = 1e-6  # relative


@pytest.fixture(scope="module")
def whole() -> dict[str, Tensor]:
    return {name: gradient(step(name)) for name in CASES}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> dict[str, Tensor]:
    folder = tmp_path_factory.mktemp("ranks")
    on_two_ranks("invariance.py", folder)
    return load_file(folder / "gradients.safetensors")


def in_micro_batches(name: str, patch: pytest.MonkeyPatch) -> Tensor:
    rows = step(name).batch["masks", "all_attention_mask"].sum(-1)
    return gradient(step(name), micro_batch_tokens=4 * int(rows.max()))


def row_by_row(name: str, patch: pytest.MonkeyPatch) -> Tensor:
    """Accumulate over as many backwards as can be: a row each, a pair each of preferences."""
    rows = step(name).batch["masks", "all_attention_mask"].sum(-1)
    return gradient(step(name), micro_batch_tokens=2 * int(rows.max()) if name == "reward" else 1)


def padded_on_the_left(name: str, patch: pytest.MonkeyPatch) -> Tensor:
    return gradient(step(name), padded_left)


def in_another_order(name: str, patch: pytest.MonkeyPatch) -> Tensor:
    return gradient(step(name), turned)


def with_groups_interleaved(name: str, patch: pytest.MonkeyPatch) -> Tensor:
    return gradient(step(name), interleaved)


def without_shared_prompts(name: str, patch: pytest.MonkeyPatch) -> Tensor:
    patch.setattr(step(name).policy.scorer, "share_prompts", False)
    return gradient(step(name))


def packed(name: str, patch: pytest.MonkeyPatch) -> Tensor:
    patch.setattr(
        layout, "choose", lambda ids, mask, keep, _: packed_layout.packed(ids, mask, keep)
    )
    return gradient(step(name))


def in_chunks_of_four_logits(name: str, patch: pytest.MonkeyPatch) -> Tensor:
    patch.setattr(token_distribution, "SLICE", 4 * step(name).policy.model.config.vocab_size)
    return gradient(step(name))


CHANGES = (
    in_micro_batches,
    row_by_row,
    padded_on_the_left,
    in_another_order,
    with_groups_interleaved,
    without_shared_prompts,
    packed,
    in_chunks_of_four_logits,
)


def far(got: Tensor, want: Tensor) -> float:
    assert got.dtype == want.dtype == torch.float64
    assert want.norm() > 1e-4, "a gradient of nothing shows nothing"
    return float((got - want).norm() / want.norm())


# The tokens of a pair of preferences are compared by their place, so pairs are padded on the right.
TABLE = [(n, c) for n in CASES for c in CHANGES if (n, c) != ("reward", padded_on_the_left)]


@pytest.mark.parametrize(
    ("name", "change"), TABLE, ids=lambda part: getattr(part, "__name__", part)
)
def test_the_gradient_does_not_change(name, change, whole, monkeypatch) -> None:
    assert far(change(name, monkeypatch), whole[name]) < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_the_gradient_of_one(name, whole, two_ranks) -> None:
    assert far(two_ranks[name], whole[name]) < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_with_a_part_of_every_weight_have_the_gradient_of_one(name, whole, two_ranks):
    assert far(two_ranks[f"{name}, shards"], whole[name]) < 1e-12


def test_packing_changes_the_layout_alone(whole) -> None:
    assert far(whole["sft, packed"], whole["sft"]) < TOLERANCE


def test_algorithms_differ(whole) -> None:
    """What is the same for all of them would be no test; cispo is grpo within its bounds."""
    for name in ("rloo", "dr_grpo", "bnpo", "gspo", "reinforce_pp", "grpo, exact KL"):
        assert far(whole[name], whole["grpo"]) > 1e-3, name
