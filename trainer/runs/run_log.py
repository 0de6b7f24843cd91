"""<run>/run.log: `logging` of rank 0, and the lines of the terminal. Torch-free."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.runs.folders import is_main_rank
from trainer.runs.redact import redact_text

LOG_FILE = "run.log"
VERBOSE = "LEASH_VERBOSE"  # passes hydra.verbose to the processes of a run: true, or loggers
TERMINAL = logging.getLogger("leash")  # receives the lines of the terminal
TERMINAL.setLevel(logging.INFO)
TERMINAL.addHandler(logging.NullHandler())
TERMINAL.propagate = False


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact_text(super().format(record))


class _File(logging.FileHandler):
    """A log file that ignores a removed folder and a full disk."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the line."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def run_log(folder: Path) -> Iterator[None]:
    """Write a run's log into its folder during a block, on rank 0; warnings still go to stderr.

    A nested block with the same folder does nothing.
    """
    root, path = logging.getLogger(), os.path.abspath(folder / LOG_FILE)
    if not is_main_rank() or path in [getattr(h, "baseFilename", None) for h in root.handlers]:
        yield
        return
    file = _File(path, encoding="utf-8", errors="backslashreplace", delay=True)
    file.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    terminal, before = logging.lastResort or logging.StreamHandler(), root.level
    added = [file] if root.handlers else [file, terminal]
    root.setLevel(min(before, logging.INFO))
    for name in ("httpx", "filelock"):  # they log a line per request and per lock
        logging.getLogger(name).setLevel(logging.WARNING)
    if verbose := os.environ.get(VERBOSE):
        for name in verbose.split(","):
            logging.getLogger(None if name == "true" else name).setLevel(logging.DEBUG)
        terminal.setLevel(logging.DEBUG)
    for handler in added:
        root.addHandler(handler)
    TERMINAL.addHandler(file)
    try:
        yield
    finally:
        TERMINAL.removeHandler(file)
        for handler in added:
            root.removeHandler(handler)
        root.setLevel(before)
        file.close()
