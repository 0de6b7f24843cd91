"""Two ranks, of which one works alone for longer than a collective of tensors waits.

A module for `on_two_ranks` of runs.py: rank 1 writes the seconds that it waited into waits.json.
"""

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

from trainer.runtime import Runtime

COLLECTIVE, ALONE = 3, 5  # seconds


def waits(run: Runtime) -> dict[str, float]:
    """Return the seconds of each kind of wait for rank 0."""
    calls = {
        "wait": run.wait,
        "values": lambda: run.gather(run.rank),
        "sum": lambda: run.all_reduce_sum({"a": 1.0}),
        "max": lambda: run.all_reduce_max({"a": 1.0}),
        "tensor": lambda: run.all_reduce(torch.ones(1)),
    }
    out = {}
    for name, call in calls.items():
        if run.is_main:
            time.sleep(ALONE)
        start = time.monotonic()
        try:
            if not (run.is_main and name == "tensor"):  # as if rank 0 were dead
                call()
        except RuntimeError:
            out["ended"] = name
        out[name] = time.monotonic() - start
    return out


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE))
    with Runtime(sys.argv[1], device="cpu", timeout=60) as both:
        found = waits(both)
        if not both.is_main:
            Path(sys.argv[1], "waits.json").write_text(json.dumps(found))
