"""Measure how CPU seconds and peak memory grow with the size of a batch, and fit the exponents.

    OMP_NUM_THREADS=1 THP_MEM_ALLOC_ENABLE=1 python -m benchmarks.growth
        [--axes response group] [--largest 512] [--autocast bfloat16] [--checkpointing]
        [--repeats 1]

A Qwen2 with random weights and no EOS, so every response has its full length. One axis grows at a
time, to `--largest` at most; the others stay at their base. The phases are those of an iteration:
the rollout, the scores of a reference, the update's forwards and backwards with the gradients.
Memory is the growth of the process's resident bytes (Linux) during a phase; a run of leash has the
huge pages of that variable too. The least of `--repeats` counts. In brackets: the slope of
log(value) over log(size), by least squares over the upper half of the points. Nothing is asserted.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.measure import MIB, markdown, reset_peak, resident
from policies.layout import pack_rows
from policies.models.fast.attention import NAME
from policies.random import fold
from policies.sampler import Stop, sample
from policies.scorer import Scorer, score_in_parts

PROMPT, BASE = 64, {"response": 128, "group": 4, "vocabulary": 32_000, "prompts": 2}
AXES = {
    "response": [64, 128, 256, 512, 1024, 2048, 4096],
    "group": [4, 8, 16, 32, 64],
    "vocabulary": [8_000, 16_000, 32_000, 64_000, 152_000],
    "prompts": [2, 4, 8, 16],
}
WIDTHS = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": PROMPT + 4096}
COUNTS = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}


def cost(work: Callable[[], object]) -> tuple[float, float]:
    """Return the CPU seconds of all threads and the peak MiB of a piece of work."""
    before, start = reset_peak(), time.process_time()
    work()
    return time.process_time() - start, (resident("VmHWM") - before) / MIB


def measure(scorer: Scorer, sizes: dict[str, int], limit: int) -> list[tuple[float, float]]:
    """Return the cost of each phase for one batch; `limit` is trainer.micro_batch_tokens."""
    response, vocabulary = sizes["response"], sizes["vocabulary"]
    group = torch.arange(sizes["prompts"]).repeat_interleave(sizes["group"])  # [B]
    prompts = torch.randint(vocabulary, (sizes["prompts"], PROMPT))[group]
    tokens = torch.cat([prompts, torch.randint(vocabulary, (len(group), response))], -1)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    keep = mask & (torch.arange(PROMPT + response) >= PROMPT)
    streams, stop = fold(0, torch.arange(len(group))), Stop(frozenset())

    def rollout() -> None:
        with scorer.eval().precision():
            sample(scorer.model, prompts, streams=streams, stop=stop, max_new_tokens=response)

    @torch.no_grad()
    def score() -> None:
        score_in_parts(scorer, tokens, mask, keep, limit=limit, group_id=group)

    def update() -> None:
        scorer.train()
        for rows in pack_rows(mask, limit, group_id=group):
            part = tokens[rows], mask[rows], keep[rows]
            scorer(*part, group_id=group[rows], entropy=True).log_probs.sum().backward()

    costs = [cost(work) for work in (rollout, score, update)]
    scorer.zero_grad()
    return costs


def cell(points: list[int], values: Sequence[float], digits: int) -> str:
    """Return the values and the exponent of their growth."""
    half = (len(points) - 1) // 2
    x, y = ([math.log(max(v, 1e-3)) for v in column[half:]] for column in (points, values))
    slope = statistics.linear_regression(x, y).slope if len(x) > 1 else math.nan
    return f"{' '.join(f'{v:.{digits}f}' for v in values)} ({slope:.2f})"


def main() -> None:
    """Print one row per axis."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--autocast", choices=["bfloat16"])
    parser.add_argument("--checkpointing", action="store_true")
    for name, value in (("limit", 4096), ("largest", 10**6), ("repeats", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    dtype, rows = getattr(torch, args.autocast) if args.autocast else None, []
    torch.manual_seed(0)
    for axis in args.axes:
        points, costs = [p for p in AXES[axis] if p <= args.largest], []
        for point in points:
            sizes = BASE | {axis: point}
            shape = {"vocab_size": sizes["vocabulary"], "tie_word_embeddings": True}
            model = Qwen2ForCausalLM(
                Qwen2Config(**shape, **WIDTHS, **COUNTS, attn_implementation=NAME)
            )
            if args.checkpointing:
                model.activation_checkpointing_enable({"use_reentrant": False})
            scorer = Scorer(model, autocast=dtype)
            measure(scorer, sizes | {"response": 4}, args.limit)  # one-time allocations
            runs = [measure(scorer, sizes, args.limit) for _ in range(args.repeats)]
            costs.append([min(v) for p in zip(*runs, strict=True) for v in zip(*p, strict=True)])
        cells = [cell(points, v, 2 - 2 * (i % 2)) for i, v in enumerate(zip(*costs, strict=True))]
        rows.append([axis, " ".join(map(str, points)), *cells])
    head = [f"{phase} {unit}" for phase in ("rollout", "score", "update") for unit in ("s", "MiB")]
    print(f"{BASE}, {PROMPT} tokens a prompt, limit {args.limit}, {args.autocast or 'float32'}")
    print(markdown(["axis", "points", *head], rows))


if __name__ == "__main__":
    main()
