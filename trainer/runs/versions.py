"""Versions and device of a run, for status.json and the report."""

import os
import platform
import re
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from policies.optional_packages import EXTRAS

PACKAGES = ("leash-rl", "torch", "transformers", "tensordict", "accelerate", *EXTRAS)
ROOT = Path(__file__).parents[2]


def about_machine(device: torch.device, ranks: int) -> dict[str, str | int]:
    """Return the device, the versions of the main packages and leash's commit, if any."""
    if device.type == "cuda":
        name = f"cuda ({torch.cuda.get_device_name(device)})"
    else:
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        name = f"{device.type} ({platform.machine()}, {cpus} cores, {torch.get_num_threads()} used)"
    out: dict[str, str | int] = {"device": name, "ranks": ranks}
    out |= {"python": platform.python_version(), "system": platform.platform(terse=True)}
    maps = Path("/proc/self/maps")  # LD_PRELOAD may name other libraries, or files that are gone
    found = re.search(r"lib\w+malloc\S*", maps.read_text() if maps.exists() else "")
    out["allocator"] = found.group() if found else "glibc"
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            out[package] = version(package)
    return out | _commit()


def _commit() -> dict[str, str]:
    """Return the commit of a checkout, with "+" if files differ from it."""
    if not (ROOT / ".git").exists():
        return {}
    git = ["git", "--no-optional-locks", "-C", str(ROOT)]  # describe --dirty would take one
    commands = (["describe", "--always", "--exclude=*"], ["status", "--porcelain", "-uno"])
    how = {"capture_output": True, "text": True, "timeout": 10, "check": True}
    try:
        commit, changed = (subprocess.run([*git, *c], **how).stdout.strip() for c in commands)
    except (OSError, subprocess.SubprocessError):  # no git, or a checkout of another owner
        return {}
    return {"commit": f"{commit}+" if changed else commit}
