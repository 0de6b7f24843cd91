"""Who watches a run: the terminal, trackers, the report, the diagnosis. The loop knows no more.

Rank 0 alone has observers. What they raise ends the run: one that may fail keeps that to itself.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any


class Observer:
    """Hear what happens in a run; a subclass overrides what it has a use for."""

    def resume(self, iteration: int, text: str, *, again: bool, seconds: float) -> None:
        """Go on from `iteration`; `text` says from where.

        `again`: its metrics will be logged once more. `seconds`: what the run has taken so far.
        """

    def begin(self) -> None:
        """Start, or go on."""

    def evaluating(self, what: str, share: float, *, last: bool) -> None:
        """Hear what goes on, "evaluating ...", and which share of it (0 to 1) is done."""

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Take the metrics of a finished iteration; 0 is the evaluation before training."""

    def replies(self, rows: Sequence[dict[str, Any]], iteration: int, *, kind: str) -> None:
        """Take transcripts (trainer/transcripts.py) of kind train, before, eval or after."""

    def say(self, text: str, *, style: str = "") -> None:
        """Tell people at the terminal."""

    def alert(self, title: str, text: str, *, error: bool = False) -> None:
        """Tell people who are not at the terminal."""

    def stopping(self) -> None:
        """Hear, in a signal handler, that a stop was asked for."""

    def end(self, state: str, *, saved: int | None) -> None:
        """End as finished, preempted or failed; `saved`: iterations in the newest checkpoint."""


def _tell(name: str) -> Any:
    """Return a method that calls the same one of each observer."""

    def tell(self: "Observers", *args: Any, **kwargs: Any) -> None:
        for observer in self.each:
            getattr(observer, name)(*args, **kwargs)

    return tell


class Observers(Observer):
    """Tell several observers, in their order.

    >>> class Printer(Observer):
    ...     def log(self, metrics, iteration):
    ...         print(iteration, metrics)
    >>> Observers([Printer(), Printer()]).log({"reward/mean": 0.5}, 1)
    1 {'reward/mean': 0.5}
    1 {'reward/mean': 0.5}
    """

    def __init__(self, each: Sequence[Observer] = ()) -> None:
        self.each = each

    resume, begin, evaluating, log, replies, say, alert, stopping = map(
        _tell, ("resume", "begin", "evaluating", "log", "replies", "say", "alert", "stopping")
    )

    def end(self, state: str, *, saved: int | None) -> None:
        with ExitStack() as stack:  # all of them end, also if one fails
            for observer in reversed(self.each):
                stack.callback(observer.end, state, saved=saved)
