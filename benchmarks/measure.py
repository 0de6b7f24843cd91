"""Measure time and memory of a function, and render tables, for all benchmarks."""

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

MIB = 2**20
ROOT = Path(__file__).parents[1]


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Return the median wall time of a piece of work, after one warm-up."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the peak of the CPU bytes that `work` allocates, including its result.

    Earlier allocations are excluded; temporaries inside one operator are included.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        result = work()  # alive until the recording ends
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    del result
    live = top = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        top = max(top, live)
    return top


def resident(field: str = "VmRSS") -> int:
    """Return the resident bytes of this process, or with VmHWM their peak since `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(field))
    return int(line.split()[1]) * 1024


def reset_peak() -> int:
    """Return freed memory to the system and reset the peak; return the resident bytes (Linux)."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident()


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table whose columns after the first are aligned to the right.

    >>> print(markdown(["a", "b"], [[1, 2.5]]))
    | a | b |
    |---|---:|
    | 1 | 2.5 |
    """
    lines = [f"| {' | '.join(map(str, line))} |" for line in (head, *rows)]
    return "\n".join([lines[0], "|---" + "|---:" * (len(head) - 1) + "|", *lines[1:]])
