"""Which of a run's weights a mode works on, and how they get into its policy."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies import lora
from policies.cache import read_manifest
from trainer.runs.run_files import dig, load_run, number
from trainer.trainer import Trainer


@dataclass(frozen=True)
class Weights:
    """A folder with model/ in it (or, of a checkpoint with LoRA, adapter/) and what it is."""

    folder: Path
    kind: str  # "the final model"
    run: str  # its folder, "" where no run trained it
    iteration: int | None = None
    objective: float | None = None

    @property
    def short(self) -> str:
        """Say what it is, but not where: "the final model, iteration 80"."""
        return f"{self.kind}{self._when}"

    @property
    def what(self) -> str:
        """Say what it is: "the final model of <run>, iteration 80"."""
        return f"{self.kind} of {self.run}{self._when}" if self.run else self.kind

    @property
    def _when(self) -> str:
        score = "" if self.objective is None else f" (objective {self.objective:.4g})"
        return "" if self.iteration is None else f", iteration {self.iteration}{score}"


def choose(folder: Path, *, keep_best: bool = False) -> Weights:
    """Return the weights that a run is judged by; without any a ValueError.

    With `keep_best` the checkpoint with the best objective (the first of equals), if one has any;
    else the final model of a finished run, else the newest checkpoint that verifies.
    """
    run = load_run(folder)
    saved = [p for p in sorted((folder / "checkpoints").glob("iteration_*")) if _is_sound(p)]
    scores = {path: number(_state(path).get("objective")) for path in saved}
    scored = {path: score for path, score in scores.items() if score is not None}
    if keep_best and scored:
        best = max(scored, key=scored.__getitem__)
        score = scored[best]
        return Weights(best, "the best checkpoint", str(folder), _iteration(best), score)
    if run.status.get("state") == "finished" and (folder / "model").is_dir():
        return Weights(folder, "the final model", str(folder), run.status["iteration"])
    if saved:
        newest = saved[-1]
        return Weights(newest, "the newest checkpoint", str(folder), _iteration(newest))
    raise ValueError(
        f"expected a checkpoint or a final model in {folder}, got none: the run "
        f"{'is' if run.state == 'running' else 'ended as'} {run.state}; finish it with "
        f"resume={folder}, or set checkpoint.every in a new one"
    )


def take(loop: Trainer, settings: dict[str, Any]) -> Weights:
    """Load the weights of the run that is resumed into the policy; return what they are.

    Without one the policy is the model that policy.model names. What it is compared with must be
    the model that training started from, or one that is named.
    """
    found: Any = loop.policy.found
    if settings["resume"] is None:
        return Weights(found.folder, f"the model {settings['policy']['model']}", run="")
    started = dig(load_run(settings["resume"]).status, "model", "sha256")
    compares = settings["kl"]["measure"] and settings["kl"]["reference"] is None
    if compares and started not in (None, found.sha256):
        raise ValueError(
            f"expected the model {started[:12]} that the run started from in {found.folder}, got "
            f"{found.sha256[:12]}; put the old one back, or give kl.reference=<model>"
        )
    best = bool(dig(settings, "checkpoint", "keep_best"))
    chosen = choose(Path(settings["resume"]), keep_best=best)
    loop.checkpoints.load_weights(chosen.folder)
    return chosen


def reference_name(loop: Trainer, settings: dict[str, Any]) -> str:
    """Say what the policy is compared with."""
    if named := dig(settings, "kl", "reference"):
        return named
    start = ", which training started from" if settings["resume"] else ""
    adapter = " (the adapter off)" if lora.has_adapter(loop.policy.model) else ""
    return f"{settings['policy']['model']}{start}{adapter}"


def _is_sound(folder: Path) -> bool:
    return read_manifest(folder, full=True) is not None


def _state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "state.json").read_text())


def _iteration(folder: Path) -> int:
    return int(folder.name.rpartition("_")[2])
