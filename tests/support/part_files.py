"""Checkpoints of ranks that hold parts of the weights, saved and restored by any number of ranks.

A script for torchrun, see `sharded.start`. Who saved and who restored write what they have as full
tensors, gathered by DTensor itself.
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


def write(files: Checkpoints, name: str) -> None:
    """Write the weights as the model has them, masters and moments, as full tensors."""
    scorer, out = files.policy.scorer, {}
    half = scorer.placement.half
    for key, p in scorer.named_parameters():
        value = full(p.detach())
        out[f"{key}/weight"] = value.to(half) if half else value
        state = dict(files.optimizer.state.get(p, {}))
        state |= {"master": p.detach()} if half else {}
        out |= {f"{key}/{part}": full(x).clone() for part, x in state.items()}
    if files.runtime.is_main:
        save_file(out, files.runtime.folder / f"{name}.safetensors")
    files.runtime.accelerator.wait_for_everyone()


def make_files(folder: Path, case: str, *, sharded: bool) -> Checkpoints:
    """Return the checkpoints of a case, with a policy and an optimizer of this rank."""
    make_runtime = ShardedRuntime if sharded else Runtime
    runtime = make_runtime(folder / case, device="cpu")
    policy = runtime.load(lambda device: make(case))
    _, optimizer = runtime.prepare(policy, lambda model: make_optimizer(model, lr=1e-2))
    return (ShardedCheckpoints if sharded else Checkpoints)(runtime, policy, optimizer)


def save(folder: Path, case: str, *, sharded: bool) -> None:
    """Save after two steps."""
    files = make_files(folder, case, sharded=sharded)
    for seed in (1, 2):
        step(files.optimizer, seed)
    files.save(1, {})
    write(files, "saved")


def restore(folder: Path, case: str, name: str, *, sharded: bool) -> None:
    """Restore into other weights; write also the bytes that the weights took, and the largest."""
    files = make_files(folder, case, sharded=sharded)
    saved: Any = files.newest()
    with Floats(files.policy.scorer) as ledger:
        files.restore_weights(saved)
    most = max(full(p.detach()).nbytes for p in files.policy.scorer.parameters())
    path = files.runtime.folder / f"{name} {files.runtime.rank} bytes"
    path.write_text(f"{ledger.peak - ledger.before} {most}")
    files.restore(saved)
    write(files, name)


def main(place: str, ranks: str, launch: str, *first: str) -> None:
    """Restore every case in one rank; before it, save if asked to."""
    sharded = int(ranks) > 1 and launch == "fsdp2"
    for case in CASES:
        if first:
            save(Path(place), case, sharded=sharded)
        restore(Path(place), case, f"{ranks} {launch}", sharded=sharded)
    if int(ranks) > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
