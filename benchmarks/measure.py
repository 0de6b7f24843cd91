"""How long a piece of work takes and how much memory it needs: what every benchmark measures."""

import statistics
import time
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


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
