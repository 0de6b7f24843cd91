"""Whether processes have ended: a signal takes its time on a busy machine."""

import time
from pathlib import Path


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(*pids: int, within: float = 10.0) -> bool:
    end = time.monotonic() + within
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))
