"""Compare the built-in sampler and vLLM: seconds to sample the same prompts and to sync weights.

    .venv-vllm/bin/python -m benchmarks.engines [--model ...] [--prompts 64] [--tokens 16 128]

Both run alternately in this process on one model; the ratio is of medians.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import torch
from tensordict import TensorDict

from policies.chats.containers import ChatHistory
from policies.chats.history import History
from policies.engines.vllm_policy import make_vllm_generator
from policies.load import load_policy
from policies.models.find import EMBEDDED
from policies.random import fold
from trainer.weight_sync import weight_sync


def seconds(work: Callable[[], object]) -> float:
    """Return the wall seconds of a piece of work."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def chats(count: int) -> TensorDict:
    """Return distinct prompts."""
    rows = [[{"role": "user", "content": f"Tell me a story of {i} sheep."}] for i in range(count)]
    td = TensorDict(history=ChatHistory(prompt=History.from_chats(rows)), batch_size=[count])
    return td.set("stream", fold(0, torch.arange(count)))


def main() -> None:
    """Print the table."""
    words = argparse.ArgumentParser(description="Compare the built-in sampler and vLLM.")
    words.add_argument("--model", default=EMBEDDED)
    words.add_argument("--prompts", type=int, default=64)
    words.add_argument("--tokens", type=int, nargs="+", default=[16, 128])
    words.add_argument("--times", type=int, default=3)
    args = words.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    policy = load_policy(args.model)
    last = policy.model.config.vocab_size - 1  # ends no response that is likely
    engine = make_vllm_generator(policy, folder=Path(mkdtemp()))
    print(f"{args.model}, {args.prompts} prompts, {torch.get_num_threads()} threads")
    synced = [seconds(lambda: weight_sync(policy, engine)) for _ in range(args.times)]
    print(f"weight sync, verified: {statistics.median(synced):.2f} s")
    print(f"{'new tokens':>10} {'built in':>9} {'vLLM':>9} {'ratio':>6}")
    for tokens in args.tokens:
        limits = replace(policy.limits, max_new_tokens=tokens, eos_token_id=(last,))
        took: list[list[float]] = [[], []]
        for _ in range(args.times):
            for times, generator in zip(took, (policy, engine), strict=True):
                speak = generator.get_new_version(limits=limits, inplace=False)
                times.append(seconds(lambda speak=speak: speak(chats(args.prompts))))
        built_in, vllm = map(statistics.median, took)
        print(f"{tokens:>10} {built_in:>7.2f} s {vllm:>7.2f} s {built_in / vllm:>6.2f}")


if __name__ == "__main__":
    main()
