"""Weights & Biases: metrics, a table of responses and alerts; online when logged in, else offline.

The x axis is progress/iteration: W&B's own step restarts when an offline run is resumed.
"""

import logging
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trainer.pages.trackers.mirror import Mirror, first_line
from trainer.runs.redact import redact
from trainer.runs.run_files import ITERATION, read_lines

log = logging.getLogger(__name__)

COLUMNS = ("iteration", "kind", "prompt", "answer", "response", "reward", "parts", "advantage")
COLUMNS += ("kl", "truncated")
# Argument of wandb.init -> variable of W&B that overrides it.
VARIABLES = {name: f"WANDB_{name.upper()}" for name in ("name", "project", "entity", "tags")}
VARIABLES |= {"notes": "WANDB_NOTES", "group": "WANDB_RUN_GROUP", "job_type": "WANDB_JOB_TYPE"}


class WandbTracker(Mirror):
    """Also send a run to Weights & Biases.

    Waits `init_timeout` seconds for a server, then keeps the run offline.
    Offline files are in `<folder>/wandb`; `wandb sync` uploads them, `wandb leet` shows them.
    `mode`: null (decide by login), online, offline or disabled. `table_every`: iterations between
    parts of the table of responses (W&B shows the latest 100 parts); 0 sends no responses.
    `settings`: arguments of wandb.Settings.
    """

    word = "wandb"

    def __init__(
        self,
        folder: str,
        *,
        project: str = "leash",
        entity: str | None = None,
        notes: str | None = None,
        mode: str | None = None,
        init_timeout: float = 8.0,
        finish_timeout: float = 60.0,
        table_every: int = 10,
        settings: Mapping[str, Any] | None = None,
        **about: Any,
    ) -> None:
        self._place = {"project": project, "entity": entity, "notes": notes}
        self._mode, self._table_every = mode, table_every
        quiet = {"silent": True, "quiet": True, "console": "off", "save_code": False}
        timeouts = {"init_timeout": init_timeout, "finish_timeout": finish_timeout}
        self._settings = {**quiet, **timeouts, **(settings or {})}
        self._run: Any = None
        self._table: Any = None
        self._rows: list[dict[str, Any]] = []  # responses not yet in a part of the table
        self._table_at = 0  # iteration of the latest part of the table
        super().__init__(folder, **about)

    def _start(self) -> None:
        # Without a server, W&B's error reports would delay the end of the process.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        # Tables for `wandb sync` are kept in the run folder, not in the home.
        os.environ.setdefault("WANDB_DATA_DIR", str(self.folder / "wandb" / "data"))
        import wandb

        hidden = redact(sys.argv) != sys.argv  # the metadata contain the command line
        settings = wandb.Settings(x_disable_meta=hidden, **self._settings)
        wandb.setup(settings=wandb.Settings(silent=True, quiet=True))
        about = {**self.about, **self._place, "dir": str(self.folder)}
        about = {k: v for k, v in about.items() if not os.environ.get(VARIABLES.get(k, ""))}
        start = partial(wandb.init, settings=settings, id=self.run_id(), resume="allow", **about)
        mode, reason = self._mode or os.environ.get("WANDB_MODE"), ""
        if mode is None and (reason := _not_logged_in()):
            mode = "offline"
        elif mode in (None, "online"):
            try:
                self._run = start(mode="online")
            except Exception as error:  # no network, wrong key or project: stay offline
                mode, reason = "offline", f"no connection ({first_line(error)})"
                wandb.teardown()  # else W&B's service process keeps the run id
        if self._run is None:
            self._run = start(mode=mode)
        self._run.define_metric(ITERATION)
        self._run.define_metric("*", step_metric=ITERATION)
        self.hint = self._run.url or ""
        if self._run.offline:
            self.hint = f"offline; upload it with: wandb sync {Path(self._run.dir).parent}"
        if reason:
            log.warning("wandb: %s; the run is kept offline, to be uploaded later", reason)
        if self.first is not None and not self._run.resumed:  # offline: log the past again
            self._rows = read_lines(self.transcripts) if self._table_every else []
            for line in read_lines(self.metrics):
                self._run.log({name: value for name, value in line.items() if value is not None})

    def _log(self, line: dict[str, float], iteration: int) -> None:
        due = self._rows and iteration >= self._table_at + self._table_every
        self._run.log({**line, **self._part(iteration)} if due else line)

    def _show(self, rows: list[dict[str, Any]], iteration: int) -> None:
        self._rows += rows if self._table_every else []

    def _alert(self, title: str, text: str, error: bool) -> None:
        self._run.alert(title=title[:63], text=text, level="ERROR" if error else "WARN")

    def _stop(self, state: str) -> None:
        if self._rows:
            last = self._rows[-1]["iteration"]
            self._run.log({**self._part(last), ITERATION: last})
        self._run.finish(exit_code=int(state == "failed"))

    def _part(self, iteration: int) -> dict[str, Any]:
        """Return the next part of the table: the responses since the previous part."""
        import wandb

        self._table_at = iteration
        if self._table is None:
            how = {"log_mode": "INCREMENTAL", "allow_mixed_types": True}
            self._table = wandb.Table(columns=list(COLUMNS), **how)
        for row in self._rows:
            parts = ", ".join(f"{k} {v:g}" for k, v in (row.get("parts") or {}).items())
            self._table.add_data(*({**row, "parts": parts}.get(name) for name in COLUMNS))
        self._rows = []
        return {"transcripts": self._table}


def _not_logged_in() -> str:
    """Return why W&B is not logged in, "" if it is."""
    import wandb

    try:  # wandb.login could prompt and block forever
        return "" if wandb.login(prompt=False, verify=False) else "not logged in"
    except (ValueError, wandb.Error) as error:  # an invalid key
        return f"not logged in ({first_line(error)})"
