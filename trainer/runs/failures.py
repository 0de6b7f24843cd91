"""What ended a run badly: one line for its user, the whole story in errors/rank<k>.txt. Torch-free.

An error that is worded for users is its message alone; an unexpected one keeps the name of its
class and says where its traceback is. Secrets are hidden in both.
"""

import json
import os
import re
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from policies.cache import write_text
from trainer.runs.run_files import read_status, read_yaml

UNWRITTEN = {  # by what C, Python or Rust says: what it means, and what helps
    r"No space left on device|os error 28\b": "the disk is full ({}); free some space, or "
    "write elsewhere with output_dir=",
    r"Disk quota exceeded|os error 122\b": "your disk quota is used up ({}); free some, or "
    "write elsewhere with output_dir=",
    r"\[Errno 27\]|os error 27\b": "a file may not grow so large here ({}): raise `ulimit -f`, or "
    "write elsewhere with output_dir=",
    r"Read-only file system|os error 30\b": "nothing can be written there ({}): "
    "write elsewhere with output_dir=",
}
MEMORY = re.compile(r"out of memory|can't allocate memory", re.IGNORECASE)
LOST = re.compile(r"Connection (closed|reset) by peer|remote process exited|Broken pipe.*gloo")
TOLD = 74  # exit code of a process that printed its error: it could not write it (EX_IOERR)
NO_MEMORY = 71  # exit code of a process without the memory to say anything (EX_OSERR)
LONG, LONGEST = 2_000, 1 << 20  # letters of a line, and of a story: a policy may have written them
LESS_MEMORY = (
    "lower trainer.micro_batch_tokens (training) or algorithm.group_size (generation), or set "
    "policy.dtype=bfloat16"
)


def headline(error: BaseException) -> str:
    """Return an error as one line: its message if that is meant for users, else with its class.

    >>> headline(ValueError("expected a, got b")), headline(KeyError("a"))
    ('expected a, got b', "KeyError: 'a'")
    """
    text, name = str(error).strip(), type(error).__name__
    plain = " ".join(text.split())
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and MEMORY.search(text)):
        tried = re.search(r"tried to allocate ([\d.]+ \w+)", text, re.IGNORECASE)
        return f"out of memory{f' (tried {tried[1]})' if tried else ''}; {LESS_MEMORY}"
    for said, meaning in UNWRITTEN.items():
        if re.search(said, text):
            return meaning.format(plain)
    if LOST.search(text) and isinstance(error, RuntimeError):
        return "lost contact with another rank, which failed or was killed (out of memory?)"
    if not is_for_users(error):
        plain = f"{name}: {text.splitlines()[0]}" if text else name
    return " ".join([plain, *(f"({note})" for note in getattr(error, "__notes__", ()))])


def is_for_users(error: BaseException) -> bool:
    """Return whether an error's message says what to do, as that of a plain ValueError does."""
    if isinstance(error, ImportError):
        return "pip install" in str(error)
    return (
        isinstance(error, (ValueError, OSError))
        and type(error).__module__ == "builtins"
        and not isinstance(error, UnicodeError)
    )


def note_error(folder: Path, error: BaseException) -> str:
    """Write an error to errors/rank<k>.txt, its one line first, and return that line."""
    path, line = _file(folder), headline(error)
    if line.startswith(type(error).__name__):
        line += f" (traceback: {path})"
    from trainer.runs.redact import redact_text, secrets_of  # here: most runs have no error

    hidden = secrets_of([read_yaml(each) for each in folder.glob("*config*.yaml")])
    line = _short(redact_text(line, hidden))
    story = redact_text("".join(traceback.format_exception(error))[:LONGEST], hidden)
    with suppress(OSError):  # the disk may be what failed, or the folder be gone
        path.parent.mkdir(exist_ok=True)
        write_text(path, f"{line}\n\n{story}")
    return line


def _short(line: str) -> str:
    return line if len(line) <= LONG else f"{line[:LONG]} ... ({len(line):,} letters)"


def _file(folder: Path) -> Path:
    return folder / "errors" / f"rank{os.environ.get('RANK', '0')}.txt"


def last_words(folder: Path, error: BaseException) -> int:
    """Write down why this process ends, and return its exit code.

    Below an outside launcher the first to fail prints it, and whoever cannot write it anywhere.
    """
    try:
        line = note_error(folder, error)
    except MemoryError:
        return NO_MEMORY
    written = os.environ.get("RANK", "0") == "0" and close_status(folder, "failed", line)
    noted = noted_errors(folder)
    if not noted and not written:
        complain(line)
        return TOLD
    if "LEASH_PARENT" not in os.environ and (not noted or noted[0][0] == _file(folder)):
        complain(line)
    return 1


def noted_errors(folder: Path) -> list[tuple[Path, str]]:
    """Return each rank's file and line, the rank that failed first in front: it is the cause."""
    files = [path for path in (folder / "errors").glob("rank*.txt") if path.is_file()]
    files.sort(key=lambda path: (path.stat().st_mtime_ns, path))
    lines = [(path, path.read_text(encoding="utf-8").partition("\n")[0]) for path in files]
    return [(path, line) for path, line in lines if line]


def close_status(folder: Path, state: str, reason: str) -> bool:
    """Say in status.json how a run ended, unless it is finished; return whether it says so.

    On a full disk it is written where it is: a few more bytes fit into its block.
    """
    from trainer.runs.redact import redact_text

    if (status := read_status(folder)).get("state") == "finished":
        return True
    text = json.dumps({**status, "state": state, "reason": redact_text(reason)}, indent=1)
    try:
        write_text(path := folder / "status.json", text)
    except OSError:
        with suppress(OSError), open(path, "r+b", buffering=0) as file:
            file.truncate(file.write(text.encode("utf-8", "replace")))
    return read_status(folder).get("reason") == redact_text(reason)


def say(text: str) -> None:
    """Print a line at once; fall silent if nobody reads any more or a log's disk is full."""
    try:
        print(text, flush=True)
    except OSError:  # the work goes on
        silence()


def silence() -> None:
    """Send stdout nowhere: its reader has gone (`python train.py | head`), or its disk is full."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(error: object) -> None:
    """Print an error as one line, without secrets."""
    from trainer.runs.redact import redact_text

    text = headline(error) if isinstance(error, (ValueError, OSError)) else str(error)
    if not text:  # it has been said
        return
    with suppress(OSError):  # nobody may be listening any more
        text = _short(redact_text(text))
        text = "".join(c if c.isprintable() or c == "\n" else " " for c in text)  # no sequences
        print(f"error: {text}", file=sys.stderr, flush=True)
