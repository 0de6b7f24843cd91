"""Send the content of a run's files to a service too (W&B, MLflow ...); never ends a run."""

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from policies.files import write_text
from trainer.pages.trackers.jsonl import JsonlTracker, finite, lines_of
from trainer.runs.experiment_models import IRRELEVANT
from trainer.runs.failures import say
from trainer.runs.redact import redact, redact_text
from trainer.runs.run_files import ITERATION, dig, is_sweep, load_run

log = logging.getLogger(__name__)


class Mirror(JsonlTracker):
    """Write the files and send the same lines; after a failure, warn once and only write files.

    A subclass sets `word` (name of its package) and `hint` (how to view the run, printed at the
    end) and overrides some of `_start`, `_log`, `_show`, `_alert` and `_stop`. `about`: description
    to send, without secrets and overlong names; its name, group and tags replace the values of
    `names_of`. `first`: the first iteration to log, None in a new run.
    """

    word = ""

    def __init__(
        self,
        folder: str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        resume: bool = False,
        keep_transcripts: bool = True,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] | None = None,
    ) -> None:
        super().__init__(folder, resume=resume, keep_transcripts=keep_transcripts)
        self.hint, self.first = "", None
        custom = {"name": name, "group": group, "tags": tags}
        names = names_of(self.folder, config or {})
        names |= {key: value for key, value in custom.items() if value is not None}
        self.about: dict[str, Any] = {
            "name": redact_text(names["name"])[:128],
            "group": names["group"] and redact_text(names["group"])[:128],
            "tags": [redact_text(tag)[:64] for tag in names["tags"] if tag],
            "config": redact(config or {}),
            "job_type": names["job_type"],
        }
        self._works = False

    def resume(self, iteration: int, text: str, *, again: bool, seconds: float) -> None:
        super().resume(iteration, text, again=again, seconds=seconds)
        self.first = iteration + 1 - again

    def begin(self) -> None:
        self._works = True
        self._safely("start", self._start)

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        super().log(metrics, iteration)
        line = finite({**metrics, ITERATION: iteration})
        known = {name: float(value) for name, value in line.items() if value is not None}
        self._safely("log to", self._log, known, iteration)

    def responses(self, rows: Sequence[Mapping[str, Any]], iteration: int, *, kind: str) -> None:
        super().responses(rows, iteration, kind=kind)
        if self.keep_transcripts:
            lines = finite(lines_of(rows, iteration))
            self._safely("send responses to", self._show, lines, iteration)

    def alert(self, title: str, text: str, *, error: bool = False) -> None:
        self._safely("alert", self._alert, title, text, error)

    def end(self, state: str, *, saved: int | None) -> None:
        self._safely("finish", self._stop, state)
        if self._works and self.hint:
            say(f"{self.word:<7}  {self.hint}")

    def _nothing(self, *_: Any) -> None: ...

    _start = _log = _show = _alert = _stop = _nothing

    def _safely(self, verb: str, action: Callable[..., Any], *args: Any) -> None:
        """Call the mirror's library; when it fails, warn once and continue without it."""
        if not self._works:
            return
        try:
            action(*args)
        except Exception as error:  # a tracker must never end a training run
            self._works = False
            words = first_line(error), self.metrics
            log.warning("%s: could not %s the run (%s); going on with %s", self.word, verb, *words)

    def run_id(self) -> str:
        """Return the id in <word>_id.txt, created at the first start, so that a resume keeps it."""
        path = self.folder / f"{self.word}_id.txt"
        if not path.is_file():
            write_text(path, secrets.token_hex(4) + "\n")
        return path.read_text().strip()


def first_line(error: Exception) -> str:
    """Return the first line of an error, short enough for a warning."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


def names_of(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return name, group (its sweep), tags and job_type of the run in a folder."""
    run, mode = load_run(folder), config.get("mode") or "train"
    objective = str(dig(config, "algorithm", "objective", "_target_") or "").rpartition(".")[2]
    model = Path(str(dig(config, "policy", "model") or ""))
    sweep = folder.parent if is_sweep(folder.parent) else None
    changes = [
        f"{key}={Path(value).name if value[:1] in tuple('/.~') else value}"  # a path's name
        for key, value in run.overrides.items()
        if not key.startswith((*IRRELEVANT, "experiment", "output_dir", "eval"))
    ]
    # <run>/model is named by its run
    start = model.parent.name if model.name == "model" else model.name
    return {
        "name": " ".join([run.experiment, *([folder.name] if sweep else changes)]),
        "group": f"{sweep.parent.name}/{sweep.name}" if sweep else None,
        "tags": [run.experiment, start, objective],
        "job_type": "sft" if mode == "train" and objective == "SFTObjective" else mode,
    }
