"""Progress of a run, and its resume from a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from policies.contents import INPUTS, changed_inputs


@dataclass
class Progress:
    """Counters of a run, saved in its checkpoints."""

    iteration: int = 0
    tokens: int = 0
    samples: int = 0
    objective: float | None = None
    unevaluated: dict[str, float] | None = None  # metrics whose evaluation was stopped
    seconds: float = 0.0  # wall time, including the time before a resume


def restore_run(loop: Any) -> None:
    """Restore the newest checkpoint that verifies, or start from iteration 0."""
    newest, text = loop.checkpoints.newest(), "from iteration 0, there is no checkpoint"
    if newest is not None:
        state = loop.checkpoints.restore(newest)
        _restore(loop, state)
        text = f"from iteration {loop.progress.iteration}"
        if skipped := loop.checkpoints.skipped:
            text += f", skipped damaged {', '.join(skipped)}"
    done = loop.progress.iteration
    loop.runtime.status["resumed"] = text
    again = done == 0 or loop.progress.unevaluated is not None
    loop.observers.resume(done, text, again=again, seconds=loop.progress.seconds)


def _restore(loop: Any, state: dict[str, Any]) -> None:
    """Load a checkpoint's state; raise ValueError if the reference or an input has changed."""
    pairs = [("the reference", state["reference"], loop.retrieve_kl.sha256)]
    before, now = _by_label(state.get("teacher", "")), _by_label(loop.teacher.sha256)
    pairs += [(label, before.get(label, "none"), now.get(label, "none")) for label in before | now]
    for key, label in changed_inputs(state["inputs"], loop.inputs).items():
        if key.rpartition(".")[2] in INPUTS:
            pairs.append((label, state["inputs"].get(key, "none"), loop.inputs.get(key, "none")))
        else:
            loop.observers.say(f"note     {label} changed since this run began")
    for label, expected, got in pairs:
        if got != expected:
            raise ValueError(
                f"expected {label} that this run began with ({expected[:12]}), got another "
                f"({got[:12]}); put the old one back, or start a new run"
            )
    loop.update.load_state_dict(state["update"])
    for each in loop.update.leash.each:
        each.controller.load_state_dict(state[each.names.loss])
    loop.early_stopping.load_state_dict(state["early_stopping"])
    if loop.early_stopping.ended:  # stopped before the final model was written
        loop.num_iterations = state["iteration"]
        loop.runtime.write_status(ended=loop.early_stopping.ended)
    for name, part in loop.parts.items():
        if name in state["parts"]:  # an observer may have been added
            part.load_state_dict(state["parts"][name])
    names = [part.name for part in fields(Progress)]
    loop.progress = Progress(**{name: state[name] for name in names if name in state})
    loop.runtime.started -= loop.progress.seconds
    loop.policy.version = state.get("version", loop.progress.iteration)


def _by_label(sha256: str | dict[str, str]) -> dict[str, str]:
    """Return the hash of the teacher, or of each of several, by its label in a message."""
    if isinstance(sha256, dict):
        return {f"the teacher {name}": each for name, each in sha256.items()}
    return {"the teacher": sha256}


def stateful_parts(
    named: Mapping[str, Mapping[str, Any]],
    observed: Mapping[str, Any],
    algorithm: Mapping[str, Any],
    *,
    task: Any,
    observers: Any,
) -> dict[str, Any]:
    """Return the parts with state_dict() and load_state_dict(), by configuration key.

    `named`: parts by section and name. `observed`: nodes of the user's observers, with which
    `observers.each` begins. `algorithm`: parts of the section algorithm.
    """
    keyed = zip([k for k, v in observed.items() if v], getattr(observers, "each", ()), strict=False)
    sections = {**named, "algorithm": algorithm, "observers": dict(keyed)}
    sections["env.rewards"] = getattr(task, "functions", {})
    parts = {f"{key}.{name}": part for key, each in sections.items() for name, part in each.items()}
    parts["env.task"] = getattr(task, "task", task)
    both = ("state_dict", "load_state_dict")
    return {key: part for key, part in parts.items() if all(hasattr(part, name) for name in both)}
