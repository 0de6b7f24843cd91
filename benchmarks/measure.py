"""Time and memory of a piece of work, and tables: what the benchmarks share."""

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
    """Return the largest number of bytes on the CPU that `work` held at once, its result included.

    What was there before does not count; temporaries inside one operator do.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        held = work()  # alive until the recording ends
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    del held
    live = top = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        top = max(top, live)
    return top


def resident(field: str = "VmRSS") -> int:
    """Return the resident bytes of this process now, or (VmHWM) the most since `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(field))
    return int(line.split()[1]) * 1024


def reset_peak() -> int:
    """Return freed memory to the system, forget the peak; return what is resident then (Linux)."""
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
