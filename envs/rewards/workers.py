"""Functions in processes of their own, which are killed when they hang and replaced when they die.

For trusted code that may be slow, hang in C or crash: a rank that waits for it waits for a bounded
time. A worker is a fresh Python (no fork: safe beside CUDA and threads) in a session of its own, so
that its children die with it; it ends when its owner does. What it prints goes to stderr.
Code of the policy belongs into envs/sandbox.py.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from envs.rewards.functions import RewardFunction, Score, as_score
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
            except Exception as error:  # anybody's object, asked for its number
                out.append(error)
        return out


class Late:
    """A function that every worker makes for itself by `maker(*args)`, as behind a slow import."""

    def __init__(self, maker: Callable[..., Callable], *args: Any) -> None:
        self.made_by = (maker, args)

    def __reduce__(self) -> tuple:
        return self.made_by


class Workers:
    """Processes that call one function; started at the first call, ended by `close`.

    >>> import operator
    >>> with Workers(operator.truediv, timeout=5, processes=1) as workers:
    ...     workers.map([(1, 2), (1, 0)])
    [0.5, ZeroDivisionError('division by zero')]
    """

    def __init__(self, function: Callable | Late, *, timeout: float, processes: int = 2) -> None:
        if not timeout > 0 or processes < 1:
            raise ValueError(
                f"expected timeout > 0 and processes >= 1, got {timeout} and {processes}"
            )
        self.function, self.timeout, self.processes = function, timeout, processes
        self._idle: list[Worker] = []

    def map(self, calls: Sequence[tuple]) -> list[Any]:
        """Return the result of each call, or the exception in its place."""
        out: list[Any] = [None] * len(calls)
        todo, busy = deque(range(len(calls))), dict[Connection, tuple[Worker, int]]()
        try:
            while todo or busy:
                while todo and len(busy) < self.processes:
                    worker, call = self._take(), todo.popleft()
                    busy[worker.pipe] = (worker, call)
                    error = worker.send(calls[call], timeout=self.timeout)
                    if error is not None:  # nothing was sent
                        out[call] = error
                        self._idle.append(busy.pop(worker.pipe)[0])
                self._listen(busy, out)
        finally:
            for worker, _ in busy.values():  # left by an error or a stop
                worker.close()
        return out

    def _listen(self, busy: dict[Connection, tuple[Worker, int]], out: list[Any]) -> None:
        """Take the results that come next, and kill who is late."""
        if not busy:
            return
        ready = wait(list(busy), timeout=min(worker.left for worker, _ in busy.values()))
        for pipe in list(busy):
            worker, call = busy[pipe]
            if pipe in ready:
                out[call], alive = worker.receive()
            elif not worker.left:
                out[call], alive = worker.late(), False
            else:
                continue
            del busy[pipe]
            if alive:
                self._idle.append(worker)
            else:
                worker.close()

    def _take(self) -> Worker:
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

    def __init__(self, function: Callable | Late) -> None:
        try:
            given = pickle.dumps(function)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"expected a function of a module, by a name that can be imported, got {function}"
                f" ({error}); move it to a file"
            ) from error
        self.pipe, far = Pipe()
        paths = [str(ROOT), *(path or os.getcwd() for path in sys.path)]
        command = [sys.executable, "-c", BOOT, str(far.fileno()), json.dumps(paths)]
        self.process = subprocess.Popen(
            [*command, str(os.getpid())],
            pass_fds=[far.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what it prints is no output of ours
            start_new_session=True,
        )
        far.close()
        self._end = weakref.finalize(self, _end, self.process, self.pipe)
        self._begin(START)
        with self._killed_late(), suppress(OSError):  # it died: receive tells
            self.pipe.send_bytes(given)
        fault, alive = self.receive()
        fault = fault if self.left else f"it did not start within {START:g} s"
        if not alive or fault is not None:
            self.close()
            raise RuntimeError(f"no worker for {_name(function)}: {fault}")

    @property
    def left(self) -> float:
        """Return the seconds left of the call's time, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    def late(self) -> TimeoutError:
        """Return the error of a call whose time is over."""
        return TimeoutError(f"no reward within {self._timeout:g} s")

    def send(self, call: tuple, *, timeout: float) -> Exception | None:
        """Send the arguments of a call, which has so many seconds; return why they could not be."""
        self._begin(timeout)
        try:
            with self._killed_late():
                self.pipe.send(call)
        except OSError:
            return None  # it died: receive tells
        except Exception as error:  # what cannot be pickled
            return error
        return None

    def receive(self) -> tuple[Any, bool]:
        """Return the result of a call and whether the worker lives on."""
        try:
            with self._killed_late():
                result = self.pipe.recv()
            return result, self.left > 0
        except (EOFError, OSError):
            if not self.left:
                return self.late(), False
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1)  # it may also have closed the pipe and live on
            return RuntimeError(f"the worker died ({_ending(self.process.returncode)})"), False
        except Exception as error:  # a result that cannot be unpickled here
            return error, True

    def close(self) -> None:
        """Kill the process with its children."""
        self._end()

    def _begin(self, timeout: float) -> None:
        self._timeout, self._deadline = timeout, time.monotonic() + timeout

    @contextmanager
    def _killed_late(self) -> Iterator[None]:
        """Kill the process at the deadline, so that no half read or half written pipe blocks."""
        timer = threading.Timer(self.left, _kill, [self.process])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def serve(pipe: int, owner: int) -> None:
    """Be a worker: load the function, then answer calls until the pipe closes."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; only Linux has it
    if os.getppid() != owner:
        return
    connection = Connection(pipe)
    try:
        function = pickle.loads(connection.recv_bytes())
    except Exception as error:  # the import of anybody's module
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send(None)
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        except Exception as error:  # an argument that cannot be unpickled here
            connection.send(error)
            continue
        try:
            result = function(*call)
        except Exception as error:  # anybody's code
            result = error
        try:
            connection.send(result)
        except Exception as error:  # a result or an exception that cannot be pickled
            connection.send(RuntimeError(f"{type(result).__name__}: {result!s:.200} ({error})"))


def _kill(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen, pipe: Connection) -> None:
    _kill(process)
    process.wait()
    pipe.close()


def _ending(code: int | None) -> str:
    if code is None:
        return "its pipe was closed"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _name(function: Any) -> str:
    plain = function.func if isinstance(function, functools.partial) else function
    return getattr(plain, "__qualname__", repr(plain))
