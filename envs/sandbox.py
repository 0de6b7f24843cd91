"""Python code that nobody has read, in a process of its own that cannot do much harm.

The process: isolated mode without site-packages, no environment variables, an empty stdin, a
temporary folder as its only belonging (removed in any case), limits on CPU time, memory, size of
files, open files and processes, no core dumps. Output is cut, and at the timeout the process is
killed with all of its children. As root it becomes the user nobody, and runs the first Python that
nobody may read (this one, else the system's).
With the kernel's namespaces (`unshare`, if allowed) it has no network at all and its children
cannot outlive it. Without them a child that starts a session of its own may live on until its CPU
time is spent, and the network is open: `isolation()` tells which.
Not prevented: reading files that everybody may read and writing to folders where everybody may
write; without root, reading and writing whatever this user may.
Against a determined attacker use a container or a virtual machine.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

NOBODY = 65534
FLAGS = ("-I", "-S", "-u", "-X", "utf8", "-c")
BOOT = r"""
import json, os, resource, sys, traceback
given = json.loads(sys.argv[1])
commands, answers = os.fdopen(os.dup(0)), os.fdopen(given["answers"], "w")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for name, value in given["limits"].items():
    limit = getattr(resource, name)
    hard = resource.getrlimit(limit)[1]
    value = value if hard < 0 else min(value, hard)
    resource.setrlimit(limit, (value, value))
if os.geteuid() == 0 and given["user"]:
    os.setgroups([])
    os.setgid(given["user"])
    os.setuid(given["user"])
names = {"__name__": "__main__"}
for line in commands:
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
    answers.write("1" if good else "0")
    answers.flush()
"""


@dataclass(frozen=True)
class Ran:
    """Whether code ran to its end without an error, and what it printed."""

    ok: bool
    output: str


class Sandbox:
    """A Python process for code; names live on from `run` to `run` until `close`.

    `timeout` (seconds) is for one run; a run that exceeds it ends the process, and the next one
    starts afresh. `memory` and `file_size` are in MiB, `max_output` in bytes.

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
        if timeout <= 0:
            raise ValueError(f"expected timeout > 0 seconds, got {timeout}")
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
        try:
            process.stdin.write(json.dumps(code).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            self.close()
            return Ran(False, "[the process ended before the code ran]")
        output, why = self._listen(process)
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
        folder = tempfile.mkdtemp(prefix="leash-code-")
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        reading, writing = os.pipe()
        given = {"answers": writing, "limits": self._limits, "user": NOBODY}
        process = subprocess.Popen(
            [*isolation(), interpreter(), *FLAGS, BOOT, json.dumps(given)],
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
        self._end = weakref.finalize(self, _end, process, reading, folder)

    def _listen(self, process: subprocess.Popen) -> tuple[bytes, str]:
        """Return the output of a run and its answer, 1 or 0, or else why there is none."""
        assert process.stdout is not None
        pipe, deadline, output = process.stdout.fileno(), time.monotonic() + self.timeout, b""
        os.set_blocking(pipe, False)
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
    while size > 0:
        try:
            part = os.read(pipe, size)
        except BlockingIOError:
            break
        if not part:
            break
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _end(process: subprocess.Popen, answers: int, folder: str) -> None:
    """Kill a process and its group, and remove what it leaves."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdin, process.stdout):
        with suppress(BrokenPipeError):
            stream.close()  # type: ignore[union-attr]
    process.wait()
    os.close(answers)
    shutil.rmtree(folder, ignore_errors=True)


@cache
def isolation() -> tuple[str, ...]:
    """Return the command that takes network and outliving children away; empty if there is none."""
    found = shutil.which("unshare")
    if found is None:
        return ()
    user = [] if os.geteuid() == 0 else ["--user", "--map-current-user"]
    command = (found, *user, "--net", "--pid", "--fork", "--kill-child")
    tried = subprocess.run([*command, "true"], capture_output=True, check=False)
    return command if tried.returncode == 0 else ()


@cache
def interpreter() -> str:
    """Return the Python that runs the code; RuntimeError if the user nobody can read none."""
    own = os.path.realpath(sys.executable)
    if os.geteuid():
        return own
    become = f"import os; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY}); import socket"
    for python in (own, "/usr/bin/python3", "/usr/local/bin/python3"):
        if os.path.exists(python):
            tried = subprocess.run([python, *FLAGS, become], capture_output=True, check=False)
            if tried.returncode == 0:
                return python
    raise RuntimeError(
        f"a sandbox of root runs as the user nobody, who cannot read {own}; install a Python in "
        "/usr/bin, or do not run as root"
    )
