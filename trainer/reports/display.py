"""What a person at the terminal sees: live lines on a terminal, plain lines in a log file.

Reward and KL are the signals of an RL run (its loss hovers around 0), the loss is the one of SFT.
Ranks other than 0 make it `quiet`. Left out on purpose: colours that alone carry meaning.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from trainer.observer import Observer
from trainer.reports import about
from trainer.reports.text import (
    Output,
    duration,
    lay_out,
    named,
    one_line,
    reply,
    shown,
    sparkline,
    split_of_time,
)
from trainer.runs.run_files import dig, load_run

_REWARD = (("reward/mean", "reward {:z.3f}"),)  # z: no -0.000
_KL = (("kl/ref_sequence", "KL {:z.3f} nats per reply"),)
_LOSS = (("loss/total", "loss {:z.4f}"),)
_EVAL = (("eval/sampled_accuracy", "accuracy {:.2f}"), ("eval/greedy_accuracy", "greedy {:.2f}"))
_LIVE = (
    ("kl/ref", "{:z.3f} nats per token"),
    ("policy/entropy", "entropy {:.3f}"),
    ("response/length_mean", "length {:.0f}"),
    ("perf/tokens_per_s", "{:,.0f} tok/s"),
    ("time/iteration_s", "{:.1f} s"),
)
_FILES = {"report": "report.html", "metrics": "metrics.jsonl", "model": "model"}


class _Evaluation(NamedTuple):
    what: str
    share: float  # done
    since: float  # seconds
    last: bool


class Display(Observer):
    """Show the progress of a run of `total` iterations.

    `about` is what the header says below the title, a Path as a link; `folder` is the run folder
    that the last lines name, None where it does not stay. `show_every`: iterations between sample
    replies; 0 = none. `since`: when the run began (time.time()); None is when the display does.

    >>> display = Display(2, title="demo", file=sys.stdout)
    >>> display.begin()
    demo: 2 iterations
    >>> display.log({"reward/mean": 0.25, "time/iteration_s": 2.0}, 1)
    iteration 1/2  reward 0.250  2.0 s  2 s left
    """

    def __init__(
        self,
        total: int,
        *,
        title: str = "",
        about: Mapping[str, str | Path] | None = None,
        folder: Path | None = None,
        file: TextIO | None = None,
        quiet: bool = False,
        show_every: int = 0,
        since: float | None = None,
    ) -> None:
        self.show_every = show_every
        self.total, self.title, self.folder, self.quiet = total, title, folder, quiet
        self.about = dict(about or {})
        self.console = Output(file=file or sys.stdout, highlight=False, quiet=quiet)
        self._seconds: deque[float] = deque(maxlen=10)
        self._curve: list[float] = []  # rewards; losses without them
        self._iteration = 0
        self._latest: dict[str, float] = {}
        self._evaluating: _Evaluation | None = None
        self._evaluation_s = 0.0
        self._stopping = False
        self._since = since
        self._began = self._clock = time.monotonic()
        self._live: Live | None = None
        self._blocks = BarColumn(bar_width=24)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            self._blocks,
            MofNCompleteColumn(),
            TextColumn("{task.fields[times]}"),
        )
        self._task = self._bar.add_task(title, total=total, times="")

    def begin(self) -> None:
        """Print the header, and on a terminal start the live lines."""
        self._print(f"{self.title}: {self.total} iterations")
        width = max((len(name) for name in self.about), default=0)
        for name, value in self.about.items():
            self._print(Text(f"  {name:<{width}}  ").append_text(shown(value)))
        self._began = self._clock = time.monotonic()
        self._began -= 0.0 if self._since is None else time.time() - self._since
        if self.console.is_terminal and not self.console.is_dumb_terminal and not self.quiet:
            live = Live(get_renderable=self._draw, console=self.console, refresh_per_second=4)
            live.start()
            self._live = live

    def close(self) -> None:
        """Stop the live lines; their last picture stays."""
        self._evaluating = None
        if self._live is not None:
            self._live.stop()
            self._live = None

    def resume(self, iteration: int, text: str, *, again: bool, seconds: float) -> None:
        """Start at an iteration; the header says so, the time counts the earlier starts."""
        self._since = time.time() - seconds
        self._iteration = iteration
        self._bar.update(self._task, completed=iteration)
        self.about["resumed"] = text

    def evaluating(self, what: str, share: float, *, last: bool) -> None:
        """Show that an evaluation goes on, of which `share` (0 to 1) is done."""
        if self._evaluating is None and self._live is None:
            self._print(f"evaluating {what}")
        since = self._evaluating.since if self._evaluating else time.monotonic()
        self._evaluating = _Evaluation(what, share, since, last)

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Show the metrics of a finished iteration; 0 is the evaluation before training."""
        now = time.monotonic()
        seconds = metrics.get("time/iteration_s", now - self._clock)
        self._clock, self._iteration = now, iteration
        if self._evaluating is not None:
            self._evaluation_s = now - self._evaluating.since
            self._evaluating = None
        if "time/iteration_s" in metrics or iteration > 0:
            self._seconds.append(seconds)
        if iteration:
            names = ("reward/mean",) if _judged(metrics) else ("loss/total",)
            self._curve += [metrics[n] for n in names if n in metrics]
        if self._live is not None:
            self._bar.update(self._task, completed=iteration)
            self._latest = dict(metrics) if iteration else {}
            self._live.refresh()
        # In a log a hundred lines are enough; evaluations stay in sight everywhere.
        in_log = self._live is None and iteration % max(self.total // 100, 1) == 0
        if in_log or any(name.startswith("eval/") for name in metrics):
            self._print(self._plain_line(iteration, metrics, seconds))

    def say(self, text: str, *, style: str = "") -> None:
        """Print one line above the progress, wrapped at words on a terminal."""
        self.console.print(Text(text, style=style), soft_wrap=not self.console.is_terminal)

    def replies(self, rows: Sequence[Mapping[str, Any]], iteration: int, *, kind: str) -> None:
        """Print what was said in an evaluation, and now and then in training."""
        if kind == "train":
            self.trained_on(iteration, rows)
        else:
            when = f"at iteration {iteration}" if kind == "eval" else f"{kind} training"
            self.samples(f"replies {when}", rows)

    def samples(
        self, title: str, rows: Sequence[Mapping[str, Any]], *, most: int = 3, width: int = 72
    ) -> None:
        """Print a few prompt -> reply pairs (rows as in transcripts.jsonl), replies in colour."""
        self._print(title)
        for row in rows[:most]:
            reward = row.get("reward")
            tail = "" if reward is None else f"   [reward {reward:.2f}]"
            self._print(f"  {one_line(row.get('prompt', ''), width)}")
            said = Text("    -> ").append_text(reply(row, width)).append(tail)
            self.console.print(said, soft_wrap=True)

    def trained_on(self, iteration: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print the best and the worst reply of a batch, every `show_every` iterations."""
        if self.show_every and iteration % self.show_every == 0 and rows:
            both = [rows[0], rows[-1]] if len(rows) > 1 else rows
            self.samples(f"best and worst reply of iteration {iteration}", both, width=240)

    def stopping(self) -> None:
        """Say that a stop was asked for; safe in a signal handler, which may not print."""
        self._stopping = True  # the live lines show it at their next refresh
        if self._live is None and not self.quiet:
            os.write(2, f"{self._stop_text()}\n".encode())

    def end(self, state: str, *, saved: int | None) -> None:
        """Print what the run came to, or what it has saved and how to go on."""
        self.close()
        if self.folder is None:
            return
        if state == "finished":
            self.finish()
        elif saved is None:
            self._print("nothing is saved: it ended before its first checkpoint")
        else:
            self._print(f"saved at iteration {saved}; go on with: {about.resume(self.folder)}")

    def finish(self) -> None:
        """Print what the run came to and where things are, as the last lines."""
        assert self.folder is not None
        if words := about.summary(load_run(self.folder)):
            self._print(words)
        for name, file in _FILES.items():
            self._print(Text(f"{name:<7}  ").append_text(shown(Path(self.folder, file))))
        self._print(f"{'chat':<7}  {about.resume(self.folder, mode='chat')}")

    def _draw(self) -> Group:
        """Return the live lines; the refresh thread asks for them, so that the times go on."""
        now, width = time.monotonic(), self.console.width
        times = ", ".join(filter(None, [duration(now - self._began), self._left(self._iteration)]))
        rest = width - len(f"{self.title} {self.total}/{self.total} {times}") - 2
        self._blocks.bar_width = min(max(rest, 4), 24)
        self._bar.update(self._task, times=times)
        lines = lay_out(self._live_values(), width)
        going = self._evaluating  # once: the other thread may end it meanwhile
        if going is not None:
            since = duration(now - going.since)
            lines.append(f"evaluating {going.what}: {going.share:.0%}, {since}")
        if self._stopping:
            lines.append(self._stop_text())
        shown = [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]
        return Group(self._bar, *shown)

    def _plain_line(self, iteration: int, metrics: Mapping[str, float], seconds: float) -> str:
        if iteration == 0:
            values = [*named(metrics, _EVAL), f"{self._evaluation_s:.1f} s"]
            return "  ".join(["before training", *values])
        values = [*_signal(metrics), *named(metrics, (*_KL, *_EVAL)), f"{seconds:.1f} s"]
        parts = [f"iteration {iteration}/{self.total}", *values, self._left(iteration)]
        return "  ".join(filter(None, parts))

    def _live_values(self) -> list[str]:
        latest = self._latest
        values = [*_signal(latest), *named(latest, (*_KL, *_LIVE)), split_of_time(latest)]
        if len(self._curve) > 1:
            values.insert(0, sparkline(self._curve, unicode=self._unicode))
        return values

    @property
    def _unicode(self) -> bool:
        return self.console.encoding.lower().startswith("utf")

    def _left(self, iteration: int) -> str:
        """Return the time left; the last evaluation takes as long as the one before."""
        if not self._seconds or iteration >= self.total:
            return ""
        each = sum(self._seconds) / len(self._seconds)
        return f"{duration((self.total - iteration) * each + self._evaluation_s)} left"

    def _stop_text(self) -> str:
        going = self._evaluating
        last = going is not None and going.last  # a run that is trained is finished first
        what = "ending with this evaluation" if last else "stopping at the next safe point"
        return f"{what}; Ctrl-C again stops at once"

    def _print(self, text: str | Text) -> None:
        # soft_wrap: paths stay in one piece; Text: a reply's [brackets] are no markup
        self.console.print(text if isinstance(text, Text) else Text(text), soft_wrap=True)


def _judged(metrics: Mapping[str, float]) -> bool:
    """Return whether replies were to be rewarded, also if all of them were dropped."""
    return "reward/mean" in metrics or "reward/dropped_fraction" in metrics


def _signal(metrics: Mapping[str, float]) -> list[str]:
    """Return the reward, none if all replies were dropped, or the loss of SFT."""
    if not _judged(metrics):
        return named(metrics, _LOSS)
    return named(metrics, _REWARD) or ["reward none"]


def show_run(runtime: Any, total: int) -> Display:
    """Return the display of a runtime's run, called after its experiment.

    A warm-up's folder is deleted at its end: its config says where the model is kept instead.
    """
    folder = Path(os.path.abspath(runtime.folder))  # as Hydra gives it, also where resume= did not
    run = load_run(folder)
    origin, sha = (dig(run.status, "model", key) or "?" for key in ("origin", "sha256"))
    name, kept = dig(run.config, "policy", "model"), run.config.get("kept_in")
    header: dict[str, str | Path] = {"model": f"{name} ({origin}, sha256 {sha[:12]})"}
    header |= {"kept in": str(kept)} if kept else {"report": folder / _FILES["report"]}
    place = None if kept else folder
    every = dig(run.config, "trainer", "show_every") or 0
    return Display(
        total,
        title=run.experiment,
        about=header,
        folder=place,
        quiet=not runtime.is_main,
        show_every=every,
        since=runtime.started,
    )
