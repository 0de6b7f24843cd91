"""What a person at the terminal sees: a live line on a terminal, plain lines in a log file.

Reward and KL are the signals of an RL run (its loss hovers around 0), the loss is the one of SFT.
Ranks other than 0 make it `quiet`. Left out on purpose: colours that carry meaning.
"""

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

_BLOCKS = "".join(chr(code) for code in range(0x2581, 0x2589))
_SHOWN = (  # metric, name on the line, format
    ("reward/mean", "reward", "{:.3f}"),
    ("kl/ref_sequence", "kl", "{:.3f} nats"),
    ("eval/sampled_accuracy", "accuracy", "{:.2f}"),
    ("eval/greedy_accuracy", "greedy", "{:.2f}"),
)
_LOSS = ("loss/total", "loss", "{:.4f}")


class Display:
    """Show the progress of a run of `total` iterations, from `start` on.

    >>> with Display(2, title="demo", file=sys.stdout) as display:
    ...     display.update(1, {"reward/mean": 0.25, "time/iteration_s": 2.0})
    demo: 2 iterations
    iteration 1/2  reward 0.250  2.0 s  eta 2 s
    """

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        title: str = "",
        file: TextIO | None = None,
        quiet: bool = False,
    ) -> None:
        self.total, self.title, self.quiet = total, title, quiet
        self.console = Console(file=file or sys.stdout, highlight=False, quiet=quiet)
        self._seconds: deque[float] = deque(maxlen=10)
        self._rewards: deque[float] = deque(maxlen=24)
        self._latest: dict[str, float] = {}
        self._clock = time.monotonic()
        self._live: Live | None = None
        self._line = Text(no_wrap=True, overflow="ellipsis")
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._task = self._bar.add_task(title, total=total, completed=start, left="")

    def __enter__(self) -> "Display":
        live = self.console.is_terminal and not self.console.is_dumb_terminal
        if live and not self.quiet:
            group = Group(self._bar, self._line)
            self._live = Live(group, console=self.console, refresh_per_second=4)
            self._live.start()
        else:
            self._print(f"{self.title}: {self.total} iterations")
        self._clock = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished iteration; 0 is the evaluation before training."""
        now = time.monotonic()
        seconds = metrics.get("time/iteration_s", now - self._clock)
        self._clock = now
        if iteration > 0:
            self._seconds.append(seconds)
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        if self._live is None:
            # In a log a hundred lines are enough; evaluations are always among them.
            if iteration % max(self.total // 100, 1) == 0 or any("eval/" in m for m in metrics):
                self._print(self._plain_line(iteration, _values(metrics), seconds))
            return
        left = self._left(iteration)
        self._bar.update(self._task, completed=iteration, left=f"{left} left" if left else "")
        self._latest.update(metrics)  # evaluations stay in sight between two of them
        self._line.plain = "  ".join([*self._live_values(), f"{seconds:.1f} s"])

    def note(self, text: str) -> None:
        """Print one line above the progress."""
        self._print(text)

    def samples(self, title: str, rows: Sequence[Mapping[str, Any]], *, most: int = 3) -> None:
        """Print a few prompt -> reply pairs (rows as in transcripts.jsonl)."""
        self._print(title)
        for row in rows[:most]:
            reward = row.get("reward")
            tail = "" if reward is None else f"   [reward {reward:.2f}]"
            prompt = _one_line(row.get("prompt", ""), 72)
            self._print(f"  {prompt}\n    -> {_one_line(row.get('response', ''), 72)}{tail}")

    def finish(self, paths: Mapping[str, Path]) -> None:
        """Stop the live line and print where things are, as the last lines."""
        self._stop()
        width = max((len(name) for name in paths), default=0)
        for name, path in paths.items():
            self._print(f"{name:<{width}}  {path}")

    @property
    def _unicode(self) -> bool:
        return self.console.encoding.lower().startswith("utf")

    def _plain_line(self, iteration: int, values: list[str], seconds: float) -> str:
        if iteration == 0:
            return "  ".join(["before training", *values])
        parts = [f"iteration {iteration}/{self.total}", *values, f"{seconds:.1f} s"]
        if iteration < self.total:
            parts.append(f"eta {self._left(iteration)}")
        return "  ".join(parts)

    def _live_values(self) -> list[str]:
        values = _values(self._latest)
        if len(self._rewards) > 1:
            values.insert(0, sparkline(self._rewards, unicode=self._unicode))
        if "perf/tokens_per_s" in self._latest:
            values.append(f"{self._latest['perf/tokens_per_s']:,.0f} tok/s")
        return values

    def _left(self, iteration: int) -> str:
        if not self._seconds or iteration >= self.total:
            return ""
        return duration((self.total - iteration) * sum(self._seconds) / len(self._seconds))

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, text: str) -> None:
        # soft_wrap: paths stay in one piece; Text: a reply's [brackets] are no markup
        self.console.print(Text(text), soft_wrap=True)


def sparkline(values: Sequence[float] | deque[float], *, unicode: bool = True) -> str:
    """Draw values as a row of bars from their lowest to their highest.

    >>> sparkline([0, 1, 2], unicode=False)
    '.=#'
    """
    levels = _BLOCKS if unicode else ".:-=+*#"
    finite = [v for v in values if abs(v) < float("inf")]
    if not finite:
        return ""
    lo, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(levels[round((v - lo) / span * (len(levels) - 1))] for v in finite)


def duration(seconds: float) -> str:
    """Format a time for people.

    >>> [duration(s) for s in (8.4, 200, 8000)]
    ['8 s', '3 min 20 s', '2 h 13 min']
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _values(metrics: Mapping[str, float]) -> list[str]:
    shown = _SHOWN if "reward/mean" in metrics else (_LOSS, *_SHOWN)
    return [f"{name} {form.format(metrics[key])}" for key, name, form in shown if key in metrics]


def _one_line(text: str, width: int) -> str:
    """Make model output safe for a terminal: one line, no control characters, at most `width`."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return plain if len(plain) <= width else plain[: width - 3] + "..."
