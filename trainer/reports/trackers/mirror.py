"""Another place for what the files of a run get: W&B, TensorBoard, Trackio. It never ends a run."""

import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from policies.cache import write_text
from policies.optional_packages import EXTRAS
from trainer.reports.trackers.jsonl import JsonlTracker, finite
from trainer.runs.failures import say
from trainer.runs.redact import redact, redact_text
from trainer.runs.run_files import ITERATION, dig, is_sweep, load_run, read_yaml

log = logging.getLogger(__name__)


class Mirror(JsonlTracker):
    """Get what the files get and pass it on; when that fails, warn once and go on without.

    A subclass names its package in `word`, takes its own options, sets `hint` (how to look at the
    run, printed at the end) and overrides what it has a use for of `_start`, `_log`, `_show`,
    `_alert` and `_stop`. `about` is what it may tell others, without secrets and overlong names;
    `names` go before those of `names_of`. A missing package is an ImportError.
    """

    word = ""

    def __init__(
        self,
        folder: str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        resume: bool = False,
        keep_transcripts: bool = True,
        **names: Any,
    ) -> None:
        if find_spec(self.word) is None:
            raise ImportError(EXTRAS.get(self.word, f"there is no package {self.word}; install it"))
        super().__init__(folder, resume=resume, keep_transcripts=keep_transcripts)
        self.hint = ""
        config = dict(config or {})
        named = {**names_of(self.folder, config), **names}
        self.about: dict[str, Any] = {
            "name": redact_text(named["name"])[:128],
            "group": named["group"] and redact_text(named["group"])[:128],
            "tags": [redact_text(tag)[:64] for tag in named["tags"] if tag],
            "config": redact(config),
            "job_type": named["job_type"],
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
        if not path.is_file():
            write_text(path, secrets.token_hex(4) + "\n")
        return path.read_text().strip()


def first_line(error: Exception) -> str:
    """Return the first line of an error, short enough for a warning."""
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__


def names_of(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return name, group (its sweep), tags and job_type of the run in a folder."""
    run, mode = load_run(folder), config.get("mode") or "train"
    target = str(dig(config, "algorithm", "objective", "_target_") or "")
    objective = target.rpartition(".")[2]
    sweep = folder.parent if is_sweep(folder.parent) else None
    model = Path(str(dig(config, "policy", "model") or ""))
    if model.name == "model":  # of another run
        model = model.parent
    return {
        "name": " ".join([run.experiment, *_telling(run.overrides, sweep)]),
        "group": f"{sweep.parent.name}/{sweep.name}" if sweep else None,
        "tags": [run.experiment, model.name, objective],
        "job_type": "sft" if mode == "train" and objective == "SFTObjective" else mode,
    }


def _telling(overrides: Mapping[str, str], sweep: Path | None) -> list[str]:
    """Return the overrides that tell a run from others; within a sweep those that are swept."""
    words = read_yaml(sweep / "sweep.json").get("words", []) if sweep else []  # JSON is YAML
    several = [word for word in words if "," in word or "(" in word]
    swept = {word.partition("=")[0].lstrip("+") for word in several}
    hidden = ("experiment", "output_dir", "tracker")  # told elsewhere
    told = [key for key in overrides if key.partition(".")[0] not in hidden]
    named = [key for key in told if not swept or key in swept]
    return [f"{key}={_without_folders(overrides[key])}" for key in named]


def _without_folders(value: str) -> str:
    """Return a value with the last names of the paths in it, so that they are told apart.

    >>> _without_folders("/data/of/mine/train.jsonl"), _without_folders("runs/7/model"), "1/2"
    ('train.jsonl', '7/model', '1/2')
    """
    path = Path(value)
    if value[:1] not in ("/", ".", "~") and (len(path.parts) < 3 or "://" in value):
        return value  # a hub's name has one slash
    return "/".join(path.parts[-2:]) if path.name == "model" else path.name
