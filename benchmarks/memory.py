"""Memory as a preflight and the cost model predict it, beside what a CPU takes.

    python -m benchmarks.memory [--tokens 256] [--only "fsdp2, 2 ranks" ...]

A random Qwen2 of 47 million weights, its reference, and updates on four rows. MiB of rank 0,
without its imports: predicted, measured and their ratio, of

held      weights, reference and moments, as preflight=true counts them; the resident memory
          between iterations
limits    the bound of an update's peak that preflight=true gives by rows of a quarter of the
          length; the resident memory at its peak, with rows of the whole
paper     the sum of benchmarks/simulate_scale.py; the same
"""

import argparse
import gc
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from tensordict import TensorDict
from transformers import Qwen2ForCausalLM

from benchmarks.simulate_scale import Plan, Shape, config, memory
from policies.load import load_policy, load_reference
from policies.models import find_model, load_tokenizer
from policies.quiet import quiet
from trainer.memory import status_bytes
from trainer.modes.preflight.costs import at_limits, held_by
from trainer.modes.preflight.footprint import Peak
from trainer.modes.preflight.play import Phase
from trainer.objectives import SFTObjective
from trainer.optimizer import make_optimizer
from trainer.runtime import Runtime
from trainer.shards import ShardedRuntime
from trainer.update import Update

MIB, ROWS, SHORT = 2**20, 4, 4
SHAPE = Shape(512, 8, 8, 2, 2048, 32768, True)
SMALL = Plan("small", SHAPE, "ddp", 1, half=False, checkpointed=False)
CASES = {
    "ddp, 1 rank": SMALL,
    "ddp, 1 rank, checkpointed": replace(SMALL, checkpointed=True),
    "ddp, 1 rank, untied": replace(SMALL, shape=replace(SHAPE, tied=False)),
    "ddp, 2 ranks": replace(SMALL, trains=2),
    "fsdp2, 2 ranks": replace(SMALL, launch="fsdp2", trains=2),
    "fsdp2, 2 ranks, checkpointed": replace(SMALL, launch="fsdp2", trains=2, checkpointed=True),
    "fsdp2, 2 ranks, bfloat16": replace(SMALL, launch="fsdp2", trains=2, half=True),
}


def main() -> None:
    """Measure each case in processes of its own, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--here")  # in a process of its own
    args = parser.parse_args()
    if args.here:
        return measure(CASES[args.only[0]], args.tokens, Path(args.here))
    print("MiB, predicted / measured: ratio")
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:
            plan, here = CASES[name], Path(folder) / name.replace(" ", "")
            make(plan, here)
            launcher = ["-m", "torch.distributed.run", "--standalone"]
            launcher = [*launcher, f"--nproc_per_node={plan.trains}"] * (plan.trains > 1)
            words = [*launcher, "-m", "benchmarks.memory"]
            words += [f"--tokens={args.tokens}", "--only", name, f"--here={here}"]
            run = subprocess.run(
                [sys.executable, *words], check=True, stdout=subprocess.PIPE, text=True
            )
            print(f"{name:30}{run.stdout.strip()}", flush=True)


def make(plan: Plan, folder: Path) -> None:
    """Write a model of random weights."""
    torch.manual_seed(0)
    with quiet():
        Qwen2ForCausalLM(config(plan.shape)).save_pretrained(folder)
    load_tokenizer(find_model("tiny")).save_pretrained(folder)


def measure(plan: Plan, tokens: int, folder: Path) -> None:
    """Take updates in this rank; rank 0 prints the three lines as one."""
    kind = ShardedRuntime if plan.shards else Runtime
    with tempfile.TemporaryDirectory() as place, kind(Path(place)) as runtime:
        torch.set_num_threads(1)
        start = status_bytes("VmRSS")
        dtype = "bfloat16" if plan.half else "float32"
        ways = {"dtype": dtype, "gradient_checkpointing": plan.checkpointed, "max_new_tokens": 2}
        policy = runtime.load(partial(load_policy, str(folder), **ways))
        reference = load_reference(policy)
        scorer, optimizer = runtime.prepare(policy, make_optimizer, {"lr": 1e-6}, reference)
        how = {"lr": lambda step: 1e-6, "micro_batch_tokens": 10**6}
        update = Update(scorer, optimizer, SFTObjective(), runtime, **how)
        played, whole = (rows(n, policy.device) for n in (tokens // SHORT, tokens))
        update(played)  # the moments are there
        few, many = (look(update, batch) for batch in (played, whole))
        moments = [v for state in optimizer.state.values() for v in state.values()
                   if isinstance(v, torch.Tensor)]  # fmt: skip
        parts = held_by(policy.scorer.parameters(), reference.scorer.parameters(), moments)
        predicted = at_limits(few, scale=SHORT, gradients=parts["gradients"])
        paper = sum(memory(replace(plan, tokens=ROWS * tokens)).values())
        pairs = {
            "held": (sum(parts.values()) - parts["gradients"], many.before - start),
            "limits": (predicted - start, many.peak - start),
            "paper": (paper, many.peak - start),
        }
        if runtime.is_main:
            for name, (said, took) in pairs.items():
                print(f"{name} {said / MIB:5.0f} / {took / MIB:5.0f}: {said / took:.2f}", end="   ")
        runtime.accelerator.wait_for_everyone()
        runtime.accelerator.end_training()
    sys.stdout.flush()
    os._exit(0)


def look(update: Update, batch: TensorDict) -> Phase:
    """Measure an update, as a preflight does."""
    gc.collect()
    peak = Peak(torch.device("cpu"), trim=True)
    before = peak.now()
    update(batch)
    return Phase(0.0, before, peak.highest())


def rows(tokens: int, device: torch.device) -> TensorDict:
    """Return rows to learn from."""
    ids = torch.randint(1000, 30_000, (ROWS, tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids, dtype=torch.bool)
    batch = TensorDict(batch_size=[ROWS])
    batch.set(("tokens", "full"), ids)
    batch.set(("masks", "all_attention_mask"), mask)
    batch.set("loss_mask", mask.clone())
    return batch.set("temperature", torch.ones(ROWS)).to(device)


if __name__ == "__main__":
    main()
