"""Track with the services of accelerate.tracking: TensorBoard, Trackio, MLflow, Comet, Aim ...

Accelerate imports their packages. Not supported: tables of responses and alerts, because every
service has a different API for them.
"""

from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from policies.files import write_text
from trainer.pages.trackers.mirror import Mirror
from trainer.runs.run_files import flatten

MLFLOW_ID = "mlflow_id.txt"  # in the run folder


class AccelerateTracker(Mirror):
    """Also send metrics and configuration to the service `kind` of accelerate.tracking.

    `options`: arguments of Accelerate's class. The account comes from the service's variables or
    login. After a resume MLflow and Trackio continue their run (Trackio then has the repeated
    iterations twice, TensorBoard once); the other services start a new run.
    """

    def __init__(
        self,
        folder: str,
        *,
        kind: str,
        project: str = "leash",
        options: Mapping[str, Any] | None = None,
        **about: Any,
    ) -> None:
        self.word, self._project, self._options = kind, project, dict(options or {})
        self._tracker: Any = None
        super().__init__(folder, **about)

    def _start(self) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        service, continued = LOGGER_TYPE_TO_CLASS[self.word], self._continued()
        named: dict[str, Any] = {"run_name": self._project}  # Accelerate's word for a project
        if self.word == "mlflow":
            tags = {"tags": ", ".join(self.about["tags"])}
            named = {"experiment_name": self._project, "tags": tags}
        elif service.requires_logging_directory:
            named["logging_dir"] = str(self.folder / self.word)
        with redirect_stdout(StringIO()):  # Trackio prints six lines
            self._tracker = service(**(named | continued | self._options))
            if hasattr(self._tracker, "start"):  # older versions start in the constructor
                self._tracker.start()
        if self.first is None or not continued:
            values = {
                key: value if isinstance(value, int | float) else str(value)
                for key, value in flatten(self.about["config"])
                if key
            }  # values have types that every service takes
            self._tracker.store_init_configuration(values)
        if self.word == "mlflow":
            write_text(self.folder / MLFLOW_ID, f"{self._tracker.tracker.info.run_id}\n")

    def _continued(self) -> dict[str, Any]:
        """Return the arguments that make a service continue a run, or {} if it cannot."""
        name, ids = self.about["name"], self.folder / MLFLOW_ID
        if self.word == "mlflow":
            return {"run_name": name, "run_id": ids.read_text().strip() if ids.is_file() else None}
        if self.word == "tensorboard":
            return {"purge_step": self.first}
        if self.word == "trackio":
            quiet = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
            named = {"name": f"{name}-{self.run_id()}", "group": self.about["group"]}
            return {**named, **quiet, "resume": "allow"}
        return {}

    def _log(self, line: dict[str, float], iteration: int) -> None:
        named = {name.replace("@", "_at_"): value for name, value in line.items()}  # for MLflow
        self._tracker.log(named, step=iteration)

    def _stop(self, state: str) -> None:
        with redirect_stdout(StringIO()):
            self._tracker.finish()
