"""Functions in processes of their own, which are killed when they hang and replaced when they die.

For trusted code that may be slow, hang in C or crash: a rank waits for it for a bounded time. A
worker is a fresh Python (no fork: safe beside CUDA and threads) in a session of its own, so that
its children die with it; it ends when its owner does. What it prints goes to stderr.
Code of the policy belongs into envs/sandbox.py.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from envs.rewards.functions import FAULTS, RewardFunction, Score, as_error, as_score
from envs.rewards.validate import error_location
from envs.tasks.task import Reply, Row

ROOT = Path(__file__).parents[2]
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from envs.rewards.workers import serve; serve(int(sys.argv[1]), int(sys.argv[3]))"
)
START = 120.0  # seconds for a worker's imports on a busy machine


class InProcess(RewardFunction):
    """A function of (row, reply) in `processes` worker processes, killed after `timeout` seconds.

    The function has to stand in a module, by a name; rows and replies are pickled. The time-out
    covers sending them, the call and receiving its result. A batch of n replies takes at most
    ceil(n / processes) time-outs.
    """

    def __init__(
        self,
        function: Callable[[Row, Reply], Any],
        *,
        weight: float = 1.0,
        on_error: str = "raise",
        timeout: float = 10.0,
        processes: int = 2,
    ) -> None:
        super().__init__(weight=weight, on_error=on_error)
        self.workers = Workers(function, timeout=timeout, processes=processes)

    def scores(self, rows: Sequence[Row], replies: Sequence[Reply]) -> list[Score]:
        """Return each reply's score, or the error, time-out or crash of its worker."""
        out: list[Score] = []
        for value in self.workers.map(list(zip(rows, replies, strict=True))):
            try:
                out.append(value if isinstance(value, Exception) else as_score(value))
            except Exception as error:  # the float() of a user's object
                out.append(error)
        return out


class LazyFunction:
    """A function that every worker makes by `maker()` as it starts, as behind a slow import."""

    def __init__(self, maker: Callable[[], Callable]) -> None:
        self.maker = maker

    def __reduce__(self) -> tuple:
        return self.maker, ()


class Workers:
    """Processes that call one function; started at the first call, ended by `close`.

    >>> import operator
    >>> with Workers(operator.truediv, timeout=5, processes=1) as workers:
    ...     workers.map([(1, 2), (1, 0)])
    [0.5, ZeroDivisionError('division by zero')]
    """

    def __init__(
        self, function: Callable | LazyFunction, *, timeout: float, processes: int = 2
    ) -> None:
        if not timeout > 0 or processes < 1:
            raise ValueError(
                f"expected timeout > 0 and processes >= 1, got {timeout} and {processes}"
            )
        self.function, self.timeout, self.processes = function, timeout, processes
        self._idle: list[Worker] = []

    def map(self, calls: Sequence[tuple]) -> list[Any]:
        """Return the result of each call, or the exception in its place."""
        out: list[Any] = [None] * len(calls)
        todo, busy = deque(enumerate(calls)), dict[Worker, int]()
        try:
            while todo or busy:
                while todo and len(busy) < self.processes:
                    i, call = todo.popleft()
                    try:
                        given = pickle.dumps(call)
                    except Exception as error:  # a user's objects
                        out[i] = error
                        continue
                    busy[worker := self._get_idle()] = i
                    worker.ask(given, self.timeout)
                ready = wait(list(busy), timeout=1.0) if busy else []
                for worker in [w for w in busy if w in ready or w.late]:
                    out[busy.pop(worker)] = worker.answer()
                    if worker.alive:
                        self._idle.append(worker)
                    else:
                        worker.close()
        finally:
            for worker in busy:  # left by an error or a stop
                worker.close()
        return out

    def _get_idle(self) -> Worker:
        while self._idle:
            if (worker := self._idle.pop()).process.poll() is None:
                return worker
            worker.close()
        return Worker(self.function)

    def close(self) -> None:
        """End the processes."""
        while self._idle:
            self._idle.pop().close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Worker:
    """One process and the pipe to it; RuntimeError if it cannot load its function."""

    def __init__(self, function: Callable | LazyFunction) -> None:
        try:
            given = pickle.dumps(function)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"expected a function of a module, by a name that can be imported, got {function}"
                f" ({error}); move it to a file"
            ) from error
        self.pipe, far = Pipe()
        paths = json.dumps([str(ROOT), *(path or os.getcwd() for path in sys.path)])
        self.process = subprocess.Popen(
            [sys.executable, "-c", BOOT, str(far.fileno()), paths, str(os.getpid())],
            pass_fds=[far.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what it prints is no output of ours
            start_new_session=True,
        )
        far.close()
        self.close = weakref.finalize(self, _end, self.process, self.pipe)
        self.fileno, self.alive = self.pipe.fileno, True
        self.ask(given, START)
        fault = self.answer()
        if fault is not None:
            self.close()
            name = getattr(function, "__qualname__", function)
            raise RuntimeError(f"no worker for {name}: {fault}")

    def ask(self, given: bytes, timeout: float) -> None:
        """Send a pickled call. At the time-out the process dies, whatever it or the pipe is at."""
        self.late = False
        self._clock = threading.Timer(timeout, self._stop)
        self._clock.daemon = True
        self._clock.start()
        with suppress(OSError):  # it died: the answer tells
            self.pipe.send_bytes(given)

    def _stop(self) -> None:
        self.late = True
        _kill(self.process)

    def answer(self) -> Any:
        """Wait for the result of the call; what went wrong is returned in its place."""
        result: Any = None
        try:
            if not self.late:
                result = self.pipe.recv()
        except (EOFError, OSError):
            self.alive = False
        except Exception as error:  # a result that cannot be unpickled here
            result = error
        self._clock.cancel()
        if self.late:
            self.alive = False
            return TimeoutError(f"no reward within {self._clock.interval:g} s")
        if self.alive:
            return result
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1)  # it may also have closed the pipe and live on
        code = self.process.returncode
        end = "its pipe was closed" if code is None else f"exit code {code}"
        end = f"signal {signal.Signals(-code).name}" if code and code < 0 else end
        return RuntimeError(f"the worker died ({end})")


def serve(pipe: int, owner: int) -> None:
    """Be a worker: load the function, then answer calls until the pipe closes."""
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
    with suppress(EOFError):
        while True:
            call = connection.recv_bytes()
            try:
                connection.send(function(*pickle.loads(call)))
            except FAULTS as error:  # a user's code and objects
                connection.send(_sendable(error))


def _sendable(fault: BaseException) -> Exception:
    """Return an error that can be pickled, with its place in the user's code as a note."""
    error = as_error(fault)
    try:
        pickle.dumps(error)
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error!s:.200}")
    error.add_note(error_location(fault))
    return error


def _kill(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen, pipe: Connection) -> None:
    _kill(process)
    process.wait()
    pipe.close()
