"""A fault at any write of a process: a kill, or a disk that is full.

A write is known by its kind: what is done, to which file, and of status.json what it says. The
n-th of a kind is the same one in every run, however fast the machine is.
"""

import errno
import importlib
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import BuiltinFunctionType, FrameType
from typing import Any

# What changes a file, as C names it; safetensors writes a file by the last one.
CALLS = {"write", "writelines", "pwrite", "ftruncate", "fsync", "serialize_file"}
EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir"}  # what posix is called with
Kind = tuple[str, str]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def listed(folder: Path) -> list[Kind]:
    """Return a list that grows by the kind of each write of this process below a folder."""
    made: list[Kind] = []
    _hear(folder, made.append)
    return made


def at_write(folder: Path, kind: Kind, number: int, action: Callable[[], None]) -> None:
    """Do something in place of the `number`th write of a kind below a folder, 1 being the first."""
    made: list[Kind] = []

    def hear(found: Kind) -> None:
        made.append(found)
        if found == kind and made.count(kind) == number:
            action()

    _hear(folder, hear)


def at_call(number: int, action: Callable[[], None]) -> None:
    """Do something in place of the `number`th write of this process below the root."""
    made: list[Kind] = []

    def hear(found: Kind) -> None:
        made.append(found)
        if len(made) == number:
            action()

    _hear(Path("/"), hear)


def _hear(folder: Path, told: Callable[[Kind], None]) -> None:
    """Call `told` before each write below a folder, as long as this process lives."""

    def say(name: str, path: str, frame: FrameType) -> None:
        if path.startswith(f"{folder}"):
            place = re.sub(r"\.\d+\.tmp|\d+", "*", os.path.relpath(path, folder))
            told((name, f"{place} {_status(frame)}" if ".status.json" in place else place))

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in EVENTS:
            path, place = os.fsdecode(args[0]), args[-1]  # relative to a folder that is open
            if not path.startswith("/") and isinstance(place, int) and place >= 0:
                path = f"{os.readlink(f'/proc/self/fd/{place}')}/{path}"
            say(event.removeprefix("os."), path, sys._getframe(1))

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event != "c_call" or type(arg) is not BuiltinFunctionType or arg.__name__ not in CALLS:
            return
        owner, near = arg.__self__, frame.f_locals
        if isinstance(owner, io.BufferedWriter | io.TextIOWrapper):
            say(arg.__name__, str(owner.name), frame)
        else:
            path = near.get("filename") or getattr(near.get("file"), "name", near.get("path"))
            say(arg.__name__, str(path), frame)

    sys.addaudithook(audit)
    sys.setprofile(profile)


def _status(frame: FrameType) -> str:
    """Return what a status that is being written says."""
    try:
        said = json.loads(frame.f_locals["text"])
    except KeyError:  # its temporary file is removed
        return ""
    return " ".join(str(said.get(name)) for name in ("state", "iteration", "phase"))


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


def be_worker(config: bytes, folder: Path, *words: str) -> int:
    """Be the worker of a run, in this process; return its exit code."""
    import train
    from trainer.reports import live

    live.LiveReport._write = lambda self: None  # what takes longest
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_bytes(config)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (it ends with this process)
    return train.worker(str(folder), *words)


def load_what(work: Callable[[], int], told: Path) -> None:
    """Do work in a child, and import here what it has imported: its like need not do it again."""

    def tell() -> int:
        code = work()
        told.write_text("\n".join(sys.modules))
        return code

    assert forked(tell) == 0
    for name in told.read_text().split("\n"):
        with suppress(Exception):
            importlib.import_module(name)
