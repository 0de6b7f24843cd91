"""Choose the weights of a run for a mode and load them into its policy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.contents import changed_inputs
from policies.models.find import has_adapter
from trainer.checkpoint import list_checkpoints, read_state
from trainer.runs.discover import missing_weights
from trainer.runs.run_files import dig, number, read_status, read_yaml
from trainer.trainer import Trainer
from trainer.weight_sync import push_weights


@dataclass(frozen=True)
class Weights:
    """A folder with model/ (adapter/ in a LoRA checkpoint) and a description of its weights."""

    folder: Path
    kind: str  # for example "the final model"
    run: str  # folder of the run that trained it, or ""
    iteration: int | None = None

    @property
    def short(self) -> str:
        """Describe the weights without their folder: "the final model, iteration 80"."""
        return self.kind + ("" if self.iteration is None else f", iteration {self.iteration}")

    @property
    def label(self) -> str:
        """Describe the weights: "the final model, iteration 80, of <run>"."""
        return f"{self.short}, of {self.run}" if self.run else self.kind


def choose_weights(folder: Path, *, keep_best: bool = False) -> Weights:
    """Return the weights of a run to evaluate.

    If `keep_best`, the first checkpoint with the best objective, if one has an objective. Otherwise
    the first that exists of: the final model of a finished run, the newest checkpoint that
    verifies, a model/ of an earlier end of the run. Raise ValueError if the run has no weights.
    """
    status, place = read_status(folder), str(folder)
    final = Weights(folder, "the final model", place, status.get("iteration"))
    finished = status.get("state") == "finished" and (folder / "model").is_dir()
    if finished and not keep_best:
        return final
    states = {path: read_state(path) for path in list_checkpoints(folder / "checkpoints")}
    states = {path: state for path, state in states.items() if state}
    scored = [p for p, state in states.items() if number(state.get("objective")) is not None]
    if keep_best and scored:
        best = max(scored, key=lambda path: states[path]["objective"])
        return Weights(best, "the best checkpoint", place, states[best]["iteration"])
    if finished:
        return final
    if states:
        newest = [*states][-1]
        return Weights(newest, "the newest checkpoint", place, states[newest]["iteration"])
    if (folder / "model").is_dir():  # finished before, then a longer run was refused
        return Weights(folder, "the model of its last end", place)
    raise ValueError(missing_weights(folder))


def take_weights(loop: Trainer, settings: dict[str, Any]) -> Weights:
    """Load the weights of the resumed run, if any, into the policy; return their description.

    The reference must be the model that training started from, or kl.reference must name one.
    """
    files = loop.policy.files
    if settings["resume"] is None:
        push_weights(loop.policy, loop.generator)
        return Weights(files.folder, f"the model {settings['policy']['model']}", run="")
    folder = Path(settings["resume"])
    started = dig(read_status(folder), "model", "sha256")
    compares = settings["kl"]["measure"] and settings["kl"]["reference"] is None
    if compares and started not in (None, files.sha256):
        got = f"{files.sha256[:12]} in {files.folder}; put the old one back, or give kl.reference="
        raise ValueError(f"expected the model {started[:12]} that the run started from, got {got}")
    saved = read_yaml(folder / "config.yaml")
    for key, label in changed_inputs(read_status(folder).get("inputs", {}), loop.inputs).items():
        if dig(saved, *key.split(".")) == dig(settings, *key.split(".")):  # the user did not set it
            loop.observers.say(f"note     {label} changed since this run trained")
    chosen = choose_weights(folder, keep_best=bool(dig(settings, "checkpoint", "keep_best")))
    loop.checkpoints.restore_weights(chosen.folder)
    push_weights(loop.policy, loop.generator)
    return chosen


def reference_name(loop: Trainer, settings: dict[str, Any]) -> str:
    """Describe the reference model."""
    if named := dig(settings, "kl", "reference"):
        return named
    start = ", which training started from" if settings["resume"] else ""
    adapter = " (the adapter off)" if has_adapter(loop.policy.model) else ""
    return f"{settings['policy']['model']}{start}{adapter}"
