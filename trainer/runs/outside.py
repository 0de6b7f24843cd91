"""One rank of a run that an outside launcher started: torchrun, accelerate launch, Slurm's srun.

Rank 0 alone reads the command line and writes; the others hear from it by the store that torch's
ranks meet in. They may be on other nodes: what rank 0 wrote must be seen there too.
"""

import json
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from policies.cache import write_text
from trainer.runs.failures import close_status, noted_errors
from trainer.runs.launch import NEXT, put_in_place, rewrite_report
from trainer.runs.run_files import read_status

KEPT: list[Any] = []  # the store: rank 0 of an srun serves it, and torch's ranks meet there again
PATIENCE = 10.0  # seconds; other nodes may see a new file of a network disk a little later


@dataclass(frozen=True)
class Start:
    """What rank 0 has made ready: config.yaml and the words of a worker; no file: nothing to do.

    `shared`: paths that the other nodes must see too. `aside`: a mode, its folder is removed.
    """

    config: str = ""
    text: str = ""
    words: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    aside: bool = False
    threads: int | None = None


def outside_ranks() -> int:
    """Return how many ranks an outside launcher started, 1 if there is none.

    ValueError if it does not say so in a number. Those of srun are named as torchrun would.
    """
    os.environ.update(slurm_ranks(os.environ))
    if not (size := os.environ.get("WORLD_SIZE") or "1").isdecimal():
        meant = "unset it, or start by torchrun or accelerate launch"
        raise ValueError(f"expected WORLD_SIZE to be a number of ranks, got {size!r}; {meant}")
    return int(size)


def slurm_ranks(env: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun would tell this task of an srun with several; {} elsewhere.

    >>> told = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "5", "SLURM_JOB_ID": "7"}
    >>> told |= {"SLURM_STEP_NODELIST": "gpu[09-10,12]", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
    >>> told |= {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
    >>> here = slurm_ranks(told)
    >>> [here[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    ['3', '5', '1', '2']
    >>> here["MASTER_ADDR"], slurm_ranks(told | {"RANK": "0"}), slurm_ranks({})
    ('gpu09', {}, {})
    """
    tasks = env.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_STEP_ID" not in env or tasks == "1" or {"RANK", "WORLD_SIZE"} & {*env}:
        return {}
    each = []
    for part in env["SLURM_STEP_TASKS_PER_NODE"].split(","):
        count, _, nodes = part.rstrip(")").partition("(x")
        each += [count] * int(nodes or 1)
    first = re.sub(r"\[(\w+)[^\]]*\]", r"\1", env["SLURM_STEP_NODELIST"]).partition(",")[0]
    port = 20_000 + (7 * int(env["SLURM_JOB_ID"]) + int(env["SLURM_STEP_ID"])) % 10_000
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": each[int(env["SLURM_NODEID"])],
        "MASTER_ADDR": env.get("MASTER_ADDR") or first,
        "MASTER_PORT": env.get("MASTER_PORT") or str(port),
    }


def agree(make: Callable[[], Start]) -> Start:
    """Return rank 0's `make()` on every rank; what it raises is a ValueError on all of them.

    So is a path that it shares and that another node does not see.
    """
    from torch.distributed.rendezvous import rendezvous

    store, rank, ranks = next(iter(rendezvous("env://")))
    KEPT.append(store)
    if rank == 0:
        try:
            start = make()
        except BaseException as error:
            _tell(store, "made", json.dumps({"fault": str(error)}), ranks)
            raise
        store.set("made", json.dumps({"start": asdict(start)}))
    else:
        made = json.loads(_wait_for(store, "made"))
        if "fault" in made:
            store.add("heard", 1)
            raise ValueError(made["fault"])
        start = Start(**made["start"])
    store.set(f"seen{rank}", _not_seen(start))
    if rank == 0:
        faults = [_wait_for(store, f"seen{other}") for other in range(ranks)]
        if fault := next(filter(None, faults), ""):
            _take_back(start, fault)
        _tell(store, "verdict", fault, ranks)
    else:
        fault = _wait_for(store, "verdict")
        store.add("heard", 1)
    if fault:
        raise ValueError(fault)
    return start


def _tell(store: Any, name: str, text: str, ranks: int) -> None:
    """Let the others hear why nothing begins before this process, which may serve them, ends."""
    store.set(name, text)
    limit = time.monotonic() + PATIENCE
    while store.add("heard", 0) < ranks - 1 and time.monotonic() < limit:
        time.sleep(0.05)


def _take_back(start: Start, fault: str) -> None:
    """Leave no run where none can begin; of one that would have gone on say why not."""
    path = Path(start.config)
    if start.words:
        close_status(path.parent, "failed", fault)
    if path.name == NEXT or not start.words:
        path.unlink(missing_ok=True)


def _wait_for(store: Any, name: str) -> str:
    while not store.check([name]):  # not its own wait: Ctrl-C would wait too
        time.sleep(0.1)
    return store.get(name).decode()


def _not_seen(start: Start) -> str:
    """Return the line on what rank 0 shares and this node does not see, or an empty text."""
    limit = time.monotonic() + PATIENCE
    if not start.config:
        return ""
    while not _holds(start) or not all(map(os.path.exists, start.shared)):
        if time.monotonic() > limit:
            config = [] if _holds(start) else [start.config]
            lost = [*config, *(path for path in start.shared if not os.path.exists(path))]
            rank, host = os.environ["RANK"], socket.gethostname()
            place = "give output_dir=<a folder of a disk that all nodes share>"
            if not config:
                place = "put it on a disk that all nodes share"
            return f"rank {rank} on {host} does not see {lost[0]}, which rank 0 uses; {place}"
        time.sleep(0.2)
    return ""


def _holds(start: Start) -> bool:
    """Return whether config.yaml is here what rank 0 wrote; of a mode each node has a copy."""
    try:
        return start.aside or Path(start.config).read_text(encoding="utf-8") == start.text
    except OSError:
        return False


def be_rank(start: Start, worker: Callable[..., int]) -> int:
    """Do this rank's share of a run in this process; return its exit code."""
    if not start.config:
        return 0
    path, main = Path(start.config), os.environ["RANK"] == "0"
    if start.threads:
        import torch

        torch.set_num_threads(start.threads)
    if start.aside and not (main or path.exists()):
        path = Path(tempfile.mkdtemp(prefix="leash-")) / path.name
        write_text(path, start.text)
    folder = path.parent
    words = (f"checked={sha256(start.text.encode()).hexdigest()}", *start.words)
    if not main:
        code = worker(str(path), str(folder), *words)
    else:
        with _in_place_once_begun(path, folder):
            code = worker(str(path), str(folder), *words)
        _close(folder, code)
    if start.aside:
        code = code or int(main and read_status(folder).get("objective", 0) > 0)
        if (main or path != Path(start.config)) and not noted_errors(folder):
            shutil.rmtree(folder, ignore_errors=True)
    return code


def _close(folder: Path, code: int) -> None:
    """Let the status name the rank that failed first, not what the end of the others was."""
    if code and (noted := noted_errors(folder)):
        close_status(folder, "failed", noted[0][1])
    if code:
        rewrite_report(folder)


@contextmanager
def _in_place_once_begun(config: Path, folder: Path) -> Iterator[None]:
    """Let the configuration of a run that goes on replace the saved one, once it has begun."""
    over = threading.Event()

    def follow() -> None:
        while not over.wait(0.2):
            put_in_place(config, folder)

    follower = threading.Thread(target=follow, daemon=True)
    if config.name == NEXT:
        follower.start()
    try:
        yield
        put_in_place(config, folder, ended=read_status(folder).get("state") == "finished")
    finally:
        over.set()
        if config.name == NEXT:
            follower.join()
        (folder / NEXT).unlink(missing_ok=True)
