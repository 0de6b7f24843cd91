"""Reward functions that behave badly, for worker processes: a module that imports fast."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from envs.tasks.task import Response, Row


def behave(row: Row, response: Response, *, folder: str = "") -> object:
    """Do what the response says; a number is its own reward."""
    word = response.text
    if word == "hang":
        while True:  # and not even a signal handler ends it
            time.sleep(60)
    if word == "spawn":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(folder, "child").write_text(str(child.pid))
        time.sleep(600)
    if word == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if word == "exit":
        os._exit(3)
    if word == "odd":
        return lambda: None  # cannot be pickled
    if word == "pid":
        return os.getpid()
    print("to stdout")
    return float(word)


def needs_level(row: Row, response: Response) -> float:
    return row["level"]
