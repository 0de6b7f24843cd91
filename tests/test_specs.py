"""Specs: examples have the promised shapes and types, and what does not fit is named."""

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from policies import LogProbs, Masks, Tokens
from policies.specs import Composite, NonTensor, Unbounded

CONTAINERS = {Tokens: torch.int64, LogProbs: torch.float32, Masks: torch.bool}


@pytest.mark.parametrize("cls", CONTAINERS)
@pytest.mark.parametrize("how", ["zero", "rand"])
def test_container_examples_have_the_dtype_of_real_data(cls, how):
    # The original's are float32, whatever the data are.
    example = getattr(cls.default_spec((3,)), how)()
    assert isinstance(example, cls)
    fields = [v for v in example.values() if isinstance(v, torch.Tensor)]
    assert {(v.dtype, v.shape) for v in fields} == {(CONTAINERS[cls], torch.Size([3, 1]))}


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"a": torch.zeros(2, 3, dtype=torch.int64)}, "a: "),
        ({"a": torch.zeros(2, 3, 1)}, "a: "),
        ({"b": TensorDict(batch_size=[2])}, "b: c: "),
        ({"b": torch.zeros(2)}, "b: "),
        ({"t": torch.zeros(2)}, "t: "),
    ],
)
def test_what_does_not_fit_is_named(change, place):
    spec = Composite({"a": Unbounded((2, -1)), "t": NonTensor((2,))}, shape=(2,))
    spec["b", "c"] = Unbounded((2,), dtype=torch.bool)
    good = TensorDict(
        {"a": torch.zeros(2, 5), ("b", "c"): torch.ones(2, dtype=torch.bool), "t": ["x", "y"]},
        batch_size=[2],
    )
    assert spec.explain(good) == ""
    ((key, value),) = change.items()
    assert spec.explain(good.set(key, value)).startswith(place)


def test_ragged_rows_are_checked_row_by_row():
    spec = Composite({"a": Unbounded((2, -1))}, shape=(2,))
    assert not spec.explain(lazy_stack([TensorDict(a=torch.zeros(n)) for n in (1, 4)]))
    rows = lazy_stack([TensorDict(a=torch.zeros(1)), TensorDict(a=torch.zeros(4, 1))])
    assert spec.explain(rows).startswith("a: ")
