"""Start a run in fresh processes, one per rank, and wait for it. Torch-free.

The parent never imports torch: what a job leaves behind in a process cannot reach the next one.
Status travels by <folder>/status.json, errors by <folder>/errors/rank<k>.txt. A run has begun once
its status.json has an iteration: from then on it speaks for itself, and not before is the saved
config.yaml of one that goes on replaced, in one piece.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from policies.cache import write_text
from trainer.runs.experiment_models import resolve_experiment
from trainer.runs.failures import (
    LESS_MEMORY,
    NO_MEMORY,
    TOLD,
    close_status,
    complain,
    noted_errors,
    say,
)
from trainer.runs.lock import held, write_holders
from trainer.runs.run_files import load_run, read_status
from trainer.stops import stop_reason

if TYPE_CHECKING:
    from trainer.runs.watch import Watch

# What a launcher such as torchrun tells its ranks; a run started from one of them is its own.
# PYTHONOPTIMIZE=2 would take from transformers the docstrings that it reads.
RANK = {
    "PYTHONOPTIMIZE",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_STEP_ID",
}
STOPPED = 143  # exit code of a rank that stopped because it was told to
PATIENCE = 30  # seconds; a rank that waits for a dead one may never notice (NCCL)
NEXT = ".config.next.yaml"  # of a run that goes on otherwise, until it has begun
OURS = {".hydra", ".lock", "config.yaml", "status.json"}  # what is there before a run begins


class Interrupted(SystemExit):
    """The run was stopped by a signal; a sweep stops with it."""


def start(
    config: dict[str, Any], folder: Path, *, script: Path, compose: Callable[[str], dict[str, Any]]
) -> float:
    """Run one job in fresh processes, its warm-up first; return the metric of a sweep.

    ValueError if another run holds the folder; nothing in it is touched then. One that does not
    get as far as to go on again keeps its config.yaml.
    """
    with held(folder) as lock:
        try:
            path, checked = prepare(config, folder, script=script, compose=compose)
            ranks, threads = config["launch"]["num_processes"], config["launch"]["threads"]
            again = config.get("resume") if _mode(config) == "train" else None
            sizes = {"ranks": ranks, "threads": threads, "lock": lock}
            status = run(script, path, folder, checked=checked, resume=again, **sizes)
        except (Interrupted, KeyboardInterrupt) as stop:
            _leave(config, folder)
            raise stop if isinstance(stop, Interrupted) else Interrupted(130) from None
        except (RuntimeError, ValueError, OSError) as error:
            if str(error):
                close_status(folder, "failed", str(error))
            raise
        finally:
            (folder / NEXT).unlink(missing_ok=True)
    return float(status["objective"])


def prepare(
    config: dict[str, Any], folder: Path, *, script: Path, compose: Callable[[str], dict[str, Any]]
) -> tuple[Path, str]:
    """Write config.yaml into a run folder, after the warm-up it asks for.

    One that is there stays: another one is written beside it, the same one not at all. That a run
    goes on is no part of it. Returns its path and the sha256 of what was checked: the file may be
    another one by the time that a worker reads it.
    """

    def train_first(config: dict[str, Any], folder: Path) -> None:
        start(config, folder, script=script, compose=compose)

    def resolve(node: Any) -> Any:  # experiment:<name> may stand anywhere
        if isinstance(node, dict):
            return {key: resolve(value) for key, value in node.items()}
        if isinstance(node, list):
            return [resolve(value) for value in node]
        return resolve_experiment(node, compose, train_first) if isinstance(node, str) else node

    folder.mkdir(parents=True, exist_ok=True)
    _announce(config, folder)
    config = resolve(config | {"resume": None} if _mode(config) == "train" else config)
    path, text = folder / "config.yaml", yaml.safe_dump(config, sort_keys=False)
    if path.exists():
        path = path if path.read_bytes() == text.encode() else folder / NEXT
    if path.name == NEXT or not path.exists():
        write_text(path, text)
    shutil.rmtree(folder / "errors", ignore_errors=True)  # an earlier attempt must not speak for
    for old in (folder / "status.json", *folder.glob(".*.tmp")):  # this one; what a kill has left
        old.unlink(missing_ok=True)
    return path, sha256(text.encode()).hexdigest()


def put_in_place(config: Path, folder: Path, *, ended: bool = False) -> None:
    """Let the configuration of a run that goes on replace the saved one, once it has begun."""
    if config.name == NEXT and config.exists() and (ended or "iteration" in read_status(folder)):
        os.replace(config, folder / "config.yaml")


def _announce(config: dict[str, Any], folder: Path) -> None:
    """Say at once what starts: a run's own first word comes when torch and a model are loaded."""
    if "kept_in" in config:  # a warm-up: that it begins has been said
        return
    if (mode := _mode(config)) != "train":
        return say(f"{mode}: starting")
    here = Path(os.path.relpath(folder))
    place = folder if here.parts[:1] == ("..",) else here
    verb = "going on" if config.get("resume") else "starting"
    say(f"{load_run(folder).experiment}: {verb} in {place}")


def _leave(config: dict[str, Any], folder: Path) -> None:
    """Say that a run was stopped before it began, if it was.

    A dated folder is removed then, unless anything is in it that a run wrote.
    """
    status = read_status(folder)
    if "iteration" in status:
        return
    if not status.get("reason"):
        close_status(folder, "preempted", "stopped before it began")
    if "kept_in" in config or _mode(config) != "train":
        return
    if config.get("resume"):
        return say("stopped before it went on; what was saved before is still there")
    say("stopped before it began; nothing is saved")
    if not config["output_dir"] and {path.name for path in folder.iterdir()} <= OURS:
        for name in OURS - {".hydra"}:
            (folder / name).unlink(missing_ok=True)
        if (folder.parent / "sweep.json").exists():  # a job's; a dated folder goes at exit
            shutil.rmtree(folder)


def _mode(config: dict[str, Any]) -> str:
    return "preflight" if config.get("preflight") else config.get("mode", "train")


def run(
    script: str | Path,
    config: Path,
    folder: Path,
    *,
    ranks: int = 1,
    threads: int | None = None,
    lock: int | None = None,
    **given: str | None,
) -> dict[str, Any]:
    """Run `script --worker config folder` and return its status; raise RuntimeError if it failed.

    `given` to the worker: `checked`, the sha256 of its configuration, and `resume`, the run folder
    if it goes on there.

    SIGINT and SIGTERM are passed on once, for the run to stop at its next safe point; one that
    hangs is ended (trainer/runs/watch.py). A second one ends it at once. A stopped run raises
    `Interrupted` with 128 + the signal.
    """
    from trainer.runs.watch import watched  # here: what only checks a command needs none

    more = (f"{name}={value}" for name, value in given.items() if value)
    words = [sys.executable, str(script), "--worker", str(config), str(folder), *more]
    threads_given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # nested levels follow
    own = int(threads_given) if threads_given.isdecimal() else 0
    each = threads or own or max(cores() // ranks, 1)
    with _caught_signals() as got, _free_port() as port, watched(ranks) as watch:
        started = _start_ranks(words, ranks=ranks, threads=each, port=port, kept=[watch.end, lock])
        code, first = _wait(started, config, folder, got, watch)
        who = f"rank {first}" if ranks > 1 else "the process"
        failure = _close(folder, code, got, who=who, hung=watch.hung)
    if code or got:
        rewrite_report(folder)
    status = read_status(folder)
    if got or status.get("state") == "preempted":
        if failure:
            complain(failure)
        if watch.hung and "iteration" in status:
            say(f"{watch.hung}; {_how_to_go_on(folder)}")
        raise Interrupted(128 + got[0] if got else STOPPED)
    if failure:
        raise RuntimeError("" if code == TOLD else failure)
    put_in_place(config, folder, ended=True)
    return status


def cores() -> int:
    """Return how many cores this process may use: those it is bound to, within its quota."""
    bound = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return bound
    return bound if quota == "max" else max(1, min(bound, int(quota) // int(period)))


@contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM; after one, what is still hammered in is ignored."""
    got: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM)
    previous = {kind: signal.signal(kind, lambda number, _: got.append(number)) for kind in kinds}
    try:
        yield got
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_IGN if got else handler)


@contextmanager
def _free_port() -> Iterator[int]:
    """Hold a port of this machine; with SO_REUSEADDR rank 0 can listen on it all the same."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def _start_ranks(
    words: Sequence[str], *, ranks: int, threads: int, port: int, kept: Sequence[int | None]
) -> list[subprocess.Popen]:
    """Start one process per rank, told about the others as torchrun would; no launcher between.

    `kept`: the pipe for their words, and the lock: it stays locked when this process is killed.
    """
    env = {k: v for k, v in os.environ.items() if k not in RANK and "TORCHELASTIC" not in k}
    env |= {"OMP_NUM_THREADS": str(threads), "LEASH_PARENT": str(os.getpid())}
    env |= {"LEASH_WORDS": str(kept[0])}
    if ranks > 1:
        env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    out = []
    for rank in map(str, range(ranks)):
        mine = {"RANK": rank, "LOCAL_RANK": rank} if ranks > 1 else {}
        fds = [number for number in kept if number is not None]
        out.append(subprocess.Popen(words, start_new_session=True, env=env | mine, pass_fds=fds))
    if (lock := kept[1]) is not None:
        write_holders(lock, [os.getpid(), *(rank.pid for rank in out)])
    return out


def _wait(
    ranks: list[subprocess.Popen], config: Path, folder: Path, got: list[int], watch: "Watch"
) -> tuple[int, int]:
    """Wait for all ranks; return exit code and number of the one that failed first, or 0 and 0.

    The first signal in `got` is passed on, and wakes a rank that SIGSTOP holds; at the second, and
    where one hangs, all processes are killed. The others of a rank that failed get PATIENCE seconds
    for their own last words.
    """
    code, first, passed, limit = 0, 0, 0.0, float("inf")
    while None in [rank.poll() for rank in ranks]:  # a list: each one is asked
        if not code and (failed := _first_failure(ranks))[0]:
            code, first = failed
            limit = time.monotonic() + PATIENCE
        watch.listen()
        if len(got) > 1 or time.monotonic() > limit or (passed and watch.hangs(passed)):
            _kill_families(ranks)
        elif got and not passed:
            passed = time.monotonic()
            # Before a run has its handlers, SIGINT would be a KeyboardInterrupt with a traceback.
            ready = "state" in read_status(folder)
            for rank in ranks:
                rank.send_signal(got[0] if ready else signal.SIGTERM)
                rank.send_signal(signal.SIGCONT)
        elif told := watch.overdue([rank.pid for rank in ranks]):
            say(f"note: {told}; Ctrl-C or SIGTERM ends it")
        put_in_place(config, folder)
        time.sleep(0.05)
    put_in_place(config, folder)
    code, first = (code, first) if code else _first_failure(ranks)
    if code < 0:
        _kill_families(ranks)  # what it had started itself is still there
    return code, first


def _first_failure(ranks: list[subprocess.Popen]) -> tuple[int, int]:
    """Return code and number of a failed rank; of several one that was killed: it is the cause."""
    codes = [(rank.returncode, k) for k, rank in enumerate(ranks)]
    return min((end for end in codes if end[0] not in (None, 0, STOPPED)), default=(0, 0))


def _kill_families(ranks: list[subprocess.Popen]) -> None:
    """Kill the ranks and their children, also those in sessions of their own."""
    import psutil  # here: most starts do not need it

    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            head = psutil.Process(rank.pid)
            for process in [*head.children(recursive=True), head]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        with suppress(ProcessLookupError):  # those whose parent is gone
            os.killpg(rank.pid, signal.SIGKILL)


def _how_to_go_on(folder: Path) -> str:
    """Return what is left of a run that could not say so itself."""
    from trainer.reports.summary import NOTHING, resume_command

    saved = any((folder / "checkpoints").glob("iteration_*"))
    return f"{'go on with: ' if saved else NOTHING}{resume_command(folder)}"


def _close(
    folder: Path, code: int, got: list[int], *, who: str, hung: str | None = None
) -> str | None:
    """Leave status.json telling how a run ended; return the reason if it failed.

    It is what the rank that failed first wrote, but of a killed rank that it was killed.
    """
    state = read_status(folder).get("state")
    if got and (state != "failed" or code < 0):  # an error of its own stays one
        close_status(folder, "preempted", "; ".join(filter(None, [stop_reason(got[0]), hung])))
    elif code or state not in ("finished", "preempted"):
        noted = noted_errors(folder)
        told = read_status(folder).get("reason") if state == "failed" else None
        said = noted[0][1] if noted else told  # no file where the disk is full
        reason = said if said and code >= 0 else kill_reason(code, who)
        close_status(folder, "failed", reason)
        return reason
    return None


def kill_reason(code: int, who: str) -> str:
    """Return how a process ended that could not say so itself, from its exit code."""
    if code == NO_MEMORY:
        return f"{who} ended out of memory; {LESS_MEMORY}"
    if code >= 0:
        why = "could not write why" if code == TOLD else "wrote no error"
        return f"{who} ended with code {code} and {why}"
    killed = f"{who} was killed (signal {-code}, {signal.Signals(-code).name})"
    return f"{killed}; out of memory? {LESS_MEMORY}" if -code == signal.SIGKILL else killed


def rewrite_report(folder: Path) -> None:
    """Write the report of a run that did not finish again: only now is it known why."""
    from trainer.reports.report import write_report

    if (folder / "report.html").exists():
        with suppress(Exception):  # a damaged folder or a full disk
            write_report(folder)
