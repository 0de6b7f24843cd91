"""The progress of a run, parts with a state of their own, and the resume from a checkpoint."""

from collections.abc import Mapping
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
        state = loop.checkpoints.restore(newest)
        _restore(loop, state)
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
    """Load a checkpoint's state into the run; another reference or other files are an error."""
    pairs = [("the reference", state["reference"], loop.retrieve_kl.sha256)]
    for key, sha in state["inputs"].items():
        got = loop.inputs.get(key, sha)
        if not key.endswith("_target_"):
            pairs.append((f"the files of {key}", sha, got))
        elif got != sha:
            loop.observers.say(f"note     the code of {key} has changed since this run began")
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
    for name, part in loop.parts.items():
        if name in state["parts"]:  # an observer may have been added
            part.load_state_dict(state["parts"][name])
    names = [part.name for part in fields(Progress)]
    loop.progress = Progress(**{name: state[name] for name in names if name in state})
    loop.runtime.started -= loop.progress.seconds
    loop.policy.version = state.get("version", loop.progress.iteration)


def stateful(
    named: Mapping[str, Mapping[str, Any]],
    observed: Mapping[str, Any],
    algorithm: Mapping[str, Any],
    *,
    task: Any,
    observers: Any,
) -> dict[str, Any]:
    """Return the parts that have state_dict() and load_state_dict(), by their configuration keys.

    `named`: parts by name, by section; `observed`: the nodes of `observers`, the first of its
    `each`; `algorithm`: the parts of that section.
    """
    own = zip([k for k, v in observed.items() if v], getattr(observers, "each", ()), strict=False)
    sections = {**named, "algorithm": algorithm, "observers": dict(own)}
    sections["env.rewards"] = getattr(task, "functions", {})
    found = {f"{key}.{name}": part for key, each in sections.items() for name, part in each.items()}
    found["env.task"] = getattr(task, "task", task)
    both = ("state_dict", "load_state_dict")
    return {key: part for key, part in found.items() if all(hasattr(part, name) for name in both)}
