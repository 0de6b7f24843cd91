"""Tensors that stay on the host, because reading a GPU tensor there synchronises the GPU.

Layouts and indices are planned from copies on the CPU and sent to the GPU without synchronisation.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class OnHost:
    """A CPU tensor as an argument of a wrapped module: DDP and FSDP2 would move a bare tensor."""

    tensor: Tensor


def bare(value: Any) -> Any:
    """Return the tensor of an `OnHost`, anything else as it is."""
    return value.tensor if isinstance(value, OnHost) else value


def send(tensor: Tensor, device: torch.device | None) -> Tensor:
    """Return a tensor on the device (None: where it is); a copy from the CPU is only queued."""
    if device is None:
        return tensor
    # MPS reads the memory later, when it may already be freed.
    queued = tensor.device.type == "cpu" and device.type != "mps"
    return tensor.to(device, non_blocking=queued)


def kept(values: Tensor, keep: Tensor) -> Tensor:
    """Return values [B, T, *] where `keep` [B, T] is true, row by row, [K, *].

    >>> kept(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[False, True], [True, False]])).tolist()
    [2, 3]
    """
    return values[_places(keep, values)]


def placed(values: Tensor, keep: Tensor) -> Tensor:
    """Put values [K, *] at the kept places of a zero [B, T, *]: the inverse of `kept`."""
    out = values.new_zeros(*keep.shape, *values.shape[1:])
    return out.index_put(_places(keep, values), values)


def _places(keep: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """Return rows and columns of kept places, [K] each, where the values are.

    With a mask on the CPU this does not synchronise; a bool index would, in forward or backward.
    """
    return send(keep.nonzero(), values.device).unbind(1)
