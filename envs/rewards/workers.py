"""Run functions in worker processes, which are killed if they hang and replaced if they die.

For trusted code that may be slow, hang in C or crash: a rank waits a bounded time. A worker is a
fresh Python (not a fork, so that CUDA and threads are safe) in a new session, so that its children
are killed with it; it ends with its owner. Its output goes to stderr. Code that the policy writes
runs in envs/tools/sandbox.py.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from envs.rewards.compute import error_location
from envs.rewards.functions import FAULTS, RewardFunction, Score, as_error, as_score
from envs.tasks.task import Response, Row

ROOT = Path(__file__).parents[2]
BOOT = "import sys; from envs.rewards.workers import serve; serve(*map(int, sys.argv[1:]))"
START = 120.0  # seconds for a worker's imports on a busy machine


class SubprocessReward(RewardFunction):
    """A function of (row, response) in `processes` workers, killed after `timeout` seconds.

    The function must be importable from a module; rows and responses are pickled. A batch of n
    responses takes at most ceil(n / processes) time-outs.
    """

    def __init__(
        self,
        function: Callable[[Row, Response], Any],
        *,
        weight: float = 1.0,
        on_error: str = "raise",
        timeout: float = 10.0,
        processes: int = 2,
    ) -> None:
        super().__init__(weight=weight, on_error=on_error)
        self.workers = Workers(function, timeout=timeout, processes=processes)

    def scores(self, rows: Sequence[Row], responses: Sequence[Response]) -> list[Score]:
        """Return each response's score, or the error, time-out or crash of its worker."""
        return [
            _score(value) for value in self.workers.map(list(zip(rows, responses, strict=True)))
        ]


def _score(value: Any) -> Score:
    try:
        return value if isinstance(value, Exception) else as_score(value)
    except Exception as error:  # the float() of a user's object
        return error


class LazyFunction:
    """A function that every worker builds by `maker()` at its start, e.g. after a slow import."""

    def __init__(self, maker: Callable[[], Callable]) -> None:
        self.maker = maker

    def __reduce__(self) -> tuple:
        return self.maker, ()


class Workers:
    """A pool of processes that call one function, each started at its thread's first call.

    >>> import operator
    >>> Workers(operator.truediv, timeout=5, processes=1).map([(1, 2), (1, 0)])
    [0.5, ZeroDivisionError('division by zero')]
    """

    def __init__(
        self, function: Callable | LazyFunction, *, timeout: float, processes: int = 2
    ) -> None:
        self.function, self.timeout = function, timeout
        self._threads, self._mine = ThreadPoolExecutor(processes), threading.local()
        self._started = weakref.WeakSet[Worker]()

    def map(self, calls: Sequence[tuple], *, timeout: float | None = None) -> list[Any]:
        """Return the result of each call, or the exception in its place."""
        try:
            return list(self._threads.map(partial(self._call, timeout or self.timeout), calls))
        except BaseException:  # Ctrl-C, or a worker that cannot start
            self.kill()
            raise

    def _call(self, timeout: float, call: tuple) -> Any:
        worker: Worker | None = getattr(self._mine, "worker", None)
        if worker is None or worker.process.poll() is not None:
            worker = self._mine.worker = Worker()
            self._started.add(worker)
            fault = worker.call(self.function, START)
            if fault is not None:
                worker.kill()
                name = getattr(self.function, "__qualname__", self.function)
                raise RuntimeError(f"no worker for {name}: {fault}")
        return worker.call(call, timeout)

    def kill(self) -> None:
        """End the processes; the next call starts others."""
        for worker in list(self._started):
            worker.kill()

    def close(self) -> None:
        """End processes and threads."""
        self.kill()
        self._threads.shutdown()


class Worker:
    """One process and the pipe to it; its first call is the function itself."""

    def __init__(self) -> None:
        self.pipe, far = Pipe()
        paths = [str(ROOT), *(path or os.getcwd() for path in sys.path)]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", BOOT, str(far.fileno()), str(os.getpid())],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            pass_fds=[far.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # to stderr, not into the run's output
            start_new_session=True,
        )
        far.close()
        self.kill = weakref.finalize(self, _kill, self.process)

    def call(self, call: Any, timeout: float) -> Any:
        """Return the result of a call, or the error in its place."""
        late = False
        try:
            self.pipe.send(call)
            if self.pipe.poll(timeout):
                return self.pipe.recv()
            late = True
        except (EOFError, OSError):
            pass  # the worker died
        except Exception as error:  # pickling or unpickling failed
            return error
        self.kill()
        if late:
            return TimeoutError(f"no result within {timeout:g} s")
        return RuntimeError(f"the worker died (exit code {self.process.returncode})")


def _kill(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def serve(pipe: int, owner: int) -> None:
    """Run a worker: load the function, then execute calls until the pipe closes."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; only Linux has it
    if os.getppid() != owner:
        return
    connection = Connection(pipe)
    try:
        function = connection.recv()
    except Exception as error:  # the import of a user's module
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send(None)
    process = os.getpid()
    with suppress(EOFError):
        while True:
            call = connection.recv_bytes()
            try:
                value = function(*pickle.loads(call))
            except FAULTS as fault:
                value = as_error(fault)
                value.add_note(error_location(fault))
            finally:
                if os.getpid() != process:  # else a child that the function forked would reply too
                    os._exit(0)
            try:
                connection.send(value)
            except Exception as error:  # pickling failed
                connection.send(RuntimeError(f"{value!r:.200}: {error}"))
