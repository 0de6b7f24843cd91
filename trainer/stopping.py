"""Early ends of a run: Ctrl-C and SIGTERM, a metric at its target, or no more improvement.

After a stop signal `Trainer._save` saves, if checkpoint.on_stop is true; the launcher passes
signals on to the ranks (trainer/runs/launch.py). Imports no torch: the parent process uses it too.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

# Metrics that only some evaluations log.
JUDGED = ("kl/efficiency", "kl/needed", "kl/misallocated", "kl/in_right", "kl/in_wrong")
AGAIN = 5.0  # seconds in which a second SIGTERM does not count
SCORE = "eval/"  # `patience` watches the first metric with this prefix


class Stopped(BaseException):
    """Raised at a safe point after a stop signal; the run can be resumed."""


def stop_reason(number: int) -> str:
    """Return the reason that status.json shows for a stop signal.

    >>> stop_reason(2), stop_reason(15)
    ('stopped by Ctrl-C', 'stopped by SIGTERM')
    """
    return f"stopped by {'Ctrl-C' if number == signal.SIGINT else signal.Signals(number).name}"


class StopSignals:
    """Turn SIGINT, SIGTERM and the loss of the launcher into `Stopped`, on all ranks together.

    A signal raises at `check`. In a run with one rank it raises at once during the set-up and
    within `stoppable`. A second signal calls `at_second(reason)` and exits; a SIGTERM within AGAIN
    seconds of the first does not count, because Slurm and torchrun both signal the ranks.
    `all_reduce_max`: see Runtime.
    """

    def __init__(
        self,
        ranks: int,
        all_reduce_max: Callable[[dict[str, float]], dict[str, float]],
        *,
        at_second: Callable[[str], None],
    ) -> None:
        self.ranks, self.all_reduce_max, self.at_second = ranks, all_reduce_max, at_second
        self.first: int | None = None  # number of the first signal
        self.since = 0.0  # time of the first signal
        self.on_stop: Callable[[], None] = lambda: None  # called in the signal handler
        self.immediately = False  # a stop signal raises in its handler
        self.handlers: dict[signal.Signals, Any] = {}  # signal -> handler before `install`
        parent = os.environ.get("LEASH_PARENT")
        if parent is None and "TORCHELASTIC_RUN_ID" in os.environ:
            parent = os.getppid()
        self.parent = int(parent) if parent else None  # the launcher; the run stops if it is gone

    def install(self) -> None:
        """Replace the handlers of both signals."""
        for name in (signal.SIGINT, signal.SIGTERM):
            self.handlers[name] = signal.signal(name, self._on_signal)

    def restore(self) -> None:
        """Bring back the handlers that `install` replaced."""
        for name, handler in self.handlers.items():
            signal.signal(name, handler)

    def check(self) -> None:
        """Raise Stopped on all ranks together if one got a signal or the parent is gone."""
        orphan = self.parent not in (None, os.getppid())  # the parent was killed
        stops = {"signal": float(self.first or 0), "orphan": float(orphan)}
        stops = self.all_reduce_max(stops)
        if stops["signal"]:
            raise Stopped(stop_reason(int(stops["signal"])))
        if stops["orphan"]:
            raise Stopped("the process that started the run is gone")

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Let a stop signal interrupt the block, which must need no clean-up.

        Several ranks stop only together: at the start of the block and at calls of `check`.
        """
        self.immediately = self.ranks == 1
        try:
            self.check()
            yield
        finally:
            self.immediately = False

    def _on_signal(self, number: int, _: Any) -> None:
        if self.first == number == signal.SIGTERM and time.monotonic() < self.since + AGAIN:
            return
        if self.first is not None:  # second signal: exit immediately
            self.at_second(stop_reason(self.first))
            os._exit(128 + number)
        self.first, self.since = number, time.monotonic()
        self.on_stop()
        if self.immediately:
            raise Stopped(stop_reason(number))


def read_rule(text: str) -> tuple[str, float]:
    """Parse `trainer.stop_at` into metric and value.

    >>> read_rule("eval/sampled_accuracy 0.9")
    ('eval/sampled_accuracy', 0.9)
    """
    with suppress(ValueError):
        name, value = text.split()
        if "/" in name and math.isfinite(number := float(value)):
            return name, number
    example = "'eval/sampled_accuracy 0.9', a metric and a value"
    raise ValueError(f"expected trainer.stop_at={example}, got {text}")


def sweep_metric(scores: Mapping[str, float]) -> float:
    """Return the first score of an evaluation: an accuracy, or minus the KL to a teacher.

    >>> sweep_metric({"eval/kl_ref": 0.25, "eval/kl_ref_sequence": 2.0})
    -0.25
    """
    name, value = next(iter(scores.items()))
    return -value if name.startswith("eval/kl_") else value


@dataclass
class EarlyStopping:
    """End a run once a metric crosses a value, or stops improving.

    `stop_at`: "eval/sampled_accuracy 0.9", as logged, without smoothing; the first value decides
    the direction. `patience`: consecutive evaluations without a new best. Either may be None.

    >>> rule = EarlyStopping(stop_at="kl/ref_sequence 5")
    >>> [rule({"kl/ref_sequence": kl}, i) for i, kl in enumerate([0.1, 4.0, 5.5], start=1)]
    [None, None, 'kl/ref_sequence came to 5.5 (trainer.stop_at: 5)']
    """

    stop_at: str | None = None
    patience: int | None = None
    first: float | None = None  # first value of the metric of stop_at
    best: float | None = None  # best evaluation so far
    worse: int = 0  # evaluations since the best one
    ended: str | None = None  # reason, once the run is to end

    def __post_init__(self) -> None:
        if self.stop_at is not None:
            read_rule(self.stop_at)

    def __call__(self, metrics: Mapping[str, float], iteration: int) -> str | None:
        """Read the metrics of an iteration (0: before training); return a reason to end."""
        if self.ended is None:
            self.ended = self._reached(metrics, iteration) or self._stuck(metrics, iteration)
        return self.ended

    def _reached(self, metrics: Mapping[str, float], iteration: int) -> str | None:
        if self.stop_at is None:
            return None
        name, target = read_rule(self.stop_at)
        if name not in metrics:
            evaluated = any(each.startswith(SCORE) for each in metrics)  # logged separately
            due = name.startswith(("eval/", "eval_")) == evaluated
            due &= not name.startswith(JUDGED)
            if due and iteration <= 1:
                raise ValueError(f"trainer.stop_at: no metric {name}; metrics.jsonl has the names")
            return None
        value = metrics[name]
        self.first = value if self.first is None else self.first
        if iteration and (value >= target if self.first <= target else value <= target):
            return f"{name} came to {value:.4g} (trainer.stop_at: {target:g})"
        return None

    def _stuck(self, metrics: Mapping[str, float], iteration: int) -> str | None:
        name = next((name for name in metrics if name.startswith(SCORE)), None)
        if self.patience is None or name is None:
            return None
        value = sweep_metric({name: metrics[name]})
        self.worse = 0 if self.best is None or value > self.best else self.worse + 1
        self.best = value if self.best is None else max(value, self.best)
        if iteration and self.worse >= self.patience:
            times = f"{self.worse} evaluations (trainer.patience)"
            return f"{name} was no better than {self.best:.4g} for {times}"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {**vars(self)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; with a changed rule the run has not ended."""
        self.best, self.worse = state["best"], state["worse"]
        if self.stop_at and state["stop_at"]:
            same = read_rule(self.stop_at)[0] == read_rule(state["stop_at"])[0]
            self.first = state["first"] if same else None  # the first value decides the direction
        if (state["stop_at"], state["patience"]) == (self.stop_at, self.patience):
            self.ended = state["ended"]
