"""The progress of a run, and how the run resumes from its newest sound checkpoint."""

from dataclasses import dataclass, fields
from typing import Any


@dataclass
class Progress:
    """What has been done so far; all of it is saved in a checkpoint."""

    iteration: int = 0
    tokens: int = 0
    samples: int = 0
    objective: float | None = None
    unevaluated: dict[str, float] | None = None  # metrics whose evaluation a stop cut off
    seconds: float = 0.0  # of wall time, those before a resume included


def restore_run(loop: Any) -> None:
    """Restore the newest checkpoint that verifies; without any, begin at the start."""
    newest, text = loop.checkpoints.newest(), "from iteration 0, there is no checkpoint"
    if newest is not None:
        try:
            _restore(loop, loop.checkpoints.restore(newest))
        except KeyError as lost:
            fault = f"its state.json has no {lost}; move it away"
            raise ValueError(f"{newest} is damaged: {fault}") from lost
        text = f"from iteration {loop.progress.iteration}"
        if skipped := loop.checkpoints.skipped:
            text += f", skipped damaged {', '.join(skipped)}"
    done = loop.progress.iteration
    if done > loop.num_iterations:
        raise ValueError(f"expected trainer.num_iterations >= {done} of {newest}, give more")
    loop.runtime.status["resumed"] = text
    again = done == 0 or loop.progress.unevaluated is not None
    loop.observers.resume(done, text, again=again, seconds=loop.progress.seconds)


def _restore(loop: Any, state: dict[str, Any]) -> None:
    """Load a checkpoint's state into the run; another reference or other data is an error."""
    pairs = [("the reference", state["reference"], loop.retrieve_kl.sha256)]
    for key, sha in state.get("data", {}).items():
        pairs.append((f"the data of {key}", sha, loop.data.get(key, sha)))
    for what, expected, got in pairs:
        if got != expected:
            raise ValueError(
                f"expected {what} that this run began with ({expected[:12]}), got another "
                f"({got[:12]}); put the old one back, or start a new run"
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
