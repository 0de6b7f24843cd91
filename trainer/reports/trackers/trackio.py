"""Trackio: a run in its local database; `trackio show` draws it.

Trackio (`pip install -e '.[trackio]'`) is imported here only. TRACKIO_DIR says where the database
is (default: beside the hub's cache), TRACKIO_SPACE_ID sends the run to a Hugging Face Space.
"""

from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from trainer.reports.trackers.mirror import Mirror


class TrackioTracker(Mirror):
    """Send a run to Trackio too, under its name and an id that a resume keeps.

    After a resume Trackio has the repeated iterations twice.
    """

    word = "trackio"

    def __init__(self, folder: str, *, project: str = "leash", **about: Any) -> None:
        self._project = project
        self._run: Any = None
        super().__init__(folder, **about)
        self.hint = f"look at it with: trackio show --project {project}"

    def _start(self) -> None:
        import trackio

        about = {key: self.about[key] for key in ("group", "config")}
        about["config"] |= {key: self.about[key] for key in ("tags", "job_type")}
        name = "-".join(filter(None, [self.about["name"], self.run_id()]))
        with redirect_stdout(StringIO()):  # it greets in six lines
            self._run = trackio.init(
                project=self._project,
                name=name,
                resume="allow",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
                **about,
            )

    def _log(self, line: dict[str, float], iteration: int) -> None:
        self._run.log(line, step=iteration)

    def _show(self, rows: list[dict[str, Any]], iteration: int) -> None:
        import trackio

        flat = [{k: v for k, v in r.items() if not isinstance(v, (list, dict))} for r in rows]
        self._run.log({"transcripts": trackio.Table(data=flat)}, step=iteration)

    def _alert(self, title: str, text: str, error: bool) -> None:
        import trackio

        with redirect_stdout(StringIO()):  # the display has said it
            level = trackio.AlertLevel.ERROR if error else trackio.AlertLevel.WARN
            self._run.alert(title=title, text=text, level=level)

    def _stop(self, state: str) -> None:
        import trackio

        with redirect_stdout(StringIO()):
            trackio.finish()
