"""Classes for the layers of a loaded model: norms and MLPs that keep less, faster linear layers.

Autograd keeps casts, products and outputs of the activation too. Here the norm keeps its input, the
MLP the outputs of gate and up. A bfloat16 iteration of SmolLM2 takes 4.1 GiB instead of 4.5.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from policies import products

# transformers' classes with the forward of Llama's
NORMS = ("LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
MLPS = ("LlamaMLP", "Qwen2MLP", "Qwen3MLP")


def replace_layers(model: nn.Module) -> None:
    """Give the norms before linear layers, and the MLPs, the classes below; weights stay.

    Linear layers become products.Linear where oneDNN is faster.
    """
    silu = getattr(model.config, "hidden_act", None) == "silu"
    for name, layer in model.named_modules():
        kind = type(layer).__name__
        if type(layer) is nn.Linear and products.ONEDNN_IS_FASTER:
            layer.__class__ = products.Linear
        if not type(layer).__module__.startswith("transformers.models."):
            continue  # another layer of that name
        if kind in NORMS and name.endswith("layernorm"):  # not the last one, nor those of heads
            layer.__class__ = RMSNorm
        elif kind in MLPS and silu:
            layer.__class__ = MLP


class RMSNorm(nn.Module):
    """Return weight * x / sqrt(mean(x^2) + eps), in the dtype of the products that follow."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the normalised states [..., H]."""
        inputs = hidden_states, self.weight, self.variance_epsilon
        return _Norm.apply(*inputs) if torch.is_grad_enabled() else _normalise(*inputs)[0]


class MLP(nn.Module):
    """Return down(silu(gate(x)) * up(x))."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs [..., H]."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        if torch.is_grad_enabled():
            return self.down_proj(_GatedSiLU.apply(gate, up))
        return self.down_proj(F.silu(gate).mul_(up))


def _normalise(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalised x [..., H] and the factor [..., 1]; float64 is not rounded."""
    wide = _widened(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    out, device = (wide * scale).to(x.dtype) * weight, x.device.type
    cast = torch.is_autocast_enabled(device)
    return out.to(torch.get_autocast_dtype(device)) if cast else out, scale


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        out, scale = _normalise(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        grad, normal = _widened(grad), _widened(x) * scale
        both = grad * normal
        by_weight = both.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        along = both.mul_(weight).mean(-1, keepdim=True)
        by_x = normal.mul_(-along).addcmul_(grad, _widened(weight)).mul_(scale)
        return by_x.to(x.dtype), by_weight, None


class _GatedSiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
