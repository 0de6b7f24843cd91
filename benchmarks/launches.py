"""Count the kernels of a decoder layer, forward and backward: own layers and policy.compile.

    python -m benchmarks.launches

Counted on a CPU, from operators without views and from Inductor's code for CPUs; a GPU launches
about as many. The layer has the structure of Qwen2.5-0.5B at an eighth of its width.
"""

import re

import torch
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from policies.layout import Layout
from policies.models.fast import layers
from policies.scorer import Scorer

VIEWS = "view _unsafe_view transpose t expand slice unsqueeze squeeze permute detach alias select"
VIEWS += " split as_strided _reshape_alias unbind split_with_sizes slice_backward reshape"
VIEWS += " device promote_types"
KERNEL = re.compile(
    r"^\s+cpp_fused\w*\(|extern_kernels\.\w+\(|torch\.ops\.aten\.[\w.]+\(", re.MULTILINE
)


class Operators(TorchDispatchMode):
    """Count the operators that are no views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name.split("::")[1] not in VIEWS.split()
        return func(*args, **(kwargs or {}))


def make_model(num_layers: int) -> nn.Module:
    """Return a Qwen2 with few, narrow layers."""
    sizes = {"vocab_size": 512, "hidden_size": 112, "intermediate_size": 608}
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2}
    config = Qwen2Config(**sizes, **heads, num_hidden_layers=num_layers, tie_word_embeddings=True)
    return Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa")


def train_step(model: nn.Module) -> None:
    """Run forward and backward of the model's body on 8 rows of 64 tokens."""
    rows, length = 8, 64
    ids = torch.zeros(rows, length, dtype=torch.int64)
    mask = torch.ones(rows, 1, length, length, dtype=torch.bool)
    layout = Layout(ids, torch.arange(length).expand(rows, length), mask, torch.arange(ids.numel()))
    Scorer(model, autocast=torch.bfloat16).hidden(layout).float().sum().backward()


def main() -> None:
    """Print both counts."""
    counts = []
    for num_layers in (2, 4):
        layers.replace_layers(model := make_model(num_layers))
        train_step(model)  # makes the gradients
        with Operators() as operators:
            train_step(model)
        counts.append(operators.count)
    model = make_model(2)
    for layer in model.model.layers:  # pyright: ignore[reportGeneralTypeIssues]
        layer.compile(dynamic=True)
    _, codes = run_and_get_code(train_step, model)  # forward and backward of a layer
    bodies = [code[code.index("def call") :] for code in codes]
    forward, backward = (len(KERNEL.findall(body)) for body in bodies)
    print(f"a decoder layer, own layers: {(counts[1] - counts[0]) // 2} kernels")
    print(f"compiled: {forward} forward and {backward} backward")


if __name__ == "__main__":
    main()
