"""MLflow, Comet, Aim, SwanLab and what else accelerate.tracking can log to.

Their packages are imported by Accelerate, and here none of them. Left out on purpose: tables of
replies and alerts, which each of them does in a way of its own.
"""

import logging
from collections.abc import Mapping
from importlib import import_module
from inspect import signature
from typing import Any

from policies.cache import write_text
from trainer.reports.trackers.mirror import Mirror


class AccelerateTracker(Mirror):
    """Send metrics and configuration to the service `kind` of accelerate.tracking too.

    `options` are arguments of Accelerate's class for it; its account is the one that its own
    variables or login name. MLflow goes on with its run after a resume; others begin a new one.
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
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        if kind not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            raise ValueError(f"expected tracker.kind in {known}, got {kind!r}")
        self.word, self._project = kind, project
        self._make, self._options = LOGGER_TYPE_TO_CLASS[kind], dict(options or {})
        self._tracker: Any = None
        super().__init__(folder, **about)

    def _start(self) -> None:
        takes = signature(self._make.__init__).parameters
        # What Accelerate calls run_name is the project of most of them.
        project, name = self._project, self.about["name"]
        given: dict[str, Any] = {"run_name": project}
        given |= {
            "mlflow": {"experiment_name": project, "run_name": name, "run_id": self._known_run()},
            "aim": {"run_name": name, "experiment": project},
            "swanlab": {"experiment_name": name},
            "clearml": {"task_name": name},
        }.get(self.word, {})
        if "logging_dir" in takes and self._make.requires_logging_directory:
            given["logging_dir"] = str(self.folder / self.word)
        if self.word == "mlflow":
            logging.getLogger("alembic").setLevel(logging.WARNING)  # a line for each of its tables
        self._tracker = self._make(**{**given, **self._options})
        if hasattr(self._tracker, "start"):  # older ones start when made
            self._tracker.start()
        if self.word != "mlflow" or not self._known_run():  # it lets no parameter change
            self._tracker.store_init_configuration(_flat(self.about["config"]))
        self.hint = "look at it with: mlflow ui" if self.word == "mlflow" else ""
        if (run := getattr(self._tracker.tracker, "info", None)) is not None:
            write_text(self.folder / f"{self.word}_id.txt", f"{run.run_id}\n")
            about = {name: self.about[name] for name in ("group", "job_type") if self.about[name]}
            import_module(self.word).set_tags({**about, "tags": ", ".join(self.about["tags"])})

    def _known_run(self) -> str | None:
        path = self.folder / f"{self.word}_id.txt"
        return (path.read_text().strip() or None) if path.is_file() else None

    def _log(self, line: dict[str, float], iteration: int) -> None:
        named = {name.replace("@", "_at_"): value for name, value in line.items()}  # of MLflow
        self._tracker.log(named, step=iteration)

    def _stop(self, state: str) -> None:
        self._tracker.finish()


def _flat(node: Any, prefix: str = "") -> dict[str, str | int | float | bool]:
    """Return a configuration as a table with dots, of what every service takes.

    >>> _flat({"kl": {"coeff": 0.1, "end": None}, "stop": ["a"]})
    {'kl.coeff': 0.1, 'kl.end': 'null', 'stop': "['a']"}
    """
    if not isinstance(node, Mapping):
        plain = isinstance(node, str | int | float | bool)
        return {prefix: node if plain else "null" if node is None else str(node)}
    out: dict[str, str | int | float | bool] = {}
    for key, value in node.items():
        out |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return out
