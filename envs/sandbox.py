"""Untrusted Python code, in a process of its own that cannot do much harm.

The process: isolated mode without site-packages, no environment variables, an empty stdin, a
temporary folder as its only belonging (removed in any case), limits on CPU time, memory, size of
files, open files and processes, no core dumps. Output is cut, and at the timeout the process is
killed with all of its children. As root each box has a user of its own (60000 to 64999), so that
boxes neither read nor kill nor starve each other, and runs the first Python that anybody may read
(this one, else the system's).
A run is over when the process has stopped itself, which a supervisor above it says over a pipe that
the code cannot touch: code that forges its end and goes on is timed out. Whether a run was good is
the process's own word: code can always hide its errors.
What else it sees is up to the backend (envs/sandbox_backends.py); on a server it is up to that.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from envs import sandbox_backends as backends

COUNTS = ("memory", "file_size", "processes", "max_output")
BOOT = r"""
import json, os, resource, signal, sys, traceback
given = json.loads(sys.argv[1])
code, report = os.pipe(), os.pipe()  # down to the worker, up from it
def supervise(worker):
    [os.close(fd) for fd in (code[0], report[1])]
    os.set_blocking(report[0], False)
    if os.geteuid():  # a process of the same user may not look into this one
        import ctypes
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    down = os.fdopen(code[1], "wb")
    for line in sys.stdin.buffer:
        os.kill(worker, signal.SIGCONT)
        down.write(line)
        down.flush()
        while (ended := os.waitpid(-1, os.WUNTRACED))[0] != worker: pass  # an orphan
        said = os.read(report[0], 2) if os.WIFSTOPPED(ended[1]) else b""
        if said not in (b"1", b"0"):
            break  # ended, or forged a byte too many
        os.write(given["answers"], said)
def work():
    [os.close(fd) for fd in (code[1], report[0], given["answers"])]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name, value in given["limits"].items():
        limit = getattr(resource, name)
        hard = resource.getrlimit(limit)[1]
        value = value if hard < 0 else min(value, hard)
        resource.setrlimit(limit, (value, value))
    if given["user"]:
        os.setgroups([])
        os.setgid(given["user"])
        os.setuid(given["user"])
    names, me = {"__name__": "__main__"}, os.getpid()
    for line in os.fdopen(code[0]):
        good = True
        try:
            exec(compile(json.loads(line), "<code>", "exec"), names)
        except SystemExit as end:
            good = end.code in (None, 0)
        except SyntaxError as error:
            good = False
            traceback.print_exception(error, limit=0)
        except BaseException as error:
            good = False
            traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BaseException:
                good = False
        if os.getpid() != me:
            return  # a child of the code that ran to its end
        os.write(report[1], b"1" if good else b"0")
        os.kill(os.getpid(), signal.SIGSTOP)
worker = os.fork()
try:
    supervise(worker) if worker else work()
except (OSError, ValueError):
    pass  # the pipe says it: the process ended
os._exit(0)
"""


@dataclass(frozen=True)
class Ran:
    """Whether code ran to its end without an error, and what it printed."""

    ok: bool
    output: str


def make_sandbox(*, url: str | None = None, **settings: Any) -> Any:
    """Return a sandbox of this machine, or with a `url` one of a server (`HttpSandbox`).

    `file_size` and `processes` are for this machine alone: a server sets its own.
    """
    if url is None:
        return Sandbox(**settings)
    from envs.sandbox_http import HttpSandbox  # here: most boxes are of this machine

    here = ("file_size", "processes")
    return HttpSandbox(url, **{key: settings[key] for key in settings if key not in here})


class Sandbox:
    """A Python process for code; names live on from `run` to `run` until `close`.

    `timeout` (seconds) is for one run; a run that exceeds it ends the process, and the next one
    starts afresh. `memory` (of each process) and `file_size` (of each file, not their sum) are in
    MiB, `max_output` in bytes. Raises ValueError for limits that are no positive numbers.

    >>> with Sandbox(timeout=20) as box:
    ...     box.run("x = 6").ok, box.run("print(7 * x)").output
    (True, '42\\n')
    """

    def __init__(
        self,
        *,
        timeout: float = 10.0,
        memory: int = 512,
        file_size: int = 16,
        processes: int = 16,
        max_output: int = 10_000,
    ) -> None:
        number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if not (number and 0 < timeout < math.inf):
            raise ValueError(f"expected timeout > 0 seconds, a finite number, got {timeout!r}")
        for name, value in zip(COUNTS, (memory, file_size, processes, max_output), strict=True):
            if type(value) is not int or not 0 < value < 1 << 40:
                raise ValueError(f"expected {name} a whole number > 0, got {value!r}")
        self.timeout, self.max_output = timeout, max_output
        self._limits = {
            "RLIMIT_CPU": 10 * max(1, round(timeout + 1)),  # of all runs of one process
            "RLIMIT_AS": memory << 20,
            "RLIMIT_FSIZE": file_size << 20,
            "RLIMIT_CORE": 0,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_NPROC": processes,
        }
        self._process: subprocess.Popen | None = None
        self._end = weakref.finalize(self, lambda: None)

    def run(self, code: str) -> Ran:
        """Run code; a process that is gone is started again."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        pipe = process.stdout.fileno()
        os.set_blocking(pipe, False)
        _read(pipe, 1 << 20)  # what children of the last run printed since
        try:
            process.stdin.write(json.dumps(code).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            self.close()
            return Ran(False, "[the process ended before the code ran]")
        output, why = self._listen(pipe)
        if why not in ("1", "0"):
            self.close()
        text = output[: self.max_output].decode(errors="replace")
        if len(output) > self.max_output:
            text += f"\n[output cut after {self.max_output} bytes]"
        if why not in ("1", "0"):
            text += f"\n[{why}]"
        return Ran(why == "1", text.lstrip("\n") if not output else text)

    def close(self) -> None:
        """End the process with all of its children and remove its folder."""
        self._end()
        self._process = None

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        folder = tempfile.mkdtemp(prefix="leash-code-")  # only its owner may enter
        user, lock = _reserve_user() if os.geteuid() == 0 else (0, None)
        if user:
            os.chown(folder, user, user)
        reading, writing = os.pipe()
        given = {"answers": writing, "limits": self._limits, "user": user}
        process = subprocess.Popen(
            [
                *backends.command(folder),
                backends.interpreter(),
                *backends.FLAGS,
                BOOT,
                json.dumps(given),
            ],
            cwd=folder,
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[writing],
        )
        os.close(writing)
        self._answers, self._process = reading, process
        self._end = weakref.finalize(self, _end, process, reading, folder, user, lock)

    def _listen(self, pipe: int) -> tuple[bytes, str]:
        """Return the output of a run and its answer, 1 or 0, or else why there is none."""
        deadline, output = time.monotonic() + self.timeout, b""
        with selectors.DefaultSelector() as wait:
            wait.register(pipe, selectors.EVENT_READ)
            wait.register(self._answers, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                ready = {key.fd for key, _ in wait.select(left)}
                if pipe in ready:
                    output += _read(pipe, self.max_output + 1 - len(output))
                if len(output) > self.max_output:
                    return output, "stopped: too much output"
                if self._answers in ready:
                    answer = os.read(self._answers, 1).decode(errors="replace")
                    output += _read(pipe, self.max_output + 1 - len(output))
                    return output, answer or "the process ended: out of memory, or killed"
        return output, f"stopped: no end within {self.timeout:g} s"


def _read(pipe: int, size: int) -> bytes:
    """Return what is in a pipe now, at most `size` bytes."""
    parts = []
    with suppress(BlockingIOError):
        while size > 0 and (part := os.read(pipe, size)):
            parts.append(part)
            size -= len(part)
    return b"".join(parts)


def _reserve_user() -> tuple[int, socket.socket]:
    """Return a user that no other box has, and what keeps it: a name that dies with its socket."""
    for user in backends.USERS:
        lock = socket.socket(socket.AF_UNIX)
        with suppress(OSError):
            lock.bind(f"\0leash-code-{user}")
            return user, lock
        lock.close()
    raise RuntimeError(f"expected fewer than {len(backends.USERS)} sandboxes at once; close some")


def _end(
    process: subprocess.Popen, answers: int, folder: str, user: int, lock: socket.socket | None
) -> None:
    """Kill a process and its group, and remove what it leaves."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdin, process.stdout):
        with suppress(BrokenPipeError):
            stream.close()  # type: ignore[union-attr]
    process.wait()
    os.close(answers)
    if user and not (
        backends.bubblewrap() or backends.namespaces()
    ):  # children with a session of their own
        kill = [backends.interpreter(), *backends.FLAGS, "import os; os.kill(-1, 9)"]
        subprocess.run(kill, user=user, group=user, extra_groups=[], capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        lock.close()
