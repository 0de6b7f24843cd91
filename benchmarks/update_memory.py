"""Measure memory and time of forward and backward, with and without gradient checkpointing.

    python -m benchmarks.update_memory [--rows 2] [--tokens 512] [--kept 64] [--repeats 2]

SmolLM2-135M in float32, all weights and LoRA of rank 16; the last `kept` tokens of each row have a
loss, like a reply after its prompt. The peak excludes the weights and their gradients.
"""

import argparse

import torch

from benchmarks.measure import MIB, peak_bytes, seconds
from policies.load import load_policy
from policies.models import EMBEDDED


def main() -> None:
    """Print one line for all weights and one for LoRA."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("rows", 2), ("tokens", 512), ("kept", 64), ("repeats", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.manual_seed(0)
    ids = torch.randint(1000, 40_000, (args.rows, args.tokens))
    mask = torch.ones_like(ids, dtype=torch.bool)
    keep = mask & (torch.arange(args.tokens) >= args.tokens - args.kept)
    print(f"rows={args.rows} tokens={args.tokens} kept={args.kept}  peak MiB, seconds")
    for name, r in (("all weights", 0), ("LoRA r=16", 16)):
        costs = []
        for on in (False, True):
            policy = load_policy(EMBEDDED, lora={"r": r}, gradient_checkpointing=on)
            policy.scorer.train()

            def work(scorer=policy.scorer) -> None:
                scorer(ids, mask, keep).log_probs.mean().backward()

            work()  # allocates the gradients
            costs.append((peak_bytes(work) / MIB, seconds(work, args.repeats)))
            del policy
        (plain, fast), (less, slow) = costs
        print(
            f"{name:12} {plain:6.0f} {fast:5.1f}   checkpointed {less:6.0f} {slow:5.1f}   "
            f"ratio {less / plain:.2f} {slow / fast:.2f}"
        )


if __name__ == "__main__":
    main()
