"""What a sandbox of this machine sees: the first of these backends that works here.

`limits` says what it can do all the same.
bubblewrap (`bwrap`): a read-only system and Python, a private /tmp and /proc, no home, no network.
Namespaces (`unshare`): no network at all, its children cannot outlive it and it sees no other
processes. Not prevented then: reading files that everybody may read, Unix sockets and writing where
everybody may; without root all boxes are this user, and may read and write whatever it may.
None: the network is open too; without root a box may kill the user's other processes, and a child
that starts a session of its own may live on until its CPU time is spent.
Any number of files is never prevented, and without root the limit on processes may count all of the
user's. Against a determined attacker use a container or a virtual machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOTS = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL")
USERS = range(60_000, 65_000)  # one for each box of root
FLAGS = ("-I", "-S", "-u", "-X", "utf8", "-c")


def command(folder: str) -> tuple[str, ...]:
    """Return what a box is started by; empty if nothing can take anything away from it."""
    if bubblewrap():
        return (*bubblewrap(), "--bind", folder, folder, "--remount-ro", "/")
    return namespaces()


def limits() -> str:
    """Return in one line what a box can do here that it should not; empty with bubblewrap."""
    if bubblewrap():
        return ""
    whose = "everybody's" if os.geteuid() == 0 else "your"
    open_ = "" if namespaces() else ", the network"
    seen = "" if "--mount-proc" in namespaces() else ", other processes"
    return (
        f"code of the policy may reach {whose} files and local sockets{seen}{open_}: no bubblewrap "
        "that works here; install it (bwrap) to take them away, or use a container"
    )


@cache
def warn_of_limits() -> None:
    """Say `limits` once, on the main rank."""
    if limits() and os.environ.get("RANK", "0") == "0":
        print(f"sandbox: {limits()}", file=sys.stderr, flush=True)


@cache
def bubblewrap() -> tuple[str, ...]:
    """Return the command of bubblewrap without a box's folder; empty where it does not work."""
    if (found := shutil.which("bwrap")) is None:
        return ()
    python = interpreter()
    home = os.path.dirname(os.path.dirname(python))
    if Path.home().is_relative_to(home):  # ~/bin/python3: nobody's files are shown for it
        home = os.path.join(home, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    shown = ["/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", python, home]
    shared = [word for path in shown for word in ("--ro-bind-try", path, path)]
    # Root becomes a box's user within; --die-with-parent would end it with the thread it is of.
    rights = [word for name in ROOTS for word in ("--cap-add", name)]
    private = ["ipc", "pid", "net", "uts", *(["user"] if os.geteuid() else [])]
    words = (
        *(found, *shared, "--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"),
        *("--perms", "1777", "--size", str(64 << 20), "--tmpfs", "/tmp"),
        *(f"--unshare-{name}" for name in private),
        *([] if os.geteuid() else rights),
    )
    # No namespaces of its own: bubblewrap 0.8 can do that, where it is not root's.
    tries = [words] if os.geteuid() == 0 else [(*words, "--disable-userns"), words]
    return next((each for each in tries if _works([*each, python, *FLAGS, "import socket"])), ())


@cache
def namespaces() -> tuple[str, ...]:
    """Return the command that takes network and outliving children away; empty if there is none."""
    if (found := shutil.which("unshare")) is None:
        return ()
    user = [] if os.geteuid() == 0 else ["--user", "--map-current-user"]
    words = (found, *user, "--net", "--pid", "--fork", "--kill-child")
    tries = ((*words, "--mount-proc"), words)  # no container lets it mount
    return next((each for each in tries if _works([*each, "true"])), ())


def _works(words: list[str]) -> bool:
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


@cache
def interpreter() -> str:
    """Return the Python that runs the code; RuntimeError if a box's user can read none."""
    own = os.path.realpath(sys.executable)
    if os.geteuid():
        return own
    user = USERS[0]
    become = f"import os; os.setgroups([]); os.setgid({user}); os.setuid({user}); import socket"
    for python in (own, "/usr/bin/python3", "/usr/local/bin/python3"):
        if os.path.exists(python):
            tried = subprocess.run([python, *FLAGS, become], capture_output=True, check=False)
            if tried.returncode == 0:
                return python
    raise RuntimeError(
        f"a sandbox of root runs as another user, who cannot read {own}; install a Python in "
        "/usr/bin, or do not run as root"
    )
