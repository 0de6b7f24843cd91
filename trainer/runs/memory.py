"""Memory of a run on a CPU: its allocator, and pages before the tensors need them. Torch-free.

Linux gives a process a page at its first touch, which takes 0.3 to 3 s per GiB on a virtual
machine. tcmalloc keeps freed memory, so what a thread touches and frees during the imports is
there for gradients, moments and activations.
"""

import ctypes
import json
import math
import os
import platform
import resource
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import psutil

from policies.models import EMBEDDED, embedded_folder

BYTES = 26  # per weight: itself 4, gradient 4, moments 8, copies 6; the rest for activations
CGROUP = "/sys/fs/cgroup"
BLOCK = 2**28  # tcmalloc reports allocations from 1 GiB on


def tcmalloc() -> str:
    """Return the path of tcmalloc, which reuses memory sooner than glibc, or "" without it."""
    system = "/usr/local/lib", "/usr/lib64", f"/usr/lib/{platform.machine()}-linux-gnu"
    folders, kinds = (f"{sys.base_prefix}/lib", *system), ("_minimal", "")
    files = (Path(at, f"libtcmalloc{kind}.so.4") for at in folders for kind in kinds)
    return next((str(file) for file in files if file.exists()), "")


def touch_memory(config: Mapping[str, Any]) -> None:
    """Touch in a thread the memory that full training of policy.model on a CPU needs.

    At most half of what is available. Nothing without tcmalloc, with a GPU, with what saves memory
    (LoRA, checkpointing, half precision, shards), or for a model that is not in a folder yet.
    """
    policy, launch = config["policy"], config["launch"]
    trains = config["mode"] == "train" and not config["preflight"]
    saves = policy["lora"]["r"] or policy["gradient_checkpointing"] or policy["dtype"] != "float32"
    gpu = any(Path("/dev", name).exists() for name in ("nvidiactl", "kfd", "dxg"))
    full = trains and not saves and not gpu and launch["strategy"] == "ddp"
    if full and "tcmalloc" in os.environ.get("LD_PRELOAD", ""):
        inputs = policy["model"], launch["num_processes"]
        Thread(target=_touch_for, args=inputs, daemon=True).start()


def _touch_for(model: str, ranks: int) -> None:
    with suppress(Exception):  # the run itself reports a damaged model
        folder = embedded_folder() if model == EMBEDDED else Path(model).expanduser()
        touch(min(BYTES * count_weights(folder), available() // (2 * ranks)))


def available() -> int:
    """Return the bytes that this process may still take; 0 under `ulimit -v`."""
    free = psutil.virtual_memory().available
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return 0
    with suppress(OSError, ValueError):  # no cgroup, or "max"
        limit, used = (Path(CGROUP, f"memory.{name}").read_text() for name in ("max", "current"))
        free = min(free, int(limit) - int(used))
    return free


def touch(size: int) -> None:
    """Touch `size` bytes, rounded down to blocks, and free each block for the run's tensors."""
    c = ctypes.CDLL(None)
    c.malloc.restype = ctypes.c_void_p
    blocks = [ctypes.c_void_p(c.malloc(BLOCK)) for _ in range(size // BLOCK)]  # before any is free
    for block in filter(None, blocks):
        c.memset(block, 0, BLOCK)
        c.free(block)


def count_weights(folder: Path) -> int:
    """Return the number of weights that the safetensors files of a folder list, 0 without one."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        listed = sum(math.prod(entry.get("shape", [0])) for entry in header.values())
        count += min(listed, path.stat().st_size // 2)  # a damaged header may list more
    return count
