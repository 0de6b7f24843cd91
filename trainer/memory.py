"""How much memory was used at most, of a GPU or of this process."""

import contextlib
import resource
from pathlib import Path

import torch


def peak(device: torch.device) -> int:
    """Return the highest use since the start, or since the latest `Peak`, bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def status_bytes(name: str) -> int:
    """Return a line of /proc/self/status in bytes, 0 where there is none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0
