"""What a person at the terminal sees: live lines on a terminal, plain lines in a log file.

Reward and KL are the signals of an RL run (its loss hovers around 0), the loss is the one of SFT.
"""

import os
import re
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.live import Live
from rich.style import Style
from rich.text import Text

from trainer.observer import Observer
from trainer.reports import summary
from trainer.reports.formats import duration, one_line, printable
from trainer.runs.failures import silence
from trainer.runs.run_files import dig, is_sweep, load_run

_REWARD = {"reward/mean": "reward {:z.3f}"}  # z: no -0.000
_LOSS = {"loss/total": "loss {:z.4f}"}
KL = {"kl/ref_sequence": "KL {:z.3f} nats per reply"}
_EVAL = {"eval/sampled_accuracy": "accuracy {:.2f}", "eval/greedy_accuracy": "greedy {:.2f}"}
_FILES = {"report": "report.html", "metrics": "metrics.jsonl", "model": "model"}


class Output(Console):
    """A console that outlives its reader, and a full disk below a log."""

    def print(self, *texts: Any, **how: Any) -> None:
        try:
            super().print(*texts, **how)
        except OSError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Fall silent: the run goes on."""
        self.quiet = True
        silence()


class _Evaluation(NamedTuple):
    what: str
    share: float  # of it that is done
    since: float  # of time.monotonic()
    last: bool


class Display(Observer):
    """Show the progress of a run of `total` iterations.

    `header`: what stands below the title, a Path as a link. `folder`: the run folder that the last
    lines name, if it stays. `show_every`: iterations between sample replies; 0 = none. `since`:
    when the run began (time.time()); None is when the display does. `brief`: a job of a sweep,
    which says how it began and what came out.

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
        since: float | None = None,
        brief: bool = False,
    ) -> None:
        self.brief, self.show_every = brief, show_every
        self.total, self.title, self.folder = total, title, folder
        self.header = dict(header or {})
        self.console = Output(file=file or sys.stdout, highlight=False)
        self._seconds: deque[float] = deque(maxlen=10)
        self._curve: list[float] = []  # rewards; losses without them
        self._latest: Mapping[str, float] = {}
        self._evaluating: _Evaluation | None = None
        self._iteration, self._evaluation_s, self._said = 0, 0.0, 0.0
        self._stopping, self._since = False, since
        self._began = self._clock = time.monotonic()
        self._live: Live | None = None

    def resume(self, iteration: int, text: str, *, again: bool, seconds: float) -> None:
        self._since = time.time() - seconds
        self._iteration = iteration
        self.header["resumed"] = text
        past = load_run(self.folder).metrics if self.folder else []
        for line in past:  # the bars are of the whole run; what is done again is not there twice
            if 0 < line["progress/iteration"] <= iteration:
                self._curve += [line[name] for name in _signals(line) if name in line]

    def begin(self) -> None:
        header = {} if self.brief else self.header
        if not self.brief:
            self._print(f"{self.title}: {self.total} iterations")
        width = max((len(name) for name in header), default=0)
        for name, value in header.items():
            value = self._near(value) if isinstance(value, Path) else value
            self._print(linked(f"  {name:<{width}}  ", value))
        self._clock = time.monotonic()
        self._began = self._clock - (time.time() - self._since if self._since else 0.0)
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(get_renderable=self._draw, console=self.console, refresh_per_second=4)
            self._live.start()

    def evaluating(self, what: str, share: float, *, last: bool) -> None:
        before = going if (going := self._evaluating) and going.what == what else None
        now = time.monotonic()
        since = now if before is None else before.since
        plain = self._live is None and not self.brief
        if plain and (before is None or now > self._said + 60):  # a log is not silent
            self._said, told = now, ""
            if before:
                from trainer.reports.live_lines import so_far  # here: few evaluations are long

                told = f": {so_far(share, now - since, hint=not self._iteration)}"
            self._print(f"{what}{told}")
        self._evaluating = _Evaluation(what, share, since, last)

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        now = time.monotonic()
        seconds = metrics.get("time/iteration_s", now - self._clock)
        self._clock, self._iteration = now, iteration
        if self._evaluating is not None:
            self._evaluation_s, self._evaluating = now - self._evaluating.since, None
        if iteration:
            self._seconds.append(seconds)
            self._curve += [metrics[name] for name in _signals(metrics) if name in metrics]
        if self._live is not None:
            self._latest = dict(metrics) if iteration else {}
            self._live.refresh()
        # In a log a hundred lines are enough; evaluations stay in sight everywhere.
        plain = self._live is None and not self.brief
        in_log = plain and iteration % max(self.total // 100, 1) == 0
        if in_log or any(name.startswith("eval/") for name in metrics):
            parts = ["before training", *named(metrics, _EVAL), f"{self._evaluation_s:.1f} s"]
            if iteration:
                values = [*signal(metrics), *named(metrics, KL | _EVAL)]
                parts = [f"iteration {iteration}/{self.total}", *values, f"{seconds:.1f} s"]
            self._print("  ".join(filter(None, [*parts, self._left(iteration)])))

    def replies(self, rows: Sequence[Mapping[str, Any]], iteration: int, *, kind: str) -> None:
        """Print a few replies of an evaluation; of training the best and worst, now and then."""
        if self.brief:
            return
        if kind == "train":
            if self.show_every and iteration % self.show_every == 0 and rows:
                title = f"best and worst reply of iteration {iteration}"
                self._print_replies(title, rows[:: max(len(rows) - 1, 1)], width=240)
        elif rows:
            when = f"at iteration {iteration}" if kind == "eval" else f"{kind} training"
            self._print_replies(f"replies {when}", rows[:3], width=72)

    def say(self, text: str, *, style: str = "") -> None:
        self._print(Text(text, style=style))

    def stopping(self) -> None:
        """Say that a stop was asked for; safe in a signal handler, which may not print."""
        self._stopping = True  # the live lines show it at their next refresh
        if self._live is None:
            os.write(2, f"{self._stop_text()}\n".encode())

    def end(self, state: str, *, saved: int | None) -> None:
        self._evaluating = None  # the last picture stays: nothing in it goes on
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self.folder is None:
            return
        if state == "finished":
            run = load_run(self.folder)
            if words := summary.in_one_line(run):
                self._print(whole(words.split(", "), ", "))
            for name, file in {} if self.brief else _FILES.items():
                self._print(linked(f"{name:<7}  ", self._near(self.folder / file)))
            if not self.brief and (chat := summary.chat_command(self._near(self.folder), run)):
                self._print_command(f"{'chat':<7}  ", chat)
        else:
            what = summary.NOTHING if saved is None else f"saved at iteration {saved}; go on with: "
            self._print_command(what, summary.resume_command(self._near(self.folder)))

    def _draw(self) -> Text:
        """Return the live lines; the refresh thread asks for them, so that the times go on."""
        from trainer.reports.live_lines import draw, so_far  # here: only a terminal has them

        now, below = time.monotonic(), []
        if (going := self._evaluating) is not None:  # once: the other thread may end it meanwhile
            told = so_far(going.share, now - going.since, hint=not self._iteration)
            below = [f"{going.what}: {told}"]
        times = ", ".join(filter(None, [duration(now - self._began), self._left(self._iteration)]))
        lines = draw(
            self.title,
            self._latest,
            done=(self._iteration, self.total),
            times=times,
            curve=self._curve,
            width=self.console.width,
            unicode=self.console.encoding.lower().startswith("utf"),
        )
        lines += below + [self._stop_text()] * self._stopping
        return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")

    def _left(self, iteration: int) -> str:
        """Return the time left, an evaluation at the end included."""
        if not self._seconds or iteration >= self.total:
            return ""
        each = sum(self._seconds) / len(self._seconds)
        return f"{duration((self.total - iteration) * each + self._evaluation_s)} left"

    def _stop_text(self) -> str:
        last = getattr(self._evaluating, "last", False)  # a run that is trained is finished first
        what = "ending with this evaluation" if last else "stopping at the next safe point"
        return f"{what}; Ctrl-C again stops at once"

    def _print_replies(self, title: str, rows: Sequence[Mapping[str, Any]], *, width: int) -> None:
        """Print prompts and replies (rows of transcripts.jsonl), sampled tokens in colour."""
        self._print(title)
        for row in rows:
            self._print(f"  {one_line(row.get('prompt', ''), width)}")
            pieces = row.get("pieces") or {}
            texts = pieces.get("text") or [row.get("response", "")]
            sampled = pieces.get("log_prob") or [0.0] * len(texts)
            said = Text()
            for text, value in zip(texts, sampled, strict=True):
                said.append(printable(text), style="dim" if value is None else "cyan")
            said = said if len(said) <= width else said[: width - 3].append("...")
            reward = row.get("reward")
            tail = "" if reward is None else f"   [reward {reward:z.2f}]"
            self._print(Text("    -> ").append_text(said).append(tail))

    @property
    def _width(self) -> int:
        return self.console.width if self.console.is_terminal else 10_000  # a log has no edge

    def _near(self, path: Path) -> Path:
        """Return a path as it is shown at a terminal: from here, if it lies below."""
        inside = self.console.is_terminal and path.is_relative_to(here := Path.cwd())
        return path.relative_to(here) if inside else path

    def _print(self, text: str | Text) -> None:
        # Text: a reply's [brackets] are no markup; soft_wrap: a path stays in one piece
        for line in in_lines(text if isinstance(text, Text) else Text(text), self._width):
            self.console.print(line, soft_wrap=True)

    def _print_command(self, name: str, command: str) -> None:
        """Print a command in one piece, to be copied: on its own line if it needs one."""
        text = name + command if len(name + command) <= self._width else f"{name}\n{command}"
        self.console.print(Text(text), soft_wrap=True)


def show_run(runtime: Any, total: int) -> Display:
    """Return the display of a runtime's run; that of a warm-up names where its model is kept."""
    folder = Path(os.path.abspath(runtime.folder))  # as Hydra gives it, also where resume= did not
    run = load_run(folder)
    origin, sha = (dig(run.status, "model", key) or "?" for key in ("origin", "sha256"))
    name, kept = dig(run.config, "policy", "model"), run.config.get("kept_in")
    header: dict[str, str | Path] = {"model": f"{name} ({origin}, sha256 {sha[:12]})"}
    header |= {"kept in": str(kept)} if kept else {"report": folder / _FILES["report"]}
    return Display(
        total,
        title=run.experiment,
        header=header,
        folder=None if kept else folder,
        show_every=dig(run.config, "trainer", "show_every") or 0,
        since=runtime.started,
        brief=is_sweep(folder.parent),
    )


def linked(name: str, value: str | Path) -> Text:
    """Return a name and a text, or a path that a click opens where the terminal can (OSC 8)."""
    link = value.absolute().as_uri() if isinstance(value, Path) else None
    return Text(name).append(str(value), style=Style(link=link) if link else "")


def whole(values: Sequence[str], between: str) -> Text:
    """Return values as a text that breaks between them alone."""
    return Text(between.join(value.replace(" ", "\xa0") for value in values if value))


def in_lines(text: Text, width: int) -> list[Text]:
    """Return a text in lines of whole words; a word that is longer than a line stays whole."""
    breaks, start = [], 0
    for word in re.finditer("[^ ]+", text.plain):
        if word.end() - start > width and text.plain[start : word.start()].strip():
            breaks.append(start := word.start())
    for line in (out := list(text.divide(breaks))):
        line.rstrip()
        line.plain = line.plain.replace("\xa0", " ")
    return out


def named(metrics: Mapping[str, float], forms: Mapping[str, str]) -> list[str]:
    return [form.format(metrics[name]) for name, form in forms.items() if name in metrics]


def _signals(metrics: Mapping[str, float]) -> Mapping[str, str]:
    """Return what to go by: the reward, also if all replies were dropped, or the loss of SFT."""
    judged = "reward/mean" in metrics or "reward/dropped_fraction" in metrics
    return _REWARD if judged else _LOSS


def signal(metrics: Mapping[str, float]) -> list[str]:
    forms = _signals(metrics)
    return named(metrics, forms) or ["reward none"] * (forms is _REWARD)
