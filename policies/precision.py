"""The precision of sums that must not depend on rounding. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def in_float64(x: Tensor) -> Tensor:
    """Return a tensor in float64, on the CPU if its device has no float64 (Apple's MPS)."""
    return (x.cpu() if x.device.type == "mps" else x).double()
