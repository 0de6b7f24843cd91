"""GPUs of this machine that jobs of a sweep side by side take in turn. Torch-free.

A GPU that is taken is a locked file, which the kernel unlocks when its job is gone, however it
ended.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

FOLDER = ".slots"


def gpus_here(env: Mapping[str, str] = os.environ) -> list[str]:
    """List the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    >>> gpus_here({"CUDA_VISIBLE_DEVICES": "2, 3"}), gpus_here({"CUDA_VISIBLE_DEVICES": ""})
    (['2', '3'], [])
    """
    if (given := env.get("CUDA_VISIBLE_DEVICES")) is not None:
        named = [name.strip() for name in given.split(",")]
        return [name for name in named if name not in ("", "-1")]
    found = Path("/proc/driver/nvidia/gpus")
    return [str(k) for k in range(len(list(found.iterdir())))] if found.is_dir() else []


@contextmanager
def holding(
    place: Path, things: Sequence[str], count: int, *, over: Callable[[], bool]
) -> Iterator[list[str]]:
    """Hold `count` of some things, all if there are fewer; wait for them until it is `over`.

    Whoever names the same `place` shares them. One that is named twice is held twice.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp())
    >>> with holding(place, "abc", 2, over=bool) as one, holding(place, "abc", 1, over=bool) as two:
    ...     print(one, two)
    ['a', 'b'] ['c']
    """
    if count := min(count, len(things)):
        (place / FOLDER).mkdir(parents=True, exist_ok=True)
    held: dict[int, int] = {}
    while len(held) < count and not over():
        held = _take(place / FOLDER, len(things), count)
        if not held:
            time.sleep(0.2)
    try:
        yield [things[k] for k in held]
    finally:
        for file in held.values():
            os.close(file)


def _take(folder: Path, size: int, count: int) -> dict[int, int]:
    """Lock `count` of the files 0 to size - 1, none if fewer are free; return their descriptors."""
    held: dict[int, int] = {}
    alone = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    fcntl.flock(alone, fcntl.LOCK_EX)  # of two that each got half of it none would go on
    try:
        for k in range(size):
            file = os.open(folder / str(k), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held[k] = file
            except BlockingIOError:
                os.close(file)
            if len(held) == count:
                return held
        for file in held.values():
            os.close(file)
        return {}
    finally:
        os.close(alone)
