"""Checkpoints: safetensors and JSON only, complete or absent, verified before they are believed.

A checkpoint is written under a temporary name, every file is synced and listed with its sha256 in
MANIFEST.json, and the folder is renamed into place. The newest one that verifies counts.

    checkpoints/iteration_000040/ model/ optimizer.safetensors state.json MANIFEST.json

A critic goes into critic.safetensors beside the model, which stays an ordinary one; a reference
that has followed the policy into reference.safetensors; tensors of other parts into
parts.safetensors. A policy with LoRA has adapter/, in peft's
format, in place of model/: the weights under it never change.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from policies.cache import flush, read_manifest, write_manifest
from policies.protocols import Policy
from policies.scorer import placement_of
from policies.weights import weights_of
from trainer.reference import NoReference, Reference
from trainer.runtime import Runtime, check_agreement

FORMAT = 1
CRITIC = "critic.safetensors"
REFERENCE = "reference.safetensors"
PARTS = "parts.safetensors"


class Checkpoints:
    """Save and find the checkpoints of a run folder."""

    def __init__(
        self,
        runtime: Runtime,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 0,
        keep_last: int = 2,
        keep_best: bool = False,
        reference: Reference | NoReference | None = None,
    ) -> None:
        self.runtime, self.policy, self.optimizer = runtime, policy, optimizer
        self.reference = reference or NoReference()
        self.every, self.keep_last, self.keep_best = every, keep_last, keep_best
        self.folder = runtime.folder / "checkpoints"
        self.last: int | None = None  # iterations done in the one that was saved or restored last
        self.skipped: list[str] = []  # damaged ones that `newest` passed over

    def maybe_save(self, iteration: int, state: dict[str, Any], *, last: bool = False) -> None:
        """Save after every `every` iterations and the last."""
        if self.every and (last or iteration % self.every == 0):
            self.save(iteration, state)

    def save(self, iteration: int, state: dict[str, Any]) -> None:
        """Write the checkpoint of `iteration` finished iterations, if the ranks still agree."""
        check_agreement(self.policy.scorer, self.runtime, iteration=iteration)
        main = self.runtime.is_main
        moments = self._moments(here=main)
        theirs = placement_of(self.reference).plain(fill=main)
        with self.policy.scorer.placement.plain(fill=main), theirs:
            self.runtime.at("save")
            if main:
                self._write(iteration, state, moments)
        self.last = iteration
        self.runtime.accelerator.wait_for_everyone()

    def _write(self, iteration: int, state: dict[str, Any], moments: dict[str, Tensor]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in (*self.folder.glob(".part-*"), *self.folder.glob(".trash-*")):
            remove(leftover)  # of an interrupted save or removal
        target = self.folder / f"iteration_{iteration:06d}"
        part = self.folder / f".part-{target.name}"
        part.mkdir()
        try:
            weights = weights_of(self.policy.scorer)
            weights.save(part, self.policy.tokenizer, base=base_of(self.policy))
            if critic := self.critic():
                save_file(critic, part / CRITIC)
            if moved := self.reference.state_dict():
                save_file(moved, part / REFERENCE)
            save_file(moments, part / "optimizer.safetensors")
            plain, tensors = split_tensors(state.get("parts", {}))
            content = {"format": FORMAT, "iteration": iteration, **state, "parts": plain}
            if tensors:
                save_file(tensors, part / PARTS)
            (part / "state.json").write_text(json.dumps(content, indent=1))
            write_manifest(part, {"format": FORMAT})
        except BaseException:  # a full disk needs the room for the error
            shutil.rmtree(part, ignore_errors=True)
            raise
        discard(target)
        part.rename(target)
        flush(self.folder)
        self._prune(target)

    def critic(self) -> dict[str, Tensor]:
        """Return the critic's weights that are trained: the others are the frozen policy's."""
        critic = self.policy.scorer.critic
        named = () if critic is None else critic.named_parameters()
        return {name: p.detach() for name, p in named if p.requires_grad}

    def _moments(self, *, here: bool = True) -> dict[str, Tensor]:
        """Return the optimiser's state as named tensors, nothing unless `here`."""
        out, placement = {}, self.policy.scorer.placement
        for name, param in trained_by(self.optimizer, self.policy):
            if state := self.optimizer.state.get(param, {}):
                for key, value in (state | placement.master(name, param)).items():
                    value = torch.as_tensor(value).detach()
                    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                    out |= {f"{name}/{key}": whole.clone().contiguous()} if here else {}
        return out

    def newest(self) -> Path | None:
        """Return the newest checkpoint that verifies, None where there is none at all.

        Rank 0 looks and the others take its choice. Nothing but damaged ones is a ValueError.
        """
        found, damaged = None, []
        for folder in reversed(saved_in(self.folder)) if self.runtime.is_main else ():
            if read_state(folder) is not None:
                found = folder
                break
            damaged.append(folder.name)
        found, self.skipped = self.runtime.gather((found, damaged))[0]
        if found is None and self.skipped:
            names = ", ".join(self.skipped)
            raise ValueError(
                f"{self.folder} has only damaged ones ({names}); restore or remove them"
            )
        return found

    def restore(self, folder: Path) -> dict[str, Any]:
        """Load weights and optimiser from a verified checkpoint; return its state."""
        self.restore_weights(folder, critic=True)
        saved, placement = load_file(folder / "optimizer.safetensors"), self.policy.scorer.placement
        for name, param in trained_by(self.optimizer, self.policy):
            start = f"{name}/"
            found = {k.removeprefix(start): v for k, v in saved.items() if k.startswith(start)}
            if found:
                state = {k: placement.scatter(v, param) for k, v in found.items()}
                for own in placement.master(name, param).values():
                    own.copy_(state.pop("master", own))
                self.optimizer.state[param] = state
        state = json.loads((folder / "state.json").read_text())
        self.last = state["iteration"]
        if (path := folder / PARTS).is_file():
            for key, value in load_file(path).items():
                name, _, own = key.partition("/")
                state["parts"][name][own] = value
        return state

    def restore_weights(self, folder: Path, *, critic: bool = False) -> None:
        """Load policy and reference from a checkpoint, the policy also from a finished run."""
        theirs = placement_of(self.reference).plain(keep=True)
        with self.policy.scorer.placement.plain(keep=True), theirs:
            weights_of(self.policy.scorer).load(folder, base=base_of(self.policy))
            if (folder / REFERENCE).is_file():
                self.reference.load_state_dict(load_file(folder / REFERENCE))
            if critic and (mine := self.critic()):
                saved = load_file(folder / CRITIC)
                for name, weight in mine.items():
                    weight.copy_(saved[name])

    def _prune(self, newest: Path) -> None:
        """Keep the last and the best; iterations later than the newest are damaged and go."""
        every = saved_in(self.folder)
        done = every[: every.index(newest) + 1]
        keep = set(done[-self.keep_last :]) if self.keep_last else set(done)
        if self.keep_best:
            keep.add(max(done, key=_score))
        for folder in every:
            if folder not in keep:
                discard(folder)


def split_tensors(parts: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the states of parts without tensors, and the tensors by <part>/<key>.

    TypeError for a state that JSON does not give back as it is.
    """
    plain, tensors = {}, {}
    for name, state in parts.items():
        own = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        tensors |= {
            f"{name}/{key}": v.detach().cpu().clone().contiguous() for key, v in own.items()
        }
        plain[name] = {key: value for key, value in state.items() if key not in own}
        if json.loads(json.dumps(plain[name], default=str)) != plain[name]:
            kinds = "tensors, numbers, texts, lists and dicts with texts as keys"
            raise TypeError(f"{name}.state_dict(): expected {kinds}, got {plain[name]!r:.200}")
    return plain, tensors


def saved_in(folder: Path) -> list[Path]:
    """List what is named like a checkpoint in a folder, the latest iteration last."""
    named = [path for path in folder.glob("*") if re.fullmatch(r"iteration_\d+", path.name)]
    return sorted(named, key=lambda path: int(path.name.removeprefix("iteration_")))


def read_state(folder: Path) -> dict[str, Any] | None:
    """Return the state of a checkpoint that verifies, None of a damaged one."""
    manifest = read_manifest(folder, full=True)
    files = manifest["files"] if manifest else {}
    whole = {"state.json", "optimizer.safetensors"} <= {*files}
    if not whole or not any(re.fullmatch(r"(model|adapter)/.*safetensors", f) for f in files):
        return None
    state = json.loads((folder / "state.json").read_text())
    if (found := state.get("format")) != FORMAT:
        raise ValueError(f"{folder} is of format {found}, this leash reads {FORMAT}; move it away")
    return state if f"iteration_{state.get('iteration', -1):06d}" == folder.name else None


def save_model(policy: Policy, folder: Path, *, here: bool = True) -> None:
    """Write the model and its tokenizer so that transformers and vLLM load them without leash.

    An adapter is merged, and written to adapter/ too, as peft does. One rank writes, `here`.
    """
    with policy.scorer.placement.plain(fill=here):
        if here:
            weights_of(policy.scorer).export(folder, policy.tokenizer, base=base_of(policy))


def base_of(policy: Policy) -> str:
    """Return the sha256 of the weights that a policy started from."""
    return policy.files.sha256 if hasattr(policy, "files") else ""


def discard(folder: Path) -> None:
    """Remove a folder so that no half of it is ever mistaken for a checkpoint."""
    if os.path.lexists(folder):
        trash = folder.with_name(f".trash-{folder.name}")
        folder.rename(trash)
        remove(trash)


def remove(path: Path) -> None:
    """Remove a folder, a file or a link (not what it leads to), if there is one."""
    is_folder = path.is_dir() and not path.is_symlink()
    shutil.rmtree(path) if is_folder else path.unlink(missing_ok=True)


def trained_by(optimizer: torch.optim.Optimizer, policy: Policy):
    """Return (name, parameter) of what the optimiser trains, of the scorer and its critic."""
    names = {id(p): name for name, p in policy.scorer.named_parameters()}
    return [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"]]


def _score(folder: Path) -> float:
    try:
        return float(json.loads((folder / "state.json").read_text())["objective"])
    except (OSError, ValueError, KeyError, TypeError):  # none, or damaged: never the best
        return float("-inf")
