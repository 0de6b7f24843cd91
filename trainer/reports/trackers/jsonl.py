"""Where metrics and transcripts go: two .jsonl files, and one more place when asked for.

`metrics.jsonl` has one line per iteration, under the names of docs/metrics.md; line 0 is the
evaluation before training. Every line is written and flushed at once, keys sorted, so a killed run
loses nothing. A value that is not finite is written as null (JSON has no NaN) and not charted.
The other places are a `Mirror` each, in a file beside this one. Left out on purpose: buffering, and
any way for a mirror to stop a training run.
"""

import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from policies.cache import write_text
from policies.optional_packages import EXTRAS
from trainer.observer import Observer
from trainer.runs.failures import say
from trainer.runs.redact import redact, redact_text
from trainer.runs.run_files import ITERATION, json_line, number, read_lines, write_lines

log = logging.getLogger(__name__)


class JsonlTracker(Observer):
    """Write metrics.jsonl and transcripts.jsonl into a run folder.

    `about` is what a `Mirror` tells of the run; the files have it already. A new run in a folder
    that holds metrics is a ValueError; `resume=True` goes on behind them.

    >>> import tempfile
    >>> tracker = JsonlTracker(tempfile.mkdtemp())
    >>> tracker.log({"reward/mean": 0.5}, 1)
    >>> print((tracker.folder / "metrics.jsonl").read_text(), end="")
    {"progress/iteration": 1, "reward/mean": 0.5}
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        resume: bool = False,
        keep_transcripts: bool = True,
        **about: Any,
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.keep_transcripts = keep_transcripts
        self._paths = [self.folder / "metrics.jsonl", self.folder / "transcripts.jsonl"]
        if not resume and self._paths[0].exists():
            raise ValueError(
                f"expected a folder without a run, got {self.folder}, which holds metrics.jsonl: "
                f"give another output_dir, or go on with resume={self.folder}"
            )
        self._drop_after(math.inf, math.inf)  # only a line that a kill has torn

    def resume(self, iteration: int, text: str, *, again: bool, seconds: float) -> None:
        """Drop what was written after `iteration`, so that a resumed run repeats it once."""
        self._drop_after(iteration - again, iteration or -1)  # of 0 all is said again

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Write the metrics of one iteration; they are in the file when this returns."""
        line = {name: _plain(value, name) for name, value in metrics.items()}
        if line.setdefault(ITERATION, iteration) != iteration:
            raise ValueError(
                f"expected {ITERATION} {iteration}, got {line[ITERATION]}: "
                "the iteration is the axis of every curve; log one iteration per call"
            )
        self._append(self._paths[0], [line])

    def replies(self, rows: Sequence[Mapping[str, Any]], iteration: int, *, kind: str) -> None:
        """Write prompt and reply pairs; keys as in docs/metrics.md."""
        if self.keep_transcripts:
            lines = [finite({**row, "iteration": iteration}) for row in rows]
            self._append(self._paths[1], lines)

    def _drop_after(self, metrics: float, transcripts: float) -> None:
        """Drop what the files hold of iterations after these."""
        ends = ((ITERATION, metrics), ("iteration", transcripts))
        for path, (key, last) in zip(self._paths, ends, strict=True):
            if path.exists():
                lines = read_lines(path)
                write_lines(path, (line for line in lines if (number(line.get(key)) or 0) <= last))

    def _append(self, path: Path, lines: Sequence[dict[str, Any]]) -> None:
        with open(path, "a", encoding="utf-8") as file:
            for line in lines:
                file.write(json_line(line))
                file.flush()


class Mirror(JsonlTracker):
    """Get what the files get and pass it on; when that fails, warn once and go on without.

    A subclass names its package in `word`, takes its own options, sets `hint` (how to look at the
    run, printed at the end) and overrides what it has a use for of `_start`, `_log`, `_show`,
    `_alert` and `_stop`. `about` is what it may tell others: no secrets, no overlong names.
    A missing package is an ImportError.
    """

    word = ""

    def __init__(
        self,
        folder: str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        name: str = "",
        group: str | None = None,
        tags: Sequence[str] = (),
        job_type: str = "train",
        resume: bool = False,
        keep_transcripts: bool = True,
    ) -> None:
        if find_spec(self.word) is None:
            raise ImportError(EXTRAS.get(self.word, f"there is no package {self.word}; install it"))
        super().__init__(folder, resume=resume, keep_transcripts=keep_transcripts)
        self.hint = ""
        self.about: dict[str, Any] = {
            "name": redact_text(name)[:128] or None,
            "group": group and redact_text(group)[:128],
            "tags": [redact_text(tag)[:64] for tag in tags if tag],
            "config": redact(dict(config or {})),
            "job_type": job_type,
        }
        self._well = True  # it has not failed
        self._safely("start", self._start)

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        super().log(metrics, iteration)
        values = {name: float(value) for name, value in metrics.items()} | {ITERATION: iteration}
        line = {name: value for name, value in values.items() if math.isfinite(value)}
        self._safely("log to", self._log, line, iteration)

    def replies(self, rows: Sequence[Mapping[str, Any]], iteration: int, *, kind: str) -> None:
        super().replies(rows, iteration, kind=kind)
        if self.keep_transcripts:
            lines = [finite({**row, "iteration": iteration}) for row in rows]
            self._safely("send replies to", self._show, lines, iteration)

    def alert(self, title: str, text: str, *, error: bool = False) -> None:
        self._safely("alert", self._alert, title, text, error)

    def end(self, state: str, *, saved: int | None) -> None:
        self._safely("finish", self._stop, state)
        if self._well and self.hint:
            say(f"{self.word:<7}  {self.hint}")
        self._well = False

    def _nothing(self, *_: Any) -> None: ...

    _start = _log = _show = _alert = _stop = _nothing

    def _safely(self, verb: str, action: Callable[..., Any], *given: Any) -> None:
        """Run a call of the mirror's library; when it fails, warn once and go on without it."""
        if not self._well:
            return
        try:
            action(*given)
        except Exception as error:  # a tracker must never end a training run
            self._well = False
            words = first_line(error), self._paths[0]
            log.warning("%s: could not %s the run (%s); going on with %s", self.word, verb, *words)

    def run_id(self) -> str:
        """Return the id in <word>_id.txt, made on the first start, so that a resume keeps it."""
        path = self.folder / f"{self.word}_id.txt"
        if not path.exists():
            write_text(path, secrets.token_hex(4) + "\n")
        return path.read_text().strip()


def first_line(error: Exception) -> str:
    """Return the first line of an error, short enough for a warning."""
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__


def _plain(value: Any, name: str) -> float | None:
    """Return a JSON number: int stays int, a 0-d tensor becomes float, not finite becomes None."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return number(value)
    raise ValueError(f"expected a number for metric {name!r}, got {value!r}: log no text here")


def finite(item: Any) -> Any:
    """Replace every float that is not finite by None, at any depth."""
    if isinstance(item, dict):
        return {key: finite(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return [finite(value) for value in item]
    return number(item) if isinstance(item, float) else item
