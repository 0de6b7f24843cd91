"""An end to templates without one: they come with models, and anybody may have written them.

Watched by an interval timer, so in the main thread alone; elsewhere a template is not bounded. One
operation is not interrupted: what it takes is judged when it is done.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

SECONDS = 10.0  # to write one chat, which takes milliseconds
MEMORY = 1 << 30  # bytes more than before
CHARACTERS = 1 << 25  # of a text: 32 MiB
WATCH = 0.05  # seconds between two looks


@contextmanager
def bounded() -> Iterator[None]:
    """Raise ValueError in a block that takes more than SECONDS or MEMORY; keep other timers."""
    if threading.current_thread() is not threading.main_thread() or any(
        signal.getitimer(signal.ITIMER_REAL)
    ):
        yield
        return
    start, before = time.monotonic(), 0

    def look(*_: Any) -> None:
        nonlocal before
        used = psutil.Process().memory_info().rss
        before = before or used
        if time.monotonic() - start > SECONDS:
            raise ValueError(f"has no end within {SECONDS:g} s")
        if used - before > MEMORY:
            raise ValueError(f"takes more than {MEMORY >> 20} MiB for one chat")

    handler = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, WATCH, WATCH)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
