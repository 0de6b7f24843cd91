"""float32 matrix multiplications on AMD processors by oneDNN.

torch uses MKL, which has no AVX-512 kernels for AMD: oneDNN takes half the time. Small matrices,
other dtypes, devices and processors are left to torch.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

SMALLEST = 2**21  # multiplications; a call of oneDNN takes 10 us more than a call of MKL
CPUINFO = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
ONEDNN_IS_FASTER = ONEDNN and "AuthenticAMD" in CPUINFO and "avx512f" in CPUINFO


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [*, K] @ weight.T [K, N] + bias [N]."""
    if _by_onednn(x, weight, x.numel() * len(weight)):
        out = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias)
        return out.view(*x.shape[:-1], len(weight))
    return F.linear(x, weight, bias)


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Return a [M, K] @ b [K, N], not differentiable."""
    return _onednn(a, b.T) if _by_onednn(a, b, a.numel() * b.shape[1]) else a @ b


class Linear(nn.Linear):
    """nn.Linear with the functions above."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs [*, N]."""
        return linear(input, self.weight, self.bias)


def _by_onednn(a: Tensor, b: Tensor, count: int) -> bool:
    single = a.dtype == b.dtype == torch.float32 and a.device.type == b.device.type == "cpu"
    large = count >= SMALLEST and not torch.is_autocast_enabled("cpu")
    return ONEDNN_IS_FASTER and single and large


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None):  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        by_x = mm(grad, weight) if for_x else None
        by_weight = mm(grad.T, x) if for_weight else None
        return by_x, by_weight, grad.sum(0) if for_bias else None
