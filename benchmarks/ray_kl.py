"""Measure the cost of sharing one reference through Ray, for 1, 2 and 4 environments.

    python -m benchmarks.ray_kl [--model tiny] [--rows 8] [--tokens 64] [--steps 10]

Prints the latency of a step (median, ms), the throughput of all environments together (tokens/s),
the actor's memory (MiB) and the bytes sent to create it; first without Ray. Needs
`pip install -e '.[ray]'`. Nothing is asserted.
"""

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import psutil
import torch
from tensordict import TensorDict

from envs.transforms import RayRetrieveKL, RetrieveKL
from policies import load_policy


def reference(model: str) -> Any:
    """Return a scoring version of a model."""
    return load_policy(model).get_new_version(
        generate=False, input_mode="tokens", log_probs_key="ref_log_probs", pad_output=True
    )


def batch(rows: int, tokens: int) -> TensorDict:
    """Return a random batch of ids with generation log-probs."""
    keep = torch.ones(rows, tokens, dtype=torch.bool)
    parts = {
        "tokens": {"full": torch.randint(5, 15, (rows, tokens))},
        "masks": {"all_attention_mask": keep, "all_response_mask": keep},
        "log_probs": {"full": -torch.rand(rows, tokens)},
        "next": {"reward": torch.ones(rows, 1)},
    }
    return TensorDict(parts, batch_size=[rows])


def run(transform: Any, td: TensorDict, steps: int) -> list[float]:
    """Return the seconds of each step of an environment."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        transform(td.copy())
        times.append(time.perf_counter() - start)
    return times


def line(name: str, transforms: list[Any], td: TensorDict, steps: int) -> str:
    """Step all environments concurrently; return a row of the table."""
    for transform in transforms:
        run(transform, td, 2)
    start = time.perf_counter()
    with ThreadPoolExecutor(len(transforms)) as pool:
        times = [t for ts in pool.map(lambda x: run(x, td, steps), transforms) for t in ts]
    speed = len(times) * td["tokens", "full"].numel() / (time.perf_counter() - start)
    sent = sum(getattr(t, "sent_bytes", 0) for t in transforms)
    return f"{name:14}{1000 * statistics.median(times):10.1f}{speed:12.0f}{memory():10.0f}{sent:10}"


def memory() -> float:
    """Return the memory of the actor in MiB, 0 without an actor."""
    procs = psutil.Process().children(recursive=True)
    return sum(p.memory_info().rss for p in procs if "ray::_Host" in " ".join(p.cmdline())) / 2**20


def main() -> None:
    """Measure one local transform, then 1, 2 and 4 that share an actor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    for name, value in (("rows", 8), ("tokens", 64), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    td, factory = batch(args.rows, args.tokens), partial(reference, args.model)
    options = {"ref_model_factory": factory, "assistant_only": False}
    print(f"{'environments':14}{'step ms':>10}{'tokens/s':>12}{'actor MiB':>10}{'bytes':>10}")
    print(line("1, no Ray", [RetrieveKL(**options)], td, args.steps))
    for count in (1, 2, 4):
        shared = [RayRetrieveKL(**options, actor_name="kl") for _ in range(count)]
        print(line(str(count), shared, td, args.steps), flush=True)
    shared[0].close()


if __name__ == "__main__":
    main()
