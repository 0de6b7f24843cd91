"""File locks: one run at a time in a run folder and on a GPU. Torch-free.

The launcher holds `.lock` until the run is over. Rank 0 holds `.lock.rank0`, because it runs until
its next safe point after its launcher was killed.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from trainer.runs.folders import is_main_rank

LOCK_FILE, RANK0 = ".lock", ".lock.rank0"
WAIT = 10.0  # seconds to wait for the rank 0 of a killed launcher


def lock_folder(folder: Path, name: str = LOCK_FILE) -> BaseFileLock:
    """Lock a run folder until the lock is released; raise ValueError if another run holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / name)
    try:
        return lock.acquire(timeout=WAIT if name == RANK0 else 0.5).lock
    except TimeoutError:
        raise ValueError(f"{folder}: this run is still running; stop it first") from None


@contextmanager
def locked(folder: Path, name: str = LOCK_FILE) -> Iterator[None]:
    """Lock a run folder for a block; raise ValueError if another run holds it."""
    lock = lock_folder(folder, name)
    try:
        yield
    finally:
        lock.release()


def locked_by_rank(folder: Path) -> AbstractContextManager[None]:
    """Lock a run folder for a block on rank 0; other ranks do nothing."""
    return locked(folder, RANK0) if is_main_rank() else nullcontext()


def is_free(folder: Path) -> bool:
    """Return whether a run folder was locked before and no process of its run is left."""
    locks = [folder / name for name in (LOCK_FILE, RANK0) if (folder / name).is_file()]
    try:
        for path in locks:
            FileLock(path).acquire(timeout=0).lock.release()
    except OSError:  # locked, or not readable
        return False
    return folder / LOCK_FILE in locks


@contextmanager
def reserved_gpus(count: int) -> Iterator[None]:
    """Reserve `count` GPUs (at most all) for this process; wait until they are free."""
    before, named = os.environ.copy(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        gpus = [str(k) for k, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]
    else:
        gpus = [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    if not (count := min(count, len(gpus))):
        yield
        return
    place = Path(tempfile.gettempdir()) / f"leash-gpus-{os.getuid()}"
    place.mkdir(exist_ok=True)
    mine: list[str] = []
    with ExitStack() as locks:
        with FileLock(place / "queue"):  # two jobs that collect GPUs at a time could deadlock
            while len(mine) < count:
                for gpu in (gpu for gpu in gpus if gpu not in mine and len(mine) < count):
                    with suppress(Timeout):
                        locks.enter_context(FileLock(place / gpu).acquire(timeout=0.1))
                        mine.append(gpu)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)
