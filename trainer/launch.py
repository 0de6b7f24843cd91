"""Starting a run in a fresh process, one per rank, and waiting for it. Torch-free.

The parent never imports torch: what a job leaves behind in a process cannot reach the next one.
Status travels by <folder>/status.json, errors by <folder>/errors/rank<k>.txt.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from policies.cache import build_once, cache_dir

PREFIX = "experiment:"
# What a launcher such as torchrun tells its ranks; a run started from one of them is its own.
RANK = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


class Interrupted(SystemExit):
    """The run was stopped by a signal; a sweep stops with it."""


def command(script: str | Path, arguments: Sequence[str], *, ranks: int) -> list[str]:
    """Return the command line that starts `ranks` processes of a script."""
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*start, str(script), *arguments]


def start(
    config: dict[str, Any], folder: Path, *, script: Path, compose: Callable[[str], dict[str, Any]]
) -> float:
    """Run one job in fresh processes, its warm-up first; return the metric of a sweep."""
    prepare(config, folder, script=script, compose=compose)
    ranks, threads = config["launch"]["num_processes"], config["launch"]["threads"]
    status = run(script, folder / "config.yaml", folder, ranks=ranks, threads=threads)
    return float(status["objective"])


def prepare(
    config: dict[str, Any], folder: Path, *, script: Path, compose: Callable[[str], dict[str, Any]]
) -> Path:
    """Write config.yaml into a run folder, after the warm-up it asks for; return the folder."""

    def warm_up(config: dict[str, Any], folder: Path) -> None:
        start(config, folder, script=script, compose=compose)

    folder.mkdir(parents=True, exist_ok=True)
    model = resolve_experiment(config["policy"]["model"], compose, warm_up)
    config = {**config, "policy": {**config["policy"], "model": model}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return folder


def run(
    script: str | Path, config: Path, folder: Path, *, ranks: int = 1, threads: int | None = None
) -> dict[str, Any]:
    """Run `script --worker config folder` and return its status; raise RuntimeError if it failed.

    SIGINT and SIGTERM are passed on once, for the run to stop at its next iteration; a second one
    ends it at once. A stopped run raises `Interrupted` with 128 + the signal.
    """
    words = command(script, ["--worker", str(config), str(folder)], ranks=ranks)
    each = threads or max((os.cpu_count() or 1) // ranks, 1)
    env = {k: v for k, v in os.environ.items() if k not in RANK and "TORCHELASTIC" not in k}
    shutil.rmtree(folder / "errors", ignore_errors=True)
    (folder / "status.json").unlink(missing_ok=True)  # an earlier attempt must not speak for this
    got: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM)  # caught from before the start: none may get lost
    previous = {kind: signal.signal(kind, lambda number, _: got.append(number)) for kind in kinds}
    try:
        env |= {"OMP_NUM_THREADS": str(each), "LEASH_PARENT": str(os.getpid())}
        code = _wait(subprocess.Popen(words, start_new_session=True, env=env), got)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    status = read_status(folder)
    if got:
        close_status(folder, status, f"signal {got[0]}")
        raise Interrupted(128 + got[0])
    if code != 0 or status.get("state") != "finished":
        close_status(folder, status, f"the process ended with {_exit(code)}")
        raise RuntimeError(explain_failure(folder))
    return status


def _wait(process: subprocess.Popen, got: list[int]) -> int:
    """Return the exit code; pass on the first signal in `got`, kill all processes at the second."""
    passed = 0
    while process.poll() is None:
        if len(got) > passed:
            passed = len(got)
            if passed == 1:
                os.killpg(process.pid, signal.SIGTERM)
            else:
                _kill_family(process.pid)
        time.sleep(0.05)
    return process.returncode


def _kill_family(pid: int) -> None:
    """Kill a process and its children: torchrun gives its workers sessions of their own."""
    import psutil  # comes with accelerate

    head = psutil.Process(pid)
    for process in [head, *head.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _exit(code: int) -> str:
    return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"code {code}"


def read_status(folder: Path) -> dict[str, Any]:
    """Return status.json, or {} before it is there."""
    try:
        return json.loads((folder / "status.json").read_text())
    except (OSError, ValueError):
        return {}


def note_error(folder: Path) -> None:
    """Write the error being handled to errors/rank<k>.txt, unless the run has done so itself."""
    path = folder / "errors" / f"rank{os.environ.get('RANK', '0')}.txt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(traceback.format_exc())


def close_status(folder: Path, status: dict[str, Any], reason: str) -> None:
    """Say in status.json how a run ended that could not say so itself."""
    if status.get("state") in ("failed", "preempted", "finished"):
        return
    state = "preempted" if reason.startswith("signal") else "failed"
    text = json.dumps({**status, "state": state, "reason": reason}, indent=1)
    part = folder / "status.json.part"
    part.write_text(text)
    part.replace(folder / "status.json")


def explain_failure(folder: Path) -> str:
    """Return one line on why a run failed, and where the whole story is."""
    files = sorted((folder / "errors").glob("rank*.txt"), key=lambda p: p.stat().st_mtime)
    reason = read_status(folder).get("reason") or "unknown"
    if files:  # the rank that failed first is the cause; the others only lost contact
        last = [line for line in files[0].read_text().splitlines() if line.strip()][-1]
        return f"{last} (traceback: {files[0]})"
    return f"{reason}; nothing was written to {folder / 'errors'}, was the process killed?"


def agree(make: Callable[[], Any], *, device: str | None = None) -> Any:
    """Return rank 0's `make()` on every rank that an outside launcher started (torchrun ...)."""
    import torch
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available())
    values = [make() if state.is_main_process else None]
    return broadcast_object_list(values)[0]


def resolve_experiment(
    name: str, compose: Callable[[str], dict[str, Any]], start: Callable[[dict, Path], None]
) -> str:
    """Return the model folder of a finished experiment, from the cache or by running it now.

    The cache is keyed by the experiment's resolved configuration and leash's version. `start` runs
    a configuration in a folder; its `model` is what is kept.
    """
    if not name.startswith(PREFIX):
        return name
    experiment = name.removeprefix(PREFIX)
    config = compose(experiment)
    try:
        release = version("leash")
    except PackageNotFoundError:
        release = "source"
    kept = {k: v for k, v in config.items() if k not in ("tracker", "launch", "checkpoint")}
    text = json.dumps([kept, release], sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:12]

    def build(work: Path) -> dict[str, Any]:
        print(f"{experiment} is not in the cache yet: running it first", flush=True)
        run_folder = folder.with_name(f"{folder.name}.run")  # outlives a failure, for its errors
        shutil.rmtree(run_folder, ignore_errors=True)
        start(config, run_folder)
        (run_folder / "model").rename(work / "model")
        shutil.rmtree(run_folder)
        return {"experiment": experiment, "config": config}

    folder = cache_dir() / "experiments" / f"{experiment}-{key}"
    build_once(folder, build)
    return str(folder / "model")
