"""How much memory there is, and how much a piece of work takes."""

import contextlib
import ctypes
from pathlib import Path

import torch

from trainer.memory import peak, status_bytes

CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class Peak:
    """The highest use of memory from here on, bytes.

    Of a GPU what torch has allocated; else the resident memory of the process, whose high-water
    mark Linux can set back (elsewhere it is the highest since its start). `trim` gives back first
    what the allocator of the C library has kept of work that is done.
    """

    def __init__(self, device: torch.device, *, trim: bool = False) -> None:
        self.device = device
        if trim:
            with contextlib.suppress(OSError, AttributeError):  # glibc has it
                ctypes.CDLL(None).malloc_trim(0)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")

    def now(self) -> int:
        """Return what is in use."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return status_bytes("VmRSS") or self.highest()

    def highest(self) -> int:
        """Return the peak."""
        return peak(self.device)


def memory_of(device: torch.device) -> int:
    """Return the memory of a GPU; else what the machine has, or the container may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    import psutil  # here: most starts do not need it

    limits = [psutil.virtual_memory().total]
    for path in CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # no cgroup, or "max"
            limits.append(int(Path(path).read_text()))
    return min(limits)
