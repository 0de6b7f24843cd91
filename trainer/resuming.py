"""What a run has done so far, and how it goes on from its newest sound checkpoint."""

from dataclasses import dataclass, fields
from typing import Any


@dataclass
class Progress:
    """What has been done so far; all of it goes into a checkpoint."""

    iteration: int = 0
    tokens: int = 0
    samples: int = 0
    objective: float | None = None
    unevaluated: dict[str, float] | None = None  # metrics whose evaluation a stop cut off
    seconds: float = 0.0  # of wall time, those before a resume included


def restore_run(loop: Any) -> None:
    """Go back to the newest checkpoint that verifies; without any, to the start."""
    newest = loop.checkpoints.newest()
    if newest is not None:
        _restore(loop, loop.checkpoints.restore(newest))
    if (done := loop.progress.iteration) > loop.num_iterations:
        raise ValueError(
            f"expected a checkpoint of at most trainer.num_iterations={loop.num_iterations}, "
            f"got {newest}; give a larger number, or move it away"
        )
    skipped = ", ".join(loop.checkpoints.skipped)
    text = f"from iteration {done}{f', skipped damaged {skipped}' if skipped else ''}"
    text = text if newest else "from iteration 0, there is no checkpoint"
    if done and (judge := loop.evaluate.efficiency) and not judge.known():
        text += "; no kl/efficiency: eval.limit samples before training; "
        text += f"python -m trainer.reports {loop.runtime.folder} --limit"
    loop.runtime.status["resumed"] = text
    again = done == 0 or loop.progress.unevaluated is not None
    loop.observers.resume(done, text, again=again, seconds=loop.progress.seconds)


def _restore(loop: Any, state: dict[str, Any]) -> None:
    """Take up what a checkpoint says of a run; another reference or other data is an error."""
    if state["reference"] != loop.retrieve_kl.sha256:
        raise ValueError(
            f"expected the reference {state['reference'][:12]} of this run, got "
            f"{loop.retrieve_kl.sha256[:12]}; put the old model back, or start a new run"
        )
    for key, sha in state.get("data", {}).items():
        if loop.data.get(key, sha) != sha:
            raise ValueError(
                f"expected the data of {key} that this run began with ({sha[:12]}), got other "
                f"({loop.data[key][:12]}); put the old file back, or start a new run"
            )
    loop.update.load_state_dict(state["update"])
    loop.leash.controller.load_state_dict(state["kl"])
    if loop.enough and "enough" in state:
        loop.enough.load_state_dict(state["enough"])
        if loop.enough.ended:  # but the final model was not written
            loop.num_iterations = state["iteration"]
            loop.runtime.write_status(ended=loop.enough.ended)
    names = [part.name for part in fields(Progress)]
    loop.progress = Progress(**{name: state[name] for name in names if name in state})
    loop.runtime.started -= loop.progress.seconds
    loop.policy.version = state.get("version", loop.progress.iteration)
