"""Notice a rank that hangs, by what each one says that it is at and how long that usually takes.

A rank writes a word into the pipe LEASH_WORDS whenever it gets on (`Runtime.at`); its parent tells
people of one that does not, and after a stop signal ends it. Torch-free. Left out on purpose:
ending a run that nobody has asked to stop. Below torchrun there is no pipe, and nobody watches.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

# A rank is told of after TIMES the usual, and LEAST seconds at least; FIRST where none is known.
TIMES, LEAST, FIRST = 10, 60.0, 600.0
# Seconds after a stop signal, or MANY times the usual; PATIENT where work would be lost.
GRACE, PATIENT, MANY = 30.0, 600.0, 3
LASTING = ("update", "save", "end")
WAIT, ON = "wait", ""  # for the other ranks; on with what was done before that


class Watch:
    """Keep what each rank said last, at which time, and how long it was at that before.

    `hung`: what the one that had to be ended was at.

    >>> watch = Watch(2)
    >>> for second in range(0, 40, 10):
    ...     watch.hear("0 collect\\n1 collect\\n", second)
    >>> watch.hear("0 wait\\n0 \\n0 wait\\n", 42)
    >>> watch.overdue(now=89.0), watch.overdue(now=131.0), watch.overdue(now=180.0)
    (None, 'collect has taken 1 min 41 s, usually 10 s (rank 0 waits; rank 1 collect)', None)
    >>> watch.hangs(131.0, now=160.0), watch.hangs(131.0, now=162.0), watch.hung
    (False, True, 'rank 1 was at collect for 2 min 12 s and was ended')
    """

    def __init__(self, ranks: int, *, pipe: int = -1, end: int = -1) -> None:
        self.pipe, self.end, self.hung = pipe, end, ""
        self.last: list[tuple[str, float]] = []  # phase, and when a rank said it
        self.last += [("start", time.monotonic() if pipe >= 0 else 0.0)] * ranks
        self.paused = [("start", 0.0)] * ranks  # what a rank that waits was at, for how long
        self.took: dict[str, list[float]] = {}  # seconds by phase, the latest last
        self.told = 0.0  # how long what was told of last had taken

    def listen(self) -> None:
        """Hear what the ranks have said meanwhile."""
        with suppress(BlockingIOError):
            self.hear(os.read(self.pipe, 1 << 16).decode(), time.monotonic())

    def hear(self, text: str, now: float) -> None:
        """Take lines of "rank phase"."""
        for line in text.splitlines():
            rank, _, phase = line.partition(" ")
            k, self.told = int(rank), 0.0
            before, since = self.last[k]
            before, taken = (before, now - since) if before != WAIT else self.paused[k]
            if phase == ON:
                self.last[k] = (before, now - taken)  # the wait was none of its time
                continue
            if phase == WAIT:
                self.paused[k] = (before, taken)
            else:
                self.took[before] = [*self.took.get(before, [])[-19:], taken]
            self.last[k] = (phase, now)

    def overdue(self, pids: Sequence[int] = (), *, now: float | None = None) -> str | None:
        """Return what takes much longer than usual, once for each doubling of it."""
        now = time.monotonic() if now is None else now
        for rank in self._busy():
            phase, taken = self._at(rank, now)
            usual = self._usual(phase)
            limit = FIRST if usual is None else max(TIMES * usual, LEAST)
            if phase != "start" and taken > max(limit, 2 * self.told):  # what loads says so itself
                self.told = taken
                known = "the first one" if usual is None else f"usually {_time(usual)}"
                return f"{phase} has taken {_time(taken)}, {known}{self._ranks(pids)}"
        return None

    def hangs(self, asked: float, *, now: float | None = None) -> bool:
        """Return whether a rank does not end, though it was asked to at a time."""
        now = time.monotonic() if now is None else now
        for rank in self._busy():
            phase, taken = self._at(rank, now)
            usual = self._usual(phase)
            patience = PATIENT if phase in LASTING else GRACE
            if now > asked + patience and taken > MANY * (usual or 0.0):
                who = f"rank {rank}" if len(self.last) > 1 else "it"
                self.hung = f"{who} was at {phase} for {_time(taken)} and was ended"
                return True
        return False

    def _at(self, rank: int, now: float) -> tuple[str, float]:
        """Return what a rank is at, and for how long; of one that waits what it waits in."""
        phase, since = self.last[rank]
        before, taken = self.paused[rank] if phase == WAIT else (phase, 0.0)
        return before, taken + now - since

    def _usual(self, phase: str) -> float | None:
        """Return the median of what a phase took so far."""
        took = sorted(self.took.get(phase, []))
        return took[len(took) // 2] if took else None

    def _busy(self) -> list[int]:
        """List the ranks that wait for no other one; all, if each of them waits."""
        ranks = range(len(self.last))
        return [rank for rank in ranks if self.last[rank][0] != WAIT] or [*ranks]

    def _ranks(self, pids: Sequence[int]) -> str:
        """Say what each rank does, where there are several, and which was stopped."""
        told = [f"rank {k} {'waits' if p == WAIT else p}" for k, (p, _) in enumerate(self.last)]
        held = {rank: pid for rank, pid in enumerate(pids) if _is_stopped(pid)}
        for rank, pid in held.items():
            told[rank] += f", stopped by a signal: kill -CONT {pid} lets it go on"
        return f" ({'; '.join(told)})" if len(told) > 1 or held else ""


@contextmanager
def watched(ranks: int) -> Iterator[Watch]:
    """Return a Watch with a pipe, whose end the ranks are to have."""
    pipe, end = os.pipe()
    try:
        for each in (pipe, end):  # neither side ever waits for the other
            os.set_blocking(each, False)
        yield Watch(ranks, pipe=pipe, end=end)
    finally:
        os.close(pipe)
        os.close(end)


def _time(seconds: float) -> str:
    from trainer.reports.formats import duration  # here: most runs get on

    return duration(seconds) if seconds >= 1 else f"{seconds:.1f} s"


def _is_stopped(pid: int) -> bool:
    import psutil

    with suppress(psutil.Error):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False
