"""Base of the trackers that send what the files get to one more place: a file each beside this one.

Left out on purpose: any way for a mirror to stop a training run.
"""

import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from policies.cache import write_text
from policies.extras import EXTRAS
from trainer.reports.trackers.jsonl import JsonlTracker, finite
from trainer.runs.failures import say
from trainer.runs.redact import redact, redact_text
from trainer.runs.run_files import ITERATION

log = logging.getLogger(__name__)


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
