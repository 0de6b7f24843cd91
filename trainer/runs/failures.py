"""Report failures: one line for the user, the traceback in errors/rank<k>.txt. Torch-free.

The line of a built-in ValueError or OSError is its message; other errors add their class and the
path of the traceback. Secrets are hidden in both.
"""

import json
import os
import re
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from policies.files import write_text
from trainer.runs.folders import TEMPORARY, is_main_rank
from trainer.runs.redact import redact_text
from trainer.runs.run_files import read_status
from trainer.runs.run_log import TERMINAL, VERBOSE

REFUSED = 2  # exit code of a refused configuration


class Refused(ValueError):
    """A faulty configuration, found before anything was loaded."""


# Messages of Python, C and safetensors (Rust): full disk, quota, `ulimit -f`, read-only disk.
UNWRITABLE = re.compile(
    r"No space left on device|Disk quota exceeded|File too large|Read-only file system"
    r"|os error (?:27|28|30|122)\b"
)
MEMORY = re.compile(r"out of memory|can't allocate memory", re.IGNORECASE)
LOST = re.compile(
    r"Connection (closed|reset) by peer|remote process exited|Broken pipe.*gloo"
    r"|monitoredBarrier|gloo.*Timed out waiting"
)
TRACEBACKS = "LEASH_TRACEBACKS"  # passes the user's HYDRA_FULL_ERROR to the processes of a run
LONG = 2_000  # characters of a line, which may quote a response
LONGEST = 1 << 20  # characters of a traceback
LESS_MEMORY = (
    "lower trainer.micro_batch_tokens (training), algorithm.group_size (generation) or "
    "eval.prompts_per_batch (evaluation), or set policy.dtype=bfloat16"
)


def headline(error: BaseException) -> str:
    """Return an error as one line: its message if it is written for users, else with its class.

    >>> headline(ValueError("expected a, got b")), headline(KeyError("a"))
    ('expected a, got b', "KeyError: 'a'")
    """
    text, name = str(error).strip(), type(error).__name__
    plain = " ".join(text.split())
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and MEMORY.search(text)):
        tried = re.search(r"tried to allocate ([\d.]+ \w+)", text, re.IGNORECASE)
        return f"out of memory{f' (tried {tried[1]})' if tried else ''}; {LESS_MEMORY}"
    if UNWRITABLE.search(text):
        return f"cannot write ({plain}); free some space, or write elsewhere with output_dir="
    if LOST.search(text) and isinstance(error, RuntimeError):
        return "lost contact with another rank, which failed or was killed (out of memory?)"
    plain_kind = isinstance(error, (ValueError, OSError)) and not isinstance(error, UnicodeError)
    worded = plain_kind and type(error).__module__ in ("builtins", __name__)
    if not (worded or (isinstance(error, ImportError) and "pip install" in text)):
        plain = f"{name}: {text.splitlines()[0]}" if text else name
    return " ".join([plain, *(f"({note})" for note in getattr(error, "__notes__", ()))])


def record_failure(folder: Path, error: BaseException) -> int:
    """Write the failure of this process to errors/rank<k>.txt; return its exit code.

    The first rank to fail prints the line itself if leash's launcher did not start it, or if no
    file could be written.
    """
    path, line = folder / "errors" / f"rank{os.environ.get('RANK', '0')}.txt", headline(error)
    if line.startswith(type(error).__name__):
        removed = folder.name.startswith(TEMPORARY)
        line += f" (traceback: {'by HYDRA_FULL_ERROR=1' if removed else path})"
    line = redact_text(line)[:LONG]
    text = redact_text("".join(traceback.format_exception(error))[:LONGEST])
    with suppress(OSError):  # the disk may be full, or the folder removed
        path.parent.mkdir(exist_ok=True)
        write_text(path, f"{line}\n\n{text}")
    noted = read_errors(folder)
    first, cause = noted[0] if noted else (path, line)  # the rank that failed first
    # Rank 0 may be dead; otherwise it writes the same status again.
    running = read_status(folder).get("state") == "running"
    written = (is_main_rank() or running) and close_status(folder, "failed", cause)
    alone = "LEASH_PARENT" not in os.environ
    if first == path and (alone or not (noted or written)):
        print_error(line)
    else:
        show_traceback()
    return REFUSED if isinstance(error, Refused) else 1


def read_errors(folder: Path) -> list[tuple[Path, str]]:
    """Return the error file and line of each rank, the rank that failed first in front."""
    files = [path for path in (folder / "errors").glob("rank*.txt") if path.is_file()]
    files.sort(key=lambda path: (path.stat().st_mtime_ns, path))
    lines = [(path, path.read_text(encoding="utf-8").partition("\n")[0]) for path in files]
    return [(path, line) for path, line in lines if line]


def close_status(folder: Path, state: str, reason: str) -> bool:
    """Write the end of an unfinished run to status.json; return whether that succeeded.

    On a full disk the file is written in place, because a few bytes fit into its last block.
    """
    if (status := read_status(folder)).get("state") == "finished":
        return True
    status |= {"state": state, "reason": redact_text(reason)}
    text, path = json.dumps(status, indent=1), folder / "status.json"
    try:
        write_text(path, text)
    except OSError:
        with suppress(OSError), open(path, "r+b", buffering=0) as file:
            file.truncate(file.write(text.encode("utf-8", "replace")))
    return read_status(folder) == status


def say(text: str) -> None:
    """Print a line immediately (rank 0); discard stdout if nothing reads it or its disk is full."""
    try:
        if is_main_rank():
            TERMINAL.info(text)
            print(text, flush=True)
    except OSError:  # the run continues
        close_output()


def close_output() -> None:
    """Discard stdout: its reader has ended (`python train.py | head`), or its disk is full."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_error(error: object) -> None:
    """Print an error as one line, without secrets."""
    text = headline(error) if isinstance(error, (ValueError, OSError)) else str(error)
    line = f"error: {redact_text(text)[:LONG]}"
    TERMINAL.info(line)
    show_traceback()
    with suppress(OSError):  # stderr may be closed
        print(line, file=sys.stderr, flush=True)


def show_traceback() -> None:
    """Print the traceback of the current error if HYDRA_FULL_ERROR or hydra.verbose is set."""
    enabled = VERBOSE in os.environ or os.environ.get(TRACEBACKS, "0") not in ("", "0")
    if enabled and sys.exc_info()[0]:
        with suppress(OSError):
            print(redact_text(traceback.format_exc()[:LONGEST]), file=sys.stderr, flush=True)
