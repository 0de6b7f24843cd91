"""Where metrics and transcripts go: always two .jsonl files, and W&B when asked for.

`metrics.jsonl` has one line per iteration, under the names of docs/metrics.md; line 0 is the
evaluation before training. Every line is written and flushed at once, keys sorted, so a killed run
loses nothing. A value that is not finite is written as null (JSON has no NaN) and not charted.
Call from rank 0 only. Left out on purpose: buffering, and any way for W&B to stop a training run.
"""

import logging
import math
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.redact import redact, redact_text
from trainer.run_files import ITERATION, json_line, number, read_lines, write_lines, write_text

log = logging.getLogger(__name__)


class JsonlTracker:
    """Write metrics.jsonl and transcripts.jsonl into a run folder.

    `config`, `name`, `group` and `tags` describe the run to trackers that have a use for them.
    A new run in a folder that holds metrics is a ValueError; `resume=True` goes on behind them.

    >>> import tempfile
    >>> tracker = JsonlTracker(tempfile.mkdtemp())
    >>> tracker.log({"reward/mean": 0.5}, 1)
    >>> tracker.finish("finished")
    >>> print((tracker.folder / "metrics.jsonl").read_text(), end="")
    {"progress/iteration": 1, "reward/mean": 0.5}
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        name: str = "",
        group: str | None = None,
        tags: Sequence[str] = (),
        resume: bool = False,
        keep_transcripts: bool = True,
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
        self.rewind(math.inf)  # also drops a line that a kill has torn

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Write the metrics of one iteration; they are in the file when this returns."""
        line = {name: _plain(value, name) for name, value in metrics.items()}
        if line.setdefault(ITERATION, iteration) != iteration:
            raise ValueError(
                f"expected {ITERATION} {iteration}, got {line[ITERATION]}: "
                "the iteration is the axis of every curve; log one iteration per call"
            )
        self._append(self._paths[0], [line])

    def transcripts(self, rows: Sequence[Mapping[str, Any]], iteration: int) -> None:
        """Write prompt and reply pairs; keys as in docs/metrics.md."""
        if self.keep_transcripts:
            lines = [_finite({**row, "iteration": iteration}) for row in rows]
            self._append(self._paths[1], lines)

    def rewind(self, iteration: float, *, again: bool = False) -> None:
        """Drop what was written after `iteration`, so that a resumed run repeats it once.

        `again`: the metrics of `iteration` too, since they will be logged again.
        """
        for path, key in zip(self._paths, (ITERATION, "iteration"), strict=True):
            last = iteration - (again and key == ITERATION)
            if path.exists():
                lines = read_lines(path)
                write_lines(path, (line for line in lines if line.get(key, 0) <= last))

    def finish(self, state: str) -> None:
        """Say how the run ended: `state` is finished, preempted or failed; files are closed."""

    def _append(self, path: Path, lines: Sequence[dict[str, Any]]) -> None:
        with open(path, "a", encoding="utf-8") as file:
            for line in lines:
                file.write(json_line(line))
                file.flush()


class WandbTracker(JsonlTracker):
    """Send the metrics to Weights & Biases too: online when logged in, else offline.

    Waits at most `init_timeout` seconds (times two) for the network, then keeps the run offline.
    Offline files lie in `<folder>/wandb`; `wandb sync` uploads them, `wandb leet` shows them.
    The x axis is progress/iteration: W&B's own step restarts when an offline run is resumed.
    `mode`: null (decide by login), online, offline or disabled. `settings`: of wandb.Settings.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        name: str = "",
        group: str | None = None,
        tags: Sequence[str] = (),
        resume: bool = False,
        keep_transcripts: bool = True,
        project: str = "leash",
        entity: str | None = None,
        mode: str | None = None,
        init_timeout: float = 8.0,
        finish_timeout: float = 60.0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if mode not in (None, "online", "offline", "disabled"):
            raise ValueError(
                f"expected tracker.mode null, online, offline or disabled, got {mode!r}"
            )
        super().__init__(folder, resume=resume, keep_transcripts=keep_transcripts)
        self._run: Any = None
        about = {
            "project": project,
            "entity": entity,
            "name": redact_text(name)[:128] or None,
            "group": group and redact_text(group)[:128],
            "tags": [redact_text(tag)[:64] for tag in tags if tag],
            "config": redact(dict(config or {})),
            "job_type": "train",
            "dir": str(self.folder),
            "id": self._run_id(),
            "resume": "allow",
        }
        extra = {"init_timeout": init_timeout, "finish_timeout": finish_timeout, **(settings or {})}
        self._safely("start", lambda: self._start(about, mode, extra))

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        super().log(metrics, iteration)
        if self._run is not None:
            line = {name: float(value) for name, value in metrics.items()}
            self._safely("log to", lambda: self._run.log({**line, ITERATION: iteration}))

    def finish(self, state: str) -> None:
        super().finish(state)
        run, code = self._run, int(state == "failed")
        if run is not None:
            self._safely("finish", lambda: run.finish(exit_code=code))
        self._run = None

    def _start(self, about: dict[str, Any], mode: Any, extra: dict[str, Any]) -> None:
        import wandb

        quiet = {"silent": True, "quiet": True, "console": "off", "save_code": False}
        hide_command = redact(sys.argv) != sys.argv  # W&B's metadata holds the command line
        settings = wandb.Settings(**{**quiet, "x_disable_meta": hide_command, **extra})
        wandb.setup(settings=wandb.Settings(silent=True, quiet=True))
        mode = mode or os.environ.get("WANDB_MODE")
        reason = "offline as asked"
        if mode is None:
            logged_in = wandb.login(prompt=False, verify=False)  # a prompt would wait for ever
            mode, reason = ("online", "") if logged_in else ("offline", "not logged in")
        if mode == "online":
            try:
                self._run = wandb.init(mode="online", settings=settings, **about)
            except Exception as error:  # no network, a wrong key, no such project: kept offline
                mode, reason = "offline", f"no connection ({_first_line(error)})"
                wandb.teardown()  # else its service still holds the run id
        if self._run is None:
            self._run = wandb.init(mode=mode, settings=settings, **about)
        self._run.define_metric(ITERATION)
        self._run.define_metric("*", step_metric=ITERATION)
        if mode == "offline":
            pattern = self.folder / "wandb" / "offline-run-*"
            log.warning("W&B: %s. Upload this run later with: wandb sync %s", reason, pattern)

    def _safely(self, verb: str, action: Callable[[], Any]) -> None:
        """Run a W&B call; when it fails, warn once and go on without W&B."""
        try:
            action()
        except Exception as error:  # a tracker must never end a training run
            self._run = None
            log.warning(
                "W&B: could not %s the run (%s); going on with %s alone",
                verb,
                _first_line(error),
                self._paths[0],
            )

    def _run_id(self) -> str:
        """Return the id in wandb_id.txt, made on the first start, so that a resume continues it."""
        path = self.folder / "wandb_id.txt"
        if not path.exists():
            write_text(path, secrets.token_hex(4) + "\n")
        return path.read_text().strip()


def _plain(value: Any, name: str = "") -> float | None:
    """Return a JSON number: int stays int, a 0-d tensor becomes float, not finite becomes None."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return number(value)
    raise ValueError(f"expected a number for metric {name!r}, got {value!r}: log no text here")


def _finite(item: Any) -> Any:
    """Replace every float that is not finite by None, at any depth."""
    if isinstance(item, dict):
        return {key: _finite(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return [_finite(value) for value in item]
    return number(item) if isinstance(item, float) else item


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__
