"""A fault at any write of a process, by the number of the call: a kill, or a disk that is full."""

import errno
import io
import os
import posix
import signal
import sys
from collections.abc import Callable

# What changes a file system, as C names it; safetensors writes a file by the last one.
CALLS = {"write", "writelines", "pwrite", "ftruncate", "fsync", "replace", "rename", "unlink"}
CALLS |= {"mkdir", "rmdir", "serialize_file"}


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def at_call(number: int, action: Callable[[], None]) -> None:
    """Do something in place of the `number`th such call of this thread, 1 being the first."""
    count = 0

    def look(frame, event: str, arg) -> None:
        nonlocal count
        owner = getattr(arg, "__self__", None)  # str has a replace too
        if event != "c_call" or arg.__name__ not in CALLS:
            return
        if owner in (None, posix) or isinstance(owner, io.BufferedWriter | io.TextIOWrapper):
            count += 1
            if count == number:
                action()

    sys.setprofile(look)


def forked(work: Callable[[], int]) -> int:
    """Do work in a child of this process; return its exit code, negative if a signal ended it."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 99
    try:
        code = work()
    finally:
        sys.setprofile(None)
        sys.stdout.flush()
        os._exit(code)
