"""Terminal output: a progress bar on a terminal, plain lines in a log file.

An RL run shows reward and KL, because its loss stays near 0; an SFT run shows the loss.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from trainer.observer import Observer
from trainer.pages import summary
from trainer.pages.formats import duration, one_line
from trainer.runs.failures import close_output
from trainer.runs.run_files import dig, is_sweep, load_run
from trainer.runs.run_log import TERMINAL

_REWARD = {"reward/mean": "reward {:z.3f}"}  # z: no -0.000
_LOSS = {"loss/total": "loss {:z.4f}"}
_KL = {"kl/ref_sequence": "KL {:z.3f} nats per response"}
_EVAL = {"eval/sampled_accuracy": "accuracy {:.2f}", "eval/greedy_accuracy": "greedy {:.2f}"}
_LATEST = {
    "kl/ref": "{:z.3f} nats per token",
    "policy/entropy": "entropy {:.3f}",
    "response/length_mean": "length {:.0f}",
    "perf/tokens_per_s": "{:,.0f} tok/s",
    "time/iteration_s": "{:.1f} s",
}
_FILES = {"report": "report.html", "metrics": "metrics.jsonl", "model": "model"}
STOPPING = "stopping at the next safe point; Ctrl-C again stops at once"


class Output(Console):
    """A console that copies its texts to run.log and continues after its reader has ended."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, and log the texts."""
        super().print(*objects, **options)
        for text in objects:
            if isinstance(text, str):  # not a progress bar
                TERMINAL.info(text)

    def on_broken_pipe(self) -> None:
        """Discard further output; the run continues."""
        self.quiet = True
        close_output()


class Bar(Progress):
    """A progress bar with lines below it, which are computed at every refresh."""

    def __init__(self, console: Console, lines: Callable[[], Iterable[str]]) -> None:
        self._lines = lines
        columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn())
        left = TextColumn("{task.fields[left]}")
        super().__init__(*columns, TimeElapsedColumn(), left, console=console, refresh_per_second=4)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield from map(Text, self._lines())


class _Evaluation(NamedTuple):
    label: str
    fraction: float  # share of the evaluation that is done
    since: float  # start of the evaluation, time.monotonic()


class Display(Observer):
    """Show the progress of a run of `total` iterations.

    `header`: lines below the title; a Path is shown relative. `folder`: the run folder for the last
    lines, if it stays. `show_every`: iterations between sample responses; 0 = none. `brief`: a job
    of a sweep, which prints only its start and result. `live`: draw a bar on a terminal.

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
        header: Mapping[str, str | Path] | None = None,
        folder: Path | None = None,
        file: TextIO | None = None,
        show_every: int = 0,
        brief: bool = False,
        live: bool = True,
    ) -> None:
        self.brief, self.show_every, self.live = brief, show_every, live
        self.total, self.title, self.folder = total, title, folder
        self.header = dict(header or {})
        self.console = Output(
            file=file or sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        self._seconds: deque[float] = deque(maxlen=10)
        self._latest: Mapping[str, float] = {}
        self._evaluating: _Evaluation | None = None
        self._iteration, self._evaluation_s, self._printed = 0, 0.0, 0.0
        self._stopping = False
        self._clock = time.monotonic()
        self._bar: Bar | None = None
        self._debugger = sys.breakpointhook

    def resume(self, iteration: int, text: str, *, again: bool, seconds: float) -> None:
        self._iteration = iteration
        self.header["resumed"] = text

    def begin(self) -> None:
        if not self.brief:
            self.console.print(f"{self.title}: {self.total} iterations")
            width = max(map(len, self.header), default=0)
            for name, value in self.header.items():
                self.console.print(f"  {name:<{width}}  {self._near(value)}")
        self._clock = time.monotonic()
        if self.live and self.console.is_terminal and not self.console.is_dumb_terminal:
            self._bar = Bar(self.console, self._lines)
            self._bar.add_task(self.title, total=self.total, completed=self._iteration, left="")
            self._bar.start()
            sys.breakpointhook = self._breakpoint

    def evaluating(self, label: str, fraction: float, *, last: bool) -> None:
        before = going if (going := self._evaluating) and going.label == label else None
        now = time.monotonic()
        self._evaluating = _Evaluation(label, fraction, before.since if before else now)
        plain = self._bar is None and not self.brief
        if plain and (before is None or now > self._printed + 60):  # a line per minute in a log
            self._printed = now
            self.console.print(self._progress_of_evaluation() if before else label)

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        now = time.monotonic()
        seconds = metrics.get("time/iteration_s", now - self._clock)
        self._clock, self._iteration = now, iteration
        if self._evaluating is not None:
            self._evaluation_s, self._evaluating = now - self._evaluating.since, None
        if iteration:
            self._seconds.append(seconds)
        if self._bar is not None:
            self._latest = dict(metrics) if iteration else {}
            self._bar.update(self._bar.task_ids[0], completed=iteration, left=self._left())
            self._bar.refresh()
        # A log gets about a hundred lines and all evaluations.
        plain = self._bar is None and not self.brief
        in_log = plain and iteration % max(self.total // 100, 1) == 0
        if in_log or any(name.startswith("eval/") for name in metrics):
            parts = ["before training", *_named(metrics, _EVAL), f"{self._evaluation_s:.1f} s"]
            if iteration:
                values = [*_signal(metrics), *_named(metrics, _KL | _EVAL)]
                parts = [f"iteration {iteration}/{self.total}", *values, f"{seconds:.1f} s"]
            self.console.print("  ".join(filter(None, [*parts, self._left()])))

    def responses(self, rows: Sequence[Mapping[str, Any]], iteration: int, *, kind: str) -> None:
        """Print a few responses of an evaluation; in training, the best and worst."""
        if self.brief or not rows:
            return
        if kind != "train":
            when = f"at iteration {iteration}" if kind == "eval" else f"{kind} training"
            self._print_responses(f"responses {when}", rows[:3], width=72)
        elif self.show_every and iteration % self.show_every == 0:
            title = f"best and worst response of iteration {iteration}"
            self._print_responses(title, rows[:: max(len(rows) - 1, 1)], width=240)

    def say(self, text: str, *, style: str = "") -> None:
        self.console.print(text, style=style)

    def stopping(self) -> None:
        """Record a stop request; safe in a signal handler, which may not print."""
        self._stopping = True  # the lines below the bar show it at their next refresh
        if self._bar is None:
            os.write(2, f"{STOPPING}\n".encode())

    def end(self, state: str, *, saved: int | None) -> None:
        self._evaluating = None  # the last frame stays on the terminal without progress
        self._stop_bar()
        if self.folder is None:
            return
        near = self._near(self.folder)
        run = load_run(self.folder)
        if state != "finished":
            self.console.print(summary.stopped_line(near, run, saved))
            return
        self.console.print(summary.summary_line(run))
        if not self.brief:
            places = {name: str(near / file) for name, file in _FILES.items()}
            places["chat"] = summary.chat_command(near, run) or ""
            for name, place in places.items():
                self.console.print(f"{name:<7}  {place}" if place else "")

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            sys.breakpointhook = self._debugger

    def _breakpoint(self, *args: Any, **options: Any) -> Any:
        """Give the terminal to the debugger; it stops in this frame, one below the caller's."""
        self._stop_bar()
        return self._debugger(*args, **options)

    def _lines(self) -> Iterator[str]:
        """Yield the lines below the bar; its thread refreshes them, so that times advance."""
        if values := [*_signal(self._latest), *_named(self._latest, _KL | _LATEST)]:
            yield "  ".join(values)
        if text := self._progress_of_evaluation():
            yield text
        if self._stopping:
            yield STOPPING

    def _progress_of_evaluation(self) -> str:
        """Return the progress of an evaluation with the time left; a hint if it takes minutes."""
        if (going := self._evaluating) is None:
            return ""
        seconds = time.monotonic() - going.since
        left = seconds / going.fraction - seconds if going.fraction else 0.0
        about = f", about {duration(left)} left" if going.fraction else ""
        hint = "; fewer rows: eval.max_rows=<n>" if not self._iteration and left > 180 else ""
        return f"{going.label}: {going.fraction:.0%}, {duration(seconds)}{about}{hint}"

    def _left(self) -> str:
        """Return the time left, including the final evaluation."""
        if not self._seconds or self._iteration >= self.total:
            return ""
        each = sum(self._seconds) / len(self._seconds)
        return f"{duration((self.total - self._iteration) * each + self._evaluation_s)} left"

    def _print_responses(
        self, title: str, rows: Sequence[Mapping[str, Any]], *, width: int
    ) -> None:
        """Print prompts and responses (rows of transcripts.jsonl)."""
        self.console.print(title)
        for row in rows:
            reward = row.get("reward")
            tail = "" if reward is None else f"   [reward {reward:z.2f}]"
            self.console.print(f"  {one_line(row.get('prompt', ''), width)}")
            self.console.print(f"    -> {one_line(row.get('response', ''), width)}{tail}")

    def _near(self, value: Any) -> Any:
        """Return a path relative to the current directory, if it is below it, at a terminal."""
        shortened = isinstance(value, Path) and self.console.is_terminal
        inside = shortened and value.is_relative_to(Path.cwd())
        return value.relative_to(Path.cwd()) if inside else value


def show_run(runtime: Any, total: int, *, show_every: int) -> Display:
    """Return the display of a runtime's run; for a warm-up, with the cache folder of its model."""
    folder = Path(os.path.abspath(runtime.folder))  # absolute, like the folder of Hydra
    run = load_run(folder)
    origin, sha = (dig(run.status, "model", key) or "?" for key in ("origin", "sha256"))
    name, cached = dig(run.config, "policy", "model"), run.config.get("kept_in")
    products = ", bfloat16 products" if "bfloat16" in run.status.get("products", "") else ""
    frozen = dig(run.status, "model", "frozen")  # encoders of images and sound
    products += f", {frozen} weights frozen that a text never reaches" if frozen else ""
    bare = dig(run.status, "model", "without_adapter")
    products += f", LoRA leaves out {100 * bare:.2g}% of the weights in matrices" if bare else ""
    day = run.status.get("date")
    header: dict[str, str | Path] = {"model": f"{name} ({origin}, sha256 {sha[:12]}{products})"}
    header |= {"date": f"{day}, which the chat template writes"} if day else {}
    if not (device := dig(run.status, "machine", "device") or "cpu").startswith("cpu"):
        header["device"] = device
    if runtime.ranks == 1 and "ACCELERATE_MIXED_PRECISION" in os.environ:  # accelerate launch
        header["ranks"] = "1 rank; for two: python train.py ... launch.num_processes=2"
    header |= {"kept in": str(cached)} if cached else {"report": folder / _FILES["report"]}
    return Display(
        total,
        title=run.experiment,
        header=header,
        folder=None if cached else folder,
        show_every=show_every,
        brief=is_sweep(folder.parent),
        live=not dig(run.config, "launch", "in_process"),  # a debugger needs the terminal
    )


def _named(metrics: Mapping[str, float], forms: Mapping[str, str]) -> list[str]:
    return [form.format(metrics[name]) for name, form in forms.items() if name in metrics]


def _signal(metrics: Mapping[str, float]) -> list[str]:
    """Return the main signal: the reward, or the loss of SFT."""
    return _named(metrics, _REWARD) or _named(metrics, _LOSS)
