"""Measure the memory of a rank with the full model (ddp) and with shards (fsdp2).

    python -m benchmarks.shards [--ranks 2] [--model <folder or id>] [--dtype float32] [--tokens 64]

Policy, reference, gradients and AdamW's moments of a rank by the size of their tensors, and the
memory of the process beyond its imports: after an update, at the peak of an update, and while the
policy samples with gathered shards.
"""

import argparse
import gc
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.measure import MIB
from policies.load import load_policy, load_reference
from policies.models import EMBEDDED
from policies.sharding import local_bytes
from trainer.modes.preflight.profile import restart_peak
from trainer.objectives import SFTObjective
from trainer.optimizer import make_optimizer
from trainer.runtime import Runtime, peak_memory
from trainer.shards import ShardedRuntime
from trainer.update import Update

WAYS = ("ddp", "fsdp2")


def main() -> None:
    """Start the ranks of both strategies, one after the other; print the results of rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default=EMBEDDED)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--way", choices=WAYS)
    args = parser.parse_args()
    if args.way:
        return measure(args)
    print(f"{args.model}, {args.dtype}, {args.ranks} ranks, MiB of a rank")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.ranks}"]
    results = []
    for way in WAYS:
        words = [*launcher, "-m", "benchmarks.shards", *sys.argv[1:], f"--way={way}"]
        done = subprocess.run(
            [sys.executable, *words], check=True, stdout=subprocess.PIPE, text=True
        )
        named = dict(line.split() for line in done.stdout.splitlines())
        results.append({name: float(value) for name, value in named.items()})
    for name, full in results[0].items():
        print(f"{name:12} ddp {full:8.0f}   fsdp2 {results[1][name]:8.0f}   "
              f"ratio {results[1][name] / full:.2f}")  # fmt: skip


def measure(args: argparse.Namespace) -> None:
    """Take two steps in this rank; rank 0 prints the sizes and the memory."""
    kind = Runtime if args.way == "ddp" else ShardedRuntime
    with tempfile.TemporaryDirectory() as folder, kind(Path(folder)) as runtime:
        torch.set_num_threads(1)
        start = psutil.Process().memory_info().rss
        make = partial(load_policy, args.model, dtype=args.dtype, max_new_tokens=2)
        policy = runtime.load(make)
        reference = load_reference(policy)
        scorer, optimizer = runtime.prepare(policy, make_optimizer, {"lr": 1e-6}, reference)
        update = Update(scorer, optimizer, SFTObjective(), runtime, lr=lambda step: 1e-6)
        batch = rows(args.tokens, policy.device)
        for _ in range(2):
            gc.collect()
            restart_peak(runtime.device)
            update(batch.clone())
        highest = peak_memory(runtime.device) - start
        gc.collect()
        after = restart_peak(runtime.device) - start
        size = local_bytes
        with policy.scorer.placement.gather():
            pass
        gathered = peak_memory(runtime.device) - start
        parts = {
            "policy": sum(map(size, policy.scorer.parameters())),
            "reference": sum(map(size, reference.scorer.parameters())),
            "gradients": sum(map(size, policy.scorer.parameters())),
            "moments": sum(size(v) for s in optimizer.state.values() for v in s.values()
                           if isinstance(v, Tensor)),
        }  # fmt: skip
        sizes = {"held": sum(parts.values()), "rss": after, "peak": highest, "sampling": gathered}
        if runtime.is_main:
            for name, value in (parts | sizes).items():
                print(name, value / MIB)
        runtime.accelerator.wait_for_everyone()
        runtime.accelerator.end_training()
    os._exit(0)


def rows(tokens: int, device: Any) -> TensorDict:
    """Return two rows to learn from, the same on every rank."""
    ids = torch.randint(1000, 30_000, (2, tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids, dtype=torch.bool)
    batch = TensorDict(batch_size=[2])
    batch.set(("tokens", "full"), ids)
    batch.set(("masks", "all_attention_mask"), mask)
    batch.set("loss_mask", mask.clone())
    return batch.set("temperature", torch.ones(2)).to(device)


if __name__ == "__main__":
    main()
