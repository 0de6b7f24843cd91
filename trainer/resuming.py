"""How a run goes on: the newest checkpoint that verifies, and what it says of the run so far."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from policies.placement import placement_of
from policies.weights import weights_of
from trainer.checkpoint import (
    CRITIC,
    REFERENCE,
    Checkpoints,
    base_of,
    read_state,
    saved_in,
    trained_by,
)
from trainer.trainer import Progress, Trainer


def resume(loop: Trainer) -> None:
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
    text += f"; {loop.checkpoints.lacks}" if loop.checkpoints.lacks else ""
    text = text if newest else "from iteration 0, there is no checkpoint"
    if done and (judge := loop.evaluate.efficiency) and not judge.known():
        text += "; no kl/efficiency: eval.limit samples before training; "
        text += f"python -m trainer.reports {loop.runtime.folder} --limit"
    loop.runtime.status["resumed"] = text
    again = done == 0 or loop.progress.unevaluated is not None
    loop.observers.resume(done, text, again=again, seconds=loop.progress.seconds)


def _restore(loop: Trainer, state: dict[str, Any]) -> None:
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


def newest(saved_by: Checkpoints) -> Path | None:
    """Return the newest checkpoint that verifies, None where there is none at all.

    Rank 0 looks and the others take its choice. Nothing but damaged ones is a ValueError.
    """
    found, damaged = None, []
    for folder in reversed(saved_in(saved_by.folder)):
        if not saved_by.runtime.is_main:
            break
        if read_state(folder) is not None:
            found = folder
            break
        damaged.append(folder.name)
    found, saved_by.skipped = saved_by.runtime.gather((found, damaged))[0]
    if found is None and saved_by.skipped:
        raise ValueError(
            f"expected a sound checkpoint in {saved_by.folder}, got only damaged ones "
            f"({', '.join(saved_by.skipped)}); put a copy back, or remove them to start over"
        )
    return found


def restore(saved_by: Checkpoints, folder: Path) -> dict[str, Any]:
    """Load weights and optimiser from a verified checkpoint; return its state."""
    if saved_by.runtime.is_main:
        saved_by.clear()
    restore_weights(saved_by, folder, critic=True)
    saved, placement = load_file(folder / "optimizer.safetensors"), saved_by.policy.scorer.placement
    for name, param in trained_by(saved_by.optimizer, saved_by.policy):
        prefix = f"{name}/"
        found = {k[len(prefix) :]: v for k, v in saved.items() if k.startswith(prefix)}
        if found:
            state = {k: placement.scatter(v, param) for k, v in found.items()}
            for own in placement.master(name, param).values():
                own.copy_(state.pop("master", own))
            saved_by.optimizer.state[param] = state
    state = json.loads((folder / "state.json").read_text())
    saved_by.last = state["iteration"]
    if saved_by.ahead is not None:
        saved_by.lacks = saved_by.ahead.restore(folder, state.get("version", saved_by.last))
    return state


def restore_weights(saved_by: Checkpoints, folder: Path, *, critic: bool = False) -> None:
    """Load policy and reference from a checkpoint, the policy also from a finished run."""
    theirs = placement_of(saved_by.reference).plain(keep=True)
    with saved_by.policy.scorer.placement.plain(keep=True), theirs:
        weights_of(saved_by.policy.scorer).load(folder, base=base_of(saved_by.policy))
        if (folder / REFERENCE).is_file():
            saved_by.reference.load_state_dict(load_file(folder / REFERENCE))
        if critic:
            _restore_critic(saved_by, folder / CRITIC)


def _restore_critic(saved_by: Checkpoints, path: Path) -> None:
    if mine := saved_by.critic():
        critic = load_file(path)
        if critic.keys() != mine.keys():
            raise ValueError(f"{path} is another critic's; start a new run")
        for name, weight in mine.items():
            weight.copy_(critic[name])
