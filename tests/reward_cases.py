"""Reward functions that behave badly, for worker processes: a module that imports fast."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from envs.tasks.task import Reply, Row


def behave(row: Row, reply: Reply, *, folder: str = "") -> object:
    """Do what the reply says; a number is its own reward."""
    said, _, rest = reply.text.partition(" ")
    if said == "hang":
        while True:  # and not even a signal handler ends it
            time.sleep(60)
    if said == "spawn":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(folder, "child").write_text(str(child.pid))
        time.sleep(600)
    if said == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if said == "close":
        os.closerange(3, 100)
        time.sleep(600)
    if said == "exit":
        os._exit(3)
    if said == "raise":
        raise ValueError(rest)
    if said == "odd":
        return lambda: None  # cannot be pickled
    if said == "huge":
        return 10**400  # no float
    if said == "pid":
        return os.getpid()
    if said == "print":
        print("to stdout")
        return 1
    return said if rest else float(said)


def needs_level(row: Row, reply: Reply) -> float:
    return row["level"]
