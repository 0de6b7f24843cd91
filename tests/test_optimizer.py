"""AdamW by its formula, and half-precision weights that small steps still move."""

import pytest
import torch

from trainer.optimizer import make_optimizer


def slow_adamw(weight: float, grads: list[float], *, lr: float, decay: float, eps=1e-8) -> float:
    """Return a weight after AdamW steps (Loshchilov and Hutter, algorithm 2), in Python floats."""
    mean = square = 0.0
    for t, grad in enumerate(grads, start=1):
        mean, square = 0.9 * mean + 0.1 * grad, 0.999 * square + 0.001 * grad**2
        move = mean / (1 - 0.9**t) / ((square / (1 - 0.999**t)) ** 0.5 + eps)
        weight = weight - lr * decay * weight - lr * move
    return weight


GRADS = [0.5, -0.25, 1.0, 0.75, 0.5, 0.5, -0.125, 1.0] * 25  # exact in bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_hundred_small_steps_are_those_of_the_formula(dtype):
    model = torch.nn.Linear(1, 1, bias=False, dtype=dtype)
    model.weight.data.fill_(0.5)
    place = model.weight.data_ptr()
    optimizer = make_optimizer(model, lr=1e-5, weight_decay=0.1)
    for grad in GRADS:
        model.weight.grad = torch.full_like(model.weight, grad)
        optimizer.step()
    want = slow_adamw(0.5, GRADS, lr=1e-5, decay=0.1)
    assert want < 0.4985
    state = optimizer.state[model.weight]
    got = state.get("master", model.weight).item()
    assert got == pytest.approx(want, abs=5e-6)
    assert model.weight.dtype == dtype
    assert model.weight.item() == torch.tensor(got).to(dtype).item()
    assert model.weight.data_ptr() == place, "whoever shares the weight sees it move"
    assert ("master" in state) == (dtype == torch.bfloat16)
