"""The smallest run that does all that a long one does, and a fault at any write of a process.

A write is known by its kind: what is done, and to which file. The n-th of a kind is the same one in
every run, but for status.json, of which there are more on a slow machine.
"""

import errno
import importlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import BuiltinFunctionType, FrameType
from typing import Any

TINY = (
    "experiment=grpo_tiny",
    "policy.model=tiny",
    "policy.max_new_tokens=4",
    "trainer.num_iterations=4",
    "trainer.prompts_per_iteration=4",
    "algorithm.group_size=2",
    "eval.max_rows=4",
    "eval.num_samples=2",
    "checkpoint.every=1",
)
# What changes a file, as C names it; safetensors writes a file by the last one.
CALLS = {"write", "writelines", "pwrite", "ftruncate", "fsync", "serialize_file"}
EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir"}  # what posix is called with
# Files of a class: temporary ones, those of any iteration, a model's small ones, removed ones.
CLASSES = {
    r"\.\d+\.tmp|\d+": "*",
    r"model/[\w.]+\.(json|jinja)$": "model/*.json",
    r"\.trash-[^/]+/.+": ".trash/*",
}
Kind = tuple[str, str]


def one_error(text: str) -> str:
    """Return the only line of an output that tells an error."""
    assert "Traceback" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    return line


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def list_writes(folder: Path) -> list[Kind]:
    """Return a list that grows by the kind of each write of this process below a folder."""
    kinds: list[Kind] = []
    _hear(folder, kinds.append)
    return kinds


def at_call(
    number: int, action: Callable[[], None], folder: Path = Path("/"), kind: Kind | None = None
) -> None:
    """Do something in place of the `number`th write below a folder, of a kind or of any."""
    turn = count(1)

    def hear(found: Kind) -> None:
        if kind in (None, found) and next(turn) == number:
            action()

    _hear(folder, hear)


def _hear(folder: Path, tell: Callable[[Kind], None]) -> None:
    """Call `tell` before each write below a folder, as long as this process lives."""

    def tell_of(name: str, path: str) -> None:
        if path.startswith(f"{folder}"):
            place = os.path.relpath(path, folder)
            for pattern, short in CLASSES.items():
                place = re.sub(pattern, short, place)
            tell((name, place))

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in EVENTS:
            path, place = os.fsdecode(args[0]), args[-1]  # relative to a folder that is open
            if not path.startswith("/") and isinstance(place, int) and place >= 0:
                path = f"{os.readlink(f'/proc/self/fd/{place}')}/{path}"
            tell_of(event.removeprefix("os."), path)

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event != "c_call" or type(arg) is not BuiltinFunctionType or arg.__name__ not in CALLS:
            return
        owner, near = arg.__self__, frame.f_locals
        if isinstance(owner, io.BufferedWriter | io.TextIOWrapper):
            path = owner.name
        else:
            path = near.get("filename") or getattr(near.get("file"), "name", near.get("path"))
        tell_of(arg.__name__, str(path))

    sys.addaudithook(audit)
    sys.setprofile(profile)


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
    from trainer.pages import live

    live.LiveReport._write = lambda self: None  # what takes longest
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_bytes(config)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (it ends with this process)
    return train.worker(str(folder), *words)


def preload(work: Callable[[], int], names: Path) -> None:
    """Do work in a child, and import here what it has imported: its like need not do it again."""

    def write_names() -> int:
        code = work()
        names.write_text("\n".join(sys.modules))
        return code

    assert forked(write_names) == 0
    for name in names.read_text().split("\n"):
        with suppress(Exception):
            importlib.import_module(name)
