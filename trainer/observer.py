"""Interface of observers: terminal, trackers, report, diagnosis.

Only rank 0 has observers. An exception of an observer ends the run, unless the observer catches it.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any


class Observer:
    """Receive the events of a run; a subclass overrides the methods it needs."""

    def resume(self, iteration: int, text: str, *, again: bool, seconds: float) -> None:
        """Resume after `iteration`; `text` describes the checkpoint.

        `again`: the metrics of `iteration` will be logged again. `seconds`: run time so far.
        """

    def begin(self) -> None:
        """Start or resume the run."""

    def evaluating(self, label: str, fraction: float, *, last: bool) -> None:
        """Show the progress of an evaluation: a label and the fraction done, 0 to 1."""

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Record the metrics of a finished iteration; 0: the evaluation before training."""

    def responses(self, rows: Sequence[dict[str, Any]], iteration: int, *, kind: str) -> None:
        """Record transcripts (trainer/transcripts.py) of kind train, before, eval or after."""

    def say(self, text: str, *, style: str = "") -> None:
        """Print a message to the terminal."""

    def alert(self, title: str, text: str, *, error: bool = False) -> None:
        """Send a notification, for people away from the terminal."""

    def stopping(self) -> None:
        """Handle a stop signal; called in the signal handler."""

    def end(self, state: str, *, saved: int | None) -> None:
        """End as finished, preempted or failed; `saved`: iterations in the newest checkpoint."""


def _broadcast(name: str) -> Any:
    """Return a method that calls the method `name` of each observer."""

    def broadcast(self: "Observers", *args: Any, **kwargs: Any) -> None:
        for observer in self.each:
            getattr(observer, name)(*args, **kwargs)

    return broadcast


class Observers(Observer):
    """Pass each event to several observers, in order.

    >>> class Printer(Observer):
    ...     def log(self, metrics, iteration):
    ...         print(iteration, metrics)
    >>> Observers([Printer(), Printer()]).log({"reward/mean": 0.5}, 1)
    1 {'reward/mean': 0.5}
    1 {'reward/mean': 0.5}
    """

    def __init__(self, each: Sequence[Observer] = ()) -> None:
        self.each = each

    resume, begin, evaluating, log, responses, say, alert, stopping = map(
        _broadcast,
        ("resume", "begin", "evaluating", "log", "responses", "say", "alert", "stopping"),
    )

    def end(self, state: str, *, saved: int | None) -> None:
        with ExitStack() as stack:  # all end, even if one fails
            for observer in reversed(self.each):
                stack.callback(observer.end, state, saved=saved)
