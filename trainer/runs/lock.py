"""One run at a time in a run folder: a lock that the kernel lets go when its last holder is gone.

The launcher takes it and every rank inherits it, so a worker whose launcher was killed still holds
it. Torch-free.
"""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

FILE = ".lock"
WAIT = 10.0  # seconds for the workers of a killed launcher, which stop by themselves
UNKNOWN = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def held(folder: Path) -> Iterator[int]:
    """Hold a run folder for a block, and as long as a process lives that inherits the descriptor.

    ValueError if another run holds it.
    """
    file = lock_folder(folder)
    try:
        yield file
    finally:
        os.close(file)  # LOCK_UN would take it from the others too


def lock_folder(folder: Path) -> int:
    """Lock a run folder until the returned descriptor is closed, at the latest with the process.

    ValueError if another run holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (path := folder / FILE).is_symlink():  # none of ours; what it leads to would be written
        path.unlink()
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        _wait_for_lock(file, folder)
        launcher = [os.getppid()] if "TORCHELASTIC_RUN_ID" in os.environ else []
        write_holders(file, [*launcher, os.getpid()])
    except BaseException:
        os.close(file)
        raise
    return file


def write_holders(file: int, pids: Sequence[int]) -> None:
    """Write down who holds the lock: the process to stop first, then its workers."""
    os.ftruncate(file, 0)
    os.pwrite(file, " ".join([socket.gethostname(), *map(str, pids)]).encode(), 0)


def is_free(folder: Path) -> bool:
    """Return whether a run folder has been held and no process of its run is left."""
    try:
        file = os.open(folder / FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False  # never held, as by a Runtime of one's own, or not ours to look at
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def _wait_for_lock(file: int, folder: Path) -> None:
    """Lock an open file; wait only for workers whose launcher is gone."""
    limit, waiting = time.monotonic() + WAIT, False
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in UNKNOWN:
                note = "has no file locks: see to it that only one run at a time uses it"
                return print(f"note: {folder} {note}", flush=True)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        who, orphaned = _holder(file)
        if not orphaned or time.monotonic() > limit:
            raise ValueError(f"{folder}: this run is still running{who}; stop it first")
        if not waiting:
            waiting = True
            print(f"{folder}: its last run is still ending{who}: waiting for it", flush=True)
        time.sleep(0.1)


def _holder(file: int) -> tuple[str, bool]:
    """Return " (pid N)" of a process that holds the lock, and whether its launcher is gone."""
    import psutil  # here: most starts do not need it

    host, *pids = os.pread(file, 4096, 0).decode("utf-8", "replace").split() or [""]
    if not pids:
        return "", False  # it has just taken it
    if host != socket.gethostname():
        return f" (pid {pids[0]} on {host})", False
    living = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
                living.append(pid)
    return f" (pid {[*living, pids[0]][0]})", pids[0] not in living
