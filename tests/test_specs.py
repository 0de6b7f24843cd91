"""Specs: examples have the promised shapes and types, and what does not fit is named."""

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from policies import ChatHistory, History, LogProbs, Masks, Tokens
from policies.specs import Composite, NonTensor, Unbounded
from trainer.collect import carry

CONTAINERS = {Tokens: torch.int64, LogProbs: torch.float32, Masks: torch.bool}


@pytest.mark.parametrize("cls", CONTAINERS)
@pytest.mark.parametrize("how", ["zero", "rand"])
def test_container_examples_have_the_dtype_of_real_data(cls, how):
    # The original's are float32, whatever the data are.
    example = getattr(cls.default_spec((3,)), how)()
    assert isinstance(example, cls)
    assert example.padded is False
    fields = {k: v for k, v in example.items() if isinstance(v, torch.Tensor)}
    assert len(fields) == (2 if cls is Masks else 3)  # those of the page
    assert {v.dtype for v in fields.values()} == {CONTAINERS[cls]}
    assert {v.shape for v in fields.values()} == {torch.Size([3, 1])}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"a": torch.zeros(2, 3, dtype=torch.int64)}, "a: expected torch.float32, got torch.int64"),
        ({"a": torch.zeros(2, 3, 1)}, "a: expected shape [2, -1], got [2, 3, 1]"),
        ({"b": TensorDict(batch_size=[2])}, "b: c: missing"),
        ({"b": torch.zeros(2)}, "b: expected a TensorDict, got Tensor"),
        ({"t": torch.zeros(2)}, "t: expected data that is no tensor, got Tensor"),
    ],
)
def test_what_does_not_fit_is_named(change, text):
    spec = Composite({"a": Unbounded((2, -1)), "t": NonTensor((2,))}, shape=(2,))
    spec["b", "c"] = Unbounded((2,), dtype=torch.bool)
    good = TensorDict(
        {"a": torch.zeros(2, 5), ("b", "c"): torch.ones(2, dtype=torch.bool), "t": ["x", "y"]},
        batch_size=[2],
    )
    assert spec.explain(good) == ""
    for key, value in change.items():
        good.set(key, value)
    assert spec.explain(good) == text


def test_ragged_rows_are_checked_row_by_row():
    spec = Composite({"a": Unbounded((2, -1))}, shape=(2,))
    assert not spec.explain(lazy_stack([TensorDict(a=torch.zeros(n)) for n in (1, 4)]))
    rows = lazy_stack([TensorDict(a=torch.zeros(1)), TensorDict(a=torch.zeros(4, 1))])
    assert spec.explain(rows).startswith("a: ")


def test_containers_move_to_the_next_step_as_a_whole():
    chats = [History.from_chats([[{"role": "user", "content": text}]]) for text in "abc"]
    history = ChatHistory(prompt=chats[0], full=chats[1], batch_size=[1])
    td = TensorDict(history=history, batch_size=[1])
    following = ChatHistory(prompt=chats[2], batch_size=[1])
    td["next"] = TensorDict(history=following, batch_size=[1])
    moved = carry(td, ["history"])["history"]
    assert ChatHistory.default_spec((1,)).step_mdp_static
    assert moved.prompt.chats()[0][0]["content"] == "c"
    assert moved.full is None  # not that of the step before
