"""Layers for a loaded model: norms and MLPs that save less for the backward, faster linear layers.

The norm saves its input, the MLP the outputs of gate and up; autograd would also save casts,
matmuls and outputs of the activation. A bfloat16 iteration of SmolLM2 takes 4.1, not 4.5 GiB.
"""

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from policies.layout import takes_masks
from policies.models.fast import products
from policies.models.fast.attention import NAME

# transformers' classes with the forward of Llama's
NORMS = ("LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
MLPS = ("LlamaMLP", "Qwen2MLP", "Qwen3MLP")


def replace_layers(model: nn.Module, *, compare: bool = True) -> None:
    """Replace the classes of MLPs and of norms before linear layers by those below; keep weights.

    The first layer of each class is compared; a class that computes something else is kept.
    Linear layers become products.Linear where oneDNN is faster. Set `compare=False` for fake
    tensors, which have no values.
    """
    equal: dict[type, bool] = {}
    for name, layer in model.named_modules():
        kind = type(layer)
        if kind is nn.Linear and products.ONEDNN_IS_FASTER:
            layer.__class__ = products.Linear
        if not kind.__module__.startswith("transformers.models."):
            continue  # another layer of that name
        if kind.__name__ in NORMS and name.endswith("layernorm"):  # not the last, nor of heads
            ours = RMSNorm
        elif kind.__name__ in MLPS:
            ours = MLP
        else:
            continue
        if kind not in equal:
            equal[kind] = not compare or computes_the_same(layer, ours)
        if equal[kind]:
            layer.__class__ = ours


@torch.enable_grad()
def computes_the_same(layer: nn.Module, ours: type[nn.Module]) -> bool:
    """Return whether a layer has the same outputs and gradient as one of the class `ours`."""
    weight, theirs, results = next(layer.parameters()), type(layer), []
    width = weight.shape[-1]
    inputs = torch.linspace(-2, 2, 4 * width, dtype=weight.dtype, device=weight.device)
    for kind in (theirs, ours):
        x = inputs.view(width, 4).T.clone().requires_grad_()  # [4, H]
        layer.__class__ = kind
        out = layer(x)
        (slope,) = torch.autograd.grad(out.float().square().sum(), x)
        results.append(torch.stack([out, slope]).detach())  # [2, 4, H]
    layer.__class__ = theirs
    return is_close(*results)


def replace_attention(model: Any) -> None:
    """Replace sdpa by leash's attention on a CPU, if the outputs of a layer are equal."""
    theirs = model.config._attn_implementation
    if theirs != "sdpa" or model.device.type != "cpu" or not takes_masks(model.config):
        return
    outputs = []
    for kind in (theirs, NAME):
        model.set_attn_implementation(kind)
        outputs.append(attention_output(model))
    if not is_close(*outputs):
        model.set_attn_implementation(theirs)


class FirstAttention(Exception):
    """Ends a forward after its first attention."""


@torch.no_grad()
def attention_output(model: nn.Module) -> Tensor:
    """Return the outputs [7, H] of the first attention for two rows, one of them padded."""

    def stop(layer: nn.Module, inputs: Any, result: tuple[Tensor, Any]) -> None:
        outputs.append(result[0])
        raise FirstAttention

    outputs: list[Tensor] = []
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]]).bool()
    attention = next(m for name, m in model.named_modules() if name.endswith("attn"))
    hook = attention.register_forward_hook(stop)
    with hook, contextlib.suppress(FirstAttention):
        model(input_ids=torch.arange(4).expand(2, 4), attention_mask=mask)
    return outputs[0][mask]


def is_close(got: Tensor, want: Tensor) -> bool:
    """Return whether outputs differ by no more than the rounding of their dtype."""
    limit = 1e-5 if want.dtype.itemsize >= 4 else 2e-2
    gap = (got.float() - want.float()).norm()
    return bool(gap <= limit * want.float().norm())


class RMSNorm(nn.Module):
    """Return weight * x / sqrt(mean(x^2) + eps), in the dtype of the matmuls that follow."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the normalised states [..., H]."""
        inputs = hidden_states, self.weight, self.variance_epsilon
        if hidden_states.is_cuda and self.weight.dtype.itemsize >= 4:  # half: rounding would differ
            return normalise_at_once(*inputs)
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
    return _for_products((wide * scale).to(x.dtype) * weight), scale


def normalise_at_once(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the normalised x [..., H] by one kernel, for GPUs, where launches take the time."""
    return _for_products(F.rms_norm(x, weight.shape, weight, eps))


def _for_products(out: Tensor) -> Tensor:
    """Return outputs in the dtype of the matmuls that follow, cast once for all of them."""
    device = out.device.type
    cast = torch.is_autocast_enabled(device)
    return out.to(torch.get_autocast_dtype(device)) if cast else out


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
