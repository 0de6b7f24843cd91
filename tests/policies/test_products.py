"""float32 products by oneDNN against float64, with their gradients."""

import pytest
import torch
import torch.nn.functional as F

from policies.models.fast import products


@pytest.fixture
def all_by_onednn(monkeypatch):
    monkeypatch.setattr(products, "ONEDNN_IS_FASTER", True)  # on any processor
    monkeypatch.setattr(products, "SMALLEST", 1)


@pytest.mark.skipif(not products.ONEDNN, reason="this torch has no oneDNN")
@pytest.mark.parametrize("shape", [(7, 24), (2, 5, 24), (1, 24), (24,)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_and_its_gradients_are_those_of_float64(all_by_onednn, shape, bias):
    layer = torch.nn.Linear(24, 40, bias=bias)
    layer.__class__ = products.Linear
    x = torch.randn(shape, requires_grad=True)
    up = torch.randn(40, *shape[:-1]).movedim(0, -1)  # not contiguous
    out = layer(x).clamp_(-100, 100)  # in place, as OLMo has it
    inputs = [x, *layer.parameters()]
    grads = torch.autograd.grad(out, inputs, up)
    wide = [p.detach().double().requires_grad_() for p in inputs]
    want = F.linear(*wide)
    slopes = torch.autograd.grad(want, wide, up.double())
    for got, right in zip([out, *grads], [want, *slopes], strict=True):
        torch.testing.assert_close(got.double(), right, atol=1e-5, rtol=0)


@pytest.mark.skipif(not products.ONEDNN, reason="this torch has no oneDNN")
def test_a_frozen_weight_passes_the_gradient_on_and_other_dtypes_are_left_to_torch(all_by_onednn):
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(5, 8)
    products.linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, 8))
    for dtype in (torch.float64, torch.bfloat16):
        a, b = x.detach().to(dtype), weight.to(dtype)
        assert torch.equal(products.linear(a, b), F.linear(a, b))
        assert torch.equal(products.mm(a, b.T), a @ b.T)
    layer = products.Linear(8, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
