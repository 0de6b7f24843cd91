"""Run Python code in a fresh, limited process with a time-out.

The code cannot outlive its run, read the environment, stdin or packages, exceed its limits of
memory, processes, file size and output, or keep files: its folder is removed after each run.
With bubblewrap (`bwrap`) it has a read-only system, a private /tmp and /proc, no home and no
network. Without it the code may use the network and its user's files. All its processes, also in
new sessions, inherit a mark in an unused limit (RLIMIT_RSS), by which they are found and killed;
only code that changes the mark, or forks faster than it is found, leaves some. If root starts the
run, each call runs as a new user. Otherwise the code runs as the run's user: all processes of this
user count towards the limit, and the code could kill them. Against a determined attacker use a
container or a virtual machine.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

NOBODY = 65534
FIRST_USER = 1 << 30  # first user id for root's code; bubblewrap takes ids below 1 << 31
SLOTS = 1 << 8  # user ids per process; times 1 << 22 process ids they end at 1 << 31
_slots = itertools.count()
FLAGS = ("-I", "-S", "-u", "-X", "utf8", "-c")
BOOT = """
import json, resource, sys, traceback
for name, value in json.loads(sys.argv[1]).items():
    limit = getattr(resource, name)
    hard = resource.getrlimit(limit)[1]
    value = value if hard < 0 else min(value, hard)
    resource.setrlimit(limit, (value, value))
try:
    exec(compile(sys.stdin.read(), "<code>", "exec"), {"__name__": "__main__"})
except SystemExit:
    raise
except BaseException as error:
    traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))
    sys.exit(1)
"""


@dataclass(frozen=True)
class ExecutionResult:
    """Whether code ended without an error, and its output."""

    ok: bool
    output: str


class Sandbox:
    """Run Python code, each `run` in a separate process that ends after `timeout` seconds.

    `memory` (of each process) and `file_size` (of each file, not their sum) are in MiB,
    `max_output` in bytes.

    >>> box = Sandbox(timeout=20)
    >>> box.run("print(6 * 7)"), box.run("1 / 0").ok
    (ExecutionResult(ok=True, output='42\\n'), False)
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
        self.timeout, self.max_output = timeout, max_output
        self._limits = {
            "RLIMIT_CPU": max(1, round(timeout + 1)),
            "RLIMIT_AS": memory << 20,
            "RLIMIT_FSIZE": file_size << 20,
            "RLIMIT_CORE": 0,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_NPROC": processes,
        }
        warn_of_limits()

    def run(self, code: str) -> ExecutionResult:
        """Run code; its output goes to a file, bounded by `file_size`."""
        user = _user()
        mark = secrets.randbits(62)  # Linux does not enforce RLIMIT_RSS, and children inherit it
        limits = {"RLIMIT_RSS": mark, **self._limits}
        with (
            tempfile.TemporaryDirectory(prefix="leash-code-", ignore_cleanup_errors=True) as folder,
            tempfile.TemporaryFile() as printed,
        ):
            if user:
                os.chown(folder, user["user"], user["group"])
            words = [interpreter(), *FLAGS, BOOT, json.dumps(limits)]
            if inside := bubblewrap():
                words = [*inside, "--bind", folder, folder, "--remount-ro", "/", *words]
            process = subprocess.Popen(
                words,
                cwd=folder,
                env={},
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **user,
            )
            try:
                process.communicate(code.encode(errors="replace"), timeout=self.timeout)
                killed = not 0 <= process.returncode <= 128  # by a signal; bubblewrap adds 128
                why = "the process ended: out of memory, or killed" if killed else ""
            except subprocess.TimeoutExpired:
                why = f"stopped: no end within {self.timeout:g} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                _kill_marked(mark)
            printed.seek(0)
            output = printed.read(self.max_output + 1)
        text = output[: self.max_output].decode(errors="replace")
        if len(output) > self.max_output:
            text += f"\n[output cut after {self.max_output} bytes]"
        if why:
            text += f"\n[{why}]"
        ok = not why and process.returncode == 0
        return ExecutionResult(ok, text if output else text.lstrip("\n"))


@cache
def warn_of_limits() -> None:
    """Warn once, on the main rank, if bubblewrap is missing."""
    if not bubblewrap() and os.environ.get("RANK", "0") == "0":
        text = (
            "sandbox: code of the policy may use the network and its user's files; install "
            "bubblewrap (bwrap) to take them away, or use a container"
        )
        print(text, file=sys.stderr, flush=True)


@cache
def bubblewrap() -> tuple[str, ...]:
    """Return the command of bubblewrap without a run's folder; () if it does not work."""
    if (bwrap := shutil.which("bwrap")) is None:
        return ()
    python = interpreter()
    home = os.path.dirname(os.path.dirname(python))
    if Path.home().is_relative_to(home):  # ~/bin/python3: do not expose the home folder
        home = os.path.join(home, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    shown = ["/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", python, home]
    words = (
        *(bwrap, *(word for path in shown for word in ("--ro-bind-try", path, path))),
        *("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"),
        *("--perms", "1777", "--size", str(64 << 20), "--tmpfs", "/tmp", "--unshare-all"),
    )
    return words if _works([*words, python, *FLAGS, "import socket"], _user()) else ()


@cache
def interpreter() -> str:
    """Return the Python that runs the code; raise RuntimeError if its user cannot read one."""
    current = os.path.realpath(sys.executable)
    for python in (current, "/usr/bin/python3", "/usr/local/bin/python3"):
        if _works([python, *FLAGS, "import socket"], _user()):
            return python
    raise RuntimeError(f"code of root's sandbox runs as another user, who cannot read {current}")


def _kill_marked(mark: int) -> None:
    """Kill the processes with this mark, until none is left."""
    killed = set[int]()
    while left := _marked(mark) - killed:
        for number in left:
            with suppress(OSError):  # it has ended, or runs as another user (sudo)
                os.kill(number, signal.SIGKILL)
        killed |= left


def _marked(mark: int) -> set[int]:
    marked = set[int]()
    for limits in Path("/proc").glob("[0-9]*/limits"):
        with suppress(OSError):  # the process has ended
            if f" {mark} " in limits.read_text():
                marked.add(int(limits.parent.name))
    return marked


def _works(words: list[str], user: dict[str, Any]) -> bool:
    try:
        return subprocess.run(words, capture_output=True, **user).returncode == 0
    except OSError:
        return False


def _user() -> dict[str, Any]:
    """Return the user of the code if this process is root: a user that no other call has.

    So calls do not share a limit on processes. In a container with few users it is nobody.
    """
    if os.geteuid():
        return {}
    number = FIRST_USER + os.getpid() * SLOTS + next(_slots) % SLOTS
    return _as_user(number if _has_users() else NOBODY)


@cache
def _has_users() -> bool:
    return _works(["true"], _as_user(FIRST_USER))


def _as_user(number: int) -> dict[str, Any]:
    return {"user": number, "group": NOBODY, "extra_groups": []}
