"""Checkpoints of ranks that hold parts of the weights, saved and restored by any number of ranks.

A script for torchrun, see `sharded.start`: the first call saves, later ones restore into other
weights. Each writes what it has as full tensors, gathered by DTensor itself.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from policies.load import load_policy
from policies.models.weights import full, put
from trainer.checkpoint import Checkpoints
from trainer.optimizer import make_optimizer
from trainer.runtime import Runtime
from trainer.scale.dry_run.ledger import Ledger
from trainer.scale.shards import ShardedCheckpoints, ShardedRuntime

CASES = ("float32", "bfloat16", "lora")


def make(case: str) -> Any:
    """Return a policy of a case that is not as the model's files."""
    how: dict[str, Any] = {"lora": {"lora": {"r": 2}}, "bfloat16": {"dtype": "bfloat16"}}
    policy = load_policy("tiny", **how.get(case, {}))
    with torch.no_grad():
        for p in policy.scorer.parameters():
            p.mul_(1.5 if p.requires_grad else 1)
    return policy


class Floats(Ledger):
    """Count floating-point tensors beyond the weights; plans that ranks exchange are bytes."""

    def __init__(self, scorer: Any) -> None:
        super().__init__()
        for p in scorer.parameters():
            self._add(p.detach())
        self.restart()
        self.before = self.now

    def _add(self, tensor: Any) -> None:
        if tensor.is_floating_point() and not tensor.is_meta:
            super()._add(tensor)


def step(optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Take a step with gradients that do not depend on the ranks."""
    generator = torch.Generator().manual_seed(seed)
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.grad = torch.zeros_like(p)
        put(p.grad, torch.randn(p.shape, generator=generator))
    optimizer.step()
    optimizer.zero_grad()


def write(scorer: Any, optimizer: torch.optim.Optimizer, path: Path, *, main: bool) -> None:
    """Write the weights as the model has them, masters and moments, as full tensors."""
    half, out = scorer.placement.half, {}
    for name, p in scorer.named_parameters():
        value = full(p.detach())
        out[f"{name}/weight"] = value.to(half) if half else value
        state = dict(optimizer.state.get(p, {}))
        state |= {"master": p.detach()} if half else {}
        out |= {f"{name}/{key}": full(x).clone() for key, x in state.items()}
    if main:
        save_file(out, path)


def main(place: str, ranks: str, launch: str) -> None:
    """Save in the first call, restore in the others."""
    sharded, at = int(ranks) > 1 and launch == "fsdp2", Path(place)
    makers: Any = (ShardedRuntime, ShardedCheckpoints) if sharded else (Runtime, Checkpoints)
    for case in CASES:
        runtime = makers[0](at / case, device="cpu")
        policy = runtime.load(lambda device, case=case: make(case))
        _, optimizer = runtime.prepare(policy, lambda model: make_optimizer(model, lr=1e-2))
        files = makers[1](runtime, policy, optimizer)
        begun, name = files.newest(), f"{ranks} {launch}"
        if begun is None:
            for seed in (1, 2):
                step(optimizer, seed)
            files.save(1, {})
            name = "saved"
        else:
            with Floats(policy.scorer) as ledger:
                files.restore_weights(begun)
            most = max(full(p.detach()).nbytes for p in policy.scorer.parameters())
            text = f"{ledger.peak - ledger.before} {most}"
            (at / case / f"{name} {runtime.rank} bytes").write_text(text)
            files.restore(begun)
        write(policy.scorer, optimizer, at / case / f"{name}.safetensors", main=runtime.is_main)
        runtime.accelerator.wait_for_everyone()
    if int(ranks) > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
