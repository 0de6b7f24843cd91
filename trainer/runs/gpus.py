"""GPUs of this machine, shared by jobs of a sweep that run side by side."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def reserved_gpus(count: int) -> Iterator[None]:
    """Keep `count` GPUs, or all there are, to this process; wait until they are free."""
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
        with FileLock(place / "queue"):  # one job takes GPUs at a time: nobody waits with half
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
