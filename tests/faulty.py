"""A fault at any write of a process, by the number of the call: a kill, or a disk that is full."""

import errno
import io
import os
import posix
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# What changes a file system, as C names it; safetensors writes a file by the last one.
CALLS = {"write", "writelines", "pwrite", "ftruncate", "fsync", "replace", "rename", "unlink"}
CALLS |= {"mkdir", "rmdir", "serialize_file"}


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def calls() -> Iterator[list[tuple[str, str]]]:
    """List the calls that `at_call` counts, each with the file that it is about."""
    made: list[tuple[str, str]] = []

    def note(name: str, frame, owner) -> None:
        path = getattr(owner, "name", None) or frame.f_locals.get("filename")
        made.append((name, str(path or "")))

    def hear(event: str, args) -> None:  # what posix is called with, only an audit knows
        if event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir") and made and not made[-1][1]:
            made[-1] = (made[-1][0], os.fsdecode(args[0]))

    sys.addaudithook(hear)
    _profile(note)
    try:
        yield made
    finally:
        sys.setprofile(None)


def _profile(hear: Callable[[str, Any, Any], None]) -> None:
    """Call `hear` before each call of this thread that changes a file system."""

    def look(frame, event: str, arg) -> None:
        owner = getattr(arg, "__self__", None)  # str has a replace too
        if event != "c_call" or arg.__name__ not in CALLS:
            return
        if owner in (None, posix) or isinstance(owner, io.BufferedWriter | io.TextIOWrapper):
            hear(arg.__name__, frame, owner)

    sys.setprofile(look)


def at_call(number: int, action: Callable[[], None]) -> None:
    """Do something in place of the `number`th such call of this thread, 1 being the first."""
    count = 0

    def hear(*_) -> None:
        nonlocal count
        count += 1
        if count == number:
            action()

    _profile(hear)


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
