"""Start a run in fresh processes, one per rank, and wait for it. Torch-free.

Status travels by <folder>/status.json, errors by <folder>/errors/rank<k>.txt. A run has begun once
its status.json has an iteration.
"""

import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import yaml

from policies.files import write_text
from trainer.pages.report import write_report
from trainer.runs.failures import (
    LESS_MEMORY,
    REFUSED,
    Refused,
    close_status,
    print_error,
    read_errors,
    say,
)
from trainer.runs.folders import SCRIPT, remove_run
from trainer.runs.lock import RANK0, lock_folder, locked
from trainer.runs.run_files import PREFIX, Compose, load_run, read_status
from trainer.runs.run_log import TERMINAL, run_log
from trainer.stopping import Stopped, stop_reason

# Variables that ranks do not inherit: an outer launcher's, and PYTHONOPTIMIZE, which removes the
# docstrings that transformers reads.
RANK = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
RANK |= {"PYTHONOPTIMIZE", "SLURM_STEP_ID"}
STOPPED = 143  # exit code of a rank that stopped on request
Worker = Callable[..., int]  # maps the words after --worker to an exit code
SIGNALS = (signal.SIGINT, signal.SIGTERM)
RANK_EXIT_SECONDS = 30  # a rank that waits for a dead rank may never return (NCCL)


class Interrupted(SystemExit):
    """A signal stopped the run; its sweep stops too."""


def start(config: dict[str, Any], folder: Path, *, compose: Compose, worker: Worker) -> float:
    """Run one job after its warm-up; return the metric of a sweep.

    It runs in fresh processes, or with launch.in_process by `worker` in this process. Raise
    ValueError, and leave the folder unchanged, if another run holds it. A new run that is refused
    before it began leaves no file.
    """
    with locked(folder), run_log(folder):
        lock_folder(folder, RANK0).release()  # waits for the rank 0 of a killed launcher
        try:
            prepare(config, folder, compose=compose, worker=worker)
            ranks, threads = config["launch"]["num_processes"], config["launch"]["threads"]
            ranks = 1 if config.get("preflight_gpu") else ranks  # a dry run is one process
            command = worker_command(config, folder)
            if config["launch"].get("in_process"):
                status = run_in_process(worker, command, folder, threads=threads)
            else:
                status = run(command, folder, ranks=ranks, threads=threads)
            return float(status["objective"])
        except (Interrupted, KeyboardInterrupt) as stop:
            status, warm_up = read_status(folder), "kept_in" in config
            if _mode(config) == "train" and not warm_up and "iteration" not in status:
                if not status.get("reason"):
                    close_status(folder, "preempted", "stopped before it began")
                say("stopped before it began; nothing new is saved")
            raise stop if isinstance(stop, Interrupted) else Interrupted(130) from None
        except (RuntimeError, ValueError, OSError) as error:
            if isinstance(error, Refused) and not config.get("resume"):
                remove_run(folder)
                raise
            close_status(folder, "failed", str(error))
            TERMINAL.info(f"error: {error}")
            raise


def prepare(config: dict[str, Any], folder: Path, *, compose: Compose, worker: Worker) -> None:
    """Write config.yaml into a run folder, after the warm-up that it needs.

    An identical file is not rewritten.
    """

    def train_first(warm_up: dict[str, Any], place: Path) -> None:
        check_parts([config])
        start(warm_up, place, compose=compose, worker=worker)

    def resolve(node: Any) -> Any:  # experiment:<name> may occur at any depth
        if isinstance(node, dict):
            return {key: resolve(value) for key, value in node.items()}
        if isinstance(node, list):
            return [resolve(value) for value in node]
        if not isinstance(node, str) or not node.startswith(PREFIX):
            return node
        from trainer.runs.experiment_models import resolve_experiment  # most runs name none

        return resolve_experiment(node, compose, train_first)

    folder.mkdir(parents=True, exist_ok=True)
    if (mode := _mode(config)) != "train":
        say(f"{mode}: starting")
    elif "kept_in" not in config:  # resolve_experiment announces a warm-up
        near, verb = os.path.relpath(folder), "going on" if config.get("resume") else "starting"
        place = folder if near.startswith(".") else near  # "." with hydra.job.chdir
        say(f"{load_run(folder).experiment}: {verb} in {place}")
    config = resolve(config | {"resume": None} if mode == "train" else config)
    config["date"] = config.get("date") or date.today().isoformat()  # a resume keeps its run's date
    path, text = folder / "config.yaml", yaml.safe_dump(config, sort_keys=False)
    if not path.exists() or path.read_bytes() != text.encode():
        write_text(path, text)
    shutil.rmtree(folder / "errors", ignore_errors=True)  # left by an earlier attempt
    for old in (folder / "status.json", *folder.glob(".*.tmp")):  # a kill leaves .tmp files
        old.unlink(missing_ok=True)


def check_parts(configs: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError for the first configuration with a key that no part of its run takes.

    A fresh process imports the parts, and torch with them.
    """
    command = [sys.executable, str(SCRIPT), "--check"]
    done = subprocess.run(command, input=json.dumps(configs), capture_output=True, text=True)
    if done.returncode:
        raise Refused((done.stdout or done.stderr).strip().splitlines()[-1])


def worker_command(config: dict[str, Any], folder: Path) -> list[str]:
    """Return the command of a rank, with its run folder and, if any, the folder to resume."""
    resume = config.get("resume") if _mode(config) == "train" else None
    return [sys.executable, str(SCRIPT), "--worker", str(folder), *filter(None, [resume])]


def _mode(config: dict[str, Any]) -> str:
    return "preflight" if config.get("preflight") else config.get("mode", "train")


def run(
    command: Sequence[str], folder: Path, *, ranks: int = 1, threads: int | None = None
) -> dict[str, Any]:
    """Run the worker command on each rank; return the status.

    The first SIGINT or SIGTERM is forwarded: the run stops at its next safe point. A second signal
    kills it. Raise RuntimeError if a rank failed, and `Interrupted` with 128 + the signal if the
    run was stopped.
    """
    each = threads_of_a_rank(threads, ranks)
    with _caught_signals() as signals, socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # rank 0 will listen there
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        processes = _start_ranks(command, ranks=ranks, threads=each, port=port)
        code, first = _wait(processes, folder, signals)
        who = f"rank {first}" if ranks > 1 else "the process"
        return _end(folder, code, signals, who=who)


def run_in_process(
    worker: Worker, command: Sequence[str], folder: Path, *, threads: int | None
) -> dict[str, Any]:
    """Run a worker command in this process, for a debugger; results and errors as in `run`."""
    os.environ["LEASH_PARENT"] = ""  # `_end` reports the result
    os.environ["OMP_NUM_THREADS"] = str(threads_of_a_rank(threads, 1))
    with _caught_signals(at_once=True) as signals:  # holds until the run installs its handlers
        code = worker(*command[command.index("--worker") + 1 :])
    reason = read_status(folder).get("reason")
    signals = signals or [kind for kind in SIGNALS if reason == stop_reason(kind)]
    return _end(folder, code, signals, who="the process")


def threads_of_a_rank(threads: int | None, ranks: int) -> int:
    """Return the CPU threads per rank: the configured number, else a share of the cores."""
    return threads or int(os.environ.get("OMP_NUM_THREADS") or 0) or max(cores() // ranks, 1)


def _end(folder: Path, code: int, signals: list[int], *, who: str) -> dict[str, Any]:
    """Return the status of an ended run; errors as in `run`."""
    failure = _close(folder, code, signals, who=who)
    if (code or signals) and (folder / "report.html").exists():
        with suppress(Exception):  # a damaged folder or a full disk
            write_report(folder)  # now with the reason of the end
    status = read_status(folder)
    state = status.get("state")
    if (signals and state != "finished") or state == "preempted":
        if failure:
            print_error(failure)
        raise Interrupted(128 + signals[0] if signals else STOPPED)
    if failure:
        raise Refused(failure) if code == REFUSED else RuntimeError(failure)
    return status


def cores() -> int:
    """Return the number of cores in the affinity mask of this process, within its CPU quota."""
    bound = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return bound
    return bound if quota == "max" else max(1, min(bound, int(quota) // int(period)))


@contextmanager
def _caught_signals(*, at_once: bool = False) -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM; if one arrived, later ones are ignored after the block.

    `at_once`: a signal raises `Stopped`.
    """
    got: list[int] = []

    def note(number: int, _: Any) -> None:
        got.append(number)
        if at_once:
            raise Stopped(stop_reason(number))

    previous = {kind: signal.signal(kind, note) for kind in SIGNALS}
    try:
        yield got
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_IGN if got else handler)


def _start_ranks(
    command: Sequence[str], *, ranks: int, threads: int, port: int
) -> list[subprocess.Popen]:
    """Start one process per rank, with the environment variables of torchrun."""
    env = {k: v for k, v in os.environ.items() if k not in RANK and "TORCHELASTIC" not in k}
    env |= {"OMP_NUM_THREADS": str(threads), "LEASH_PARENT": str(os.getpid())}
    env = allocator() | env
    if "OMP_WAIT_POLICY" not in env:
        env.setdefault("GOMP_SPINCOUNT", "1000")  # idle threads yield to other programs soon
    if ranks > 1:
        env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    out = []
    for rank in map(str, range(ranks)):
        names = {"RANK": rank, "LOCAL_RANK": rank} if ranks > 1 else {}
        out.append(subprocess.Popen(command, start_new_session=True, env=env | names))
    return out


def allocator() -> dict[str, str]:
    """Return variables for a process whose freed memory is reused, without new page faults.

    The user's LD_PRELOAD, else mimalloc of PyPI's cmeel-mimalloc, else tcmalloc of the system or of
    conda, else glibc.
    """
    system = "/usr/local/lib", "/usr/lib64", f"/usr/lib/{platform.machine()}-linux-gnu"
    mimalloc = (Path(at, "cmeel.prefix/lib/libmimalloc.so") for at in sys.path if at)
    folders, kinds = (f"{sys.base_prefix}/lib", *system), ("_minimal", "")
    tcmalloc = (Path(at, f"libtcmalloc{kind}.so.4") for at in folders for kind in kinds)
    files = [str(file) for file in (*mimalloc, *tcmalloc) if file.exists()]
    found = next((file for file in files if not re.search("[ :]", file)), "")  # they end a name
    file = os.environ.get("LD_PRELOAD", found)
    if "libmimalloc" in file:  # free pages stay for 10 s: longer than from use to use
        settings = {"MIMALLOC_PURGE_DELAY": "10000", "MIMALLOC_ALLOW_LARGE_OS_PAGES": "1"}
    elif "libtcmalloc" in file:
        settings = {"TCMALLOC_RELEASE_RATE": "0"}  # free pages stay
    else:
        settings = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # huge pages: fewer page faults
    return {"LD_PRELOAD": file} | settings


def _wait(ranks: list[subprocess.Popen], folder: Path, signals: list[int]) -> tuple[int, int]:
    """Wait for all ranks; return exit code and number of the first failed rank, or 0 and 0.

    The first of `signals` is forwarded; the second kills all processes. After a rank failed, the
    others have RANK_EXIT_SECONDS to end.
    """
    code, first = 0, 0
    passed, limit = False, float("inf")
    while None in [rank.poll() for rank in ranks]:  # a list, so that every rank is polled
        if not code and (failed := _first_failure(ranks))[0]:
            code, first = failed
            limit = time.monotonic() + RANK_EXIT_SECONDS
        if len(signals) > 1 or time.monotonic() > limit:
            _kill_families(ranks)
        elif signals and not passed:
            passed = True
            # Before a run has its handlers, SIGINT would be a KeyboardInterrupt with a traceback.
            ready = "state" in read_status(folder)
            for rank in ranks:
                rank.send_signal(signals[0] if ready else signal.SIGTERM)
        time.sleep(0.05)
    code, first = (code, first) if code else _first_failure(ranks)
    if code < 0:
        _kill_families(ranks)  # their children may still run
    return code, first


def _first_failure(ranks: list[subprocess.Popen]) -> tuple[int, int]:
    """Return code and number of a failed rank; a killed rank first, as it is the cause."""
    codes = [(rank.returncode, k) for k, rank in enumerate(ranks)]
    return min((end for end in codes if end[0] not in (None, 0, STOPPED)), default=(0, 0))


def _kill_families(ranks: list[subprocess.Popen]) -> None:
    """Kill the ranks and all their children, also those in separate sessions."""
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            head = psutil.Process(rank.pid)
            for process in [*head.children(recursive=True), head]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        with suppress(ProcessLookupError):  # children whose parent has ended
            os.killpg(rank.pid, signal.SIGKILL)


def _close(folder: Path, code: int, signals: list[int], *, who: str) -> str | None:
    """Write the end of a run to status.json; return the reason if it failed.

    The reason is the error line of the first failed rank, or the signal that killed it.
    """
    status = read_status(folder)
    state = status.get("state")
    if signals and (state != "failed" or code < 0):  # the run's own error stays the reason
        close_status(folder, "preempted", stop_reason(signals[0]))
    elif code or state not in ("finished", "preempted"):
        reason = next((line for _, line in read_errors(folder)), None)
        if state == "failed":  # a full disk has no error file
            reason = reason or status.get("reason")
        if code < 0 or not reason:
            reason = kill_reason(code, who)
        close_status(folder, "failed", reason)
        return reason
    return None


def kill_reason(code: int, who: str) -> str:
    """Describe the end of a process that wrote no error, from its exit code."""
    if code >= 0:
        return f"{who} ended with code {code} and wrote no error"
    killed = f"{who} was killed (signal {-code}, {signal.Signals(-code).name})"
    return f"{killed}; out of memory? {LESS_MEMORY}" if -code == signal.SIGKILL else killed
