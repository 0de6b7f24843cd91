"""Measure the peak memory of a RolloutFromModel rollout, as a ratio to its result.

    python -m benchmarks.rollout_memory [--rows 64] [--tokens 256] [--prompt 64] [--vocabulary 330]

The model is a GPT-2 of two narrow layers with random weights and no EOS, so all rows are full. The
peak is the growth of the resident memory of the process (Linux); nothing is asserted. With a real
vocabulary (50257) logits would fill the memory: see the last line.
"""

import argparse
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.measure import MIB, reset_peak, resident
from policies import GPT2RewardModel
from trainer import PromptData, RolloutFromModel


def main() -> None:
    """Measure `generate` alone, and with `create_rollout_td` after it."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("rows", 64), ("tokens", 256), ("prompt", 64), ("vocabulary", 330)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=args.vocabulary,
        n_positions=args.prompt + args.tokens,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    model, ref = GPT2LMHeadModel(config).eval(), GPT2LMHeadModel(config).eval()
    roll = RolloutFromModel(model, ref, GPT2RewardModel(model), max_new_tokens=args.tokens)
    ids = torch.randint(args.vocabulary, (args.rows, args.prompt))
    batch = PromptData(
        input_ids=ids,
        attention_mask=torch.ones_like(ids, dtype=torch.bool),
        prompt_rindex=torch.full((args.rows,), args.prompt - 1),
        batch_size=[args.rows],
    )
    roll.generate(batch[:2])  # one-time allocations
    before, start = reset_peak(), time.perf_counter()
    generated = roll.generate(batch)
    generate_peak = resident("VmHWM") - before
    td = roll.create_rollout_td(batch, *generated)
    peak, seconds = resident("VmHWM") - before, time.perf_counter() - start
    leaves = td.values(include_nested=True, leaves_only=True)
    size = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    scores = args.rows * args.tokens * args.vocabulary * 4
    print(f"B={args.rows} N={args.tokens} prompt={args.prompt} vocabulary={args.vocabulary}")
    print(f"size of the rollout         {size / MIB:6.0f} MiB, sampled in {seconds:.1f} s")
    for name, value in (
        ("peak of generate", generate_peak),
        ("peak of both steps", peak),
        ("scores [B, N, V], not kept", scores),
    ):
        print(f"{name:27} {value / MIB:6.0f} MiB {value / size:6.2f} x")


if __name__ == "__main__":
    main()
