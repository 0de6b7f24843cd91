"""policy.compile: torch.compile for the decoder layers and the slices of the head, in updates.

A layer is compiled once for all lengths, and later layers share its kernels. Sampling stays eager
(`policies.sampler.sample`), because its steps are small and caches differ from layer to layer.
"""

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_layers import GradientCheckpointingLayer

LENGTHS = 600  # longest row that is counted: more than a chunk of any layer that works in chunks


def compile_layers(network: Any, body: nn.Module, positions: int | None) -> None:
    """Compile each decoder layer of a model's body; a row has at most `positions` tokens.

    Raise ValueError if the number of operators grows with the row, as in a recurrence that loops
    over tokens or chunks of them, because the compiler would unroll the loop.
    """
    long = min(LENGTHS, positions or LENGTHS)
    few, many = count_operators(network, body, long // 2), count_operators(network, body, long)
    layers = [each for each in body.modules() if isinstance(each, GradientCheckpointingLayer)]
    if many > few or not layers:
        raise ValueError(
            f"policy.compile expects decoder layers without loops over tokens, got "
            f"{type(network).__name__}: {few} operators for {long // 2} tokens, {many} for {long}; "
            "set policy.compile=false"
        )
    for layer in layers:
        layer.compile(dynamic=True)


@torch.no_grad()
def count_operators(network: Any, body: nn.Module, length: int) -> int:
    """Return the number of operators of a forward of one row."""
    ids = torch.zeros(1, length, dtype=torch.int64, device=network.device)  # [1, T]
    with _Count() as operators:
        body(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return operators.total


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.total += 1
        return func(*args, **(kwargs or {}))
