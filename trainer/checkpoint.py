"""Checkpoints of safetensors and JSON, written atomically and verified before use.

A checkpoint is written under a temporary name, every file is synced and listed with its sha256 in
MANIFEST.json, and the folder is renamed into place. A resume uses the newest undamaged checkpoint.

    checkpoints/iteration_000040/ model/ optimizer.safetensors state.json MANIFEST.json

Optional files: critic.safetensors (the critic is not in model/), reference.safetensors (a refreshed
reference) and parts.safetensors (tensors from `state_dict()` of tasks, rewards and other parts).
With LoRA, adapter/ in peft's format replaces model/, because the base weights never change. The
names in model/ are those of the model's modules; the published ones are in the final model alone.
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

from policies.files import flush, read_manifest, write_manifest
from policies.load import weights_of
from policies.protocols import Policy
from policies.scorer import placement_of
from trainer.kl.reference import NoReference, Reference
from trainer.runtime import Runtime, check_agreement

FORMAT = 2
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
        on_stop: bool = True,
        reference: Reference | NoReference | None = None,
    ) -> None:
        self.runtime, self.policy, self.optimizer = runtime, policy, optimizer
        self.reference = reference or NoReference()
        self.every, self.on_stop = every, on_stop
        self.keep_last, self.keep_best = keep_last, keep_best
        self.folder = runtime.folder / "checkpoints"
        self.last: int | None = None  # iteration of the last saved or restored checkpoint
        self.skipped: list[str] = []  # damaged checkpoints that `newest` skipped

    def maybe_save(self, iteration: int, state: dict[str, Any], *, last: bool = False) -> None:
        """Save after every `every` iterations and after the last one; never if `every` is 0."""
        if self.every and (last or iteration % self.every == 0):
            self.save(iteration, state)

    def save(self, iteration: int, state: dict[str, Any]) -> None:
        """Write a checkpoint after `iteration`; RuntimeError if the weights of two ranks differ."""
        check_agreement(self.policy.scorer, self.runtime, iteration=iteration)
        main = self.runtime.is_main
        moments = gather_moments(self.optimizer, self.policy, fill=main)
        reference = placement_of(self.reference).full_tensors(fill=main)
        with self.policy.scorer.placement.full_tensors(fill=main), reference:
            self.runtime.set_phase("save")
            if main:
                self._write(iteration, state, moments)
        self.last = iteration
        self.runtime.wait()

    def _write(self, iteration: int, state: dict[str, Any], moments: dict[str, Tensor]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in (*self.folder.glob(".part-*"), *self.folder.glob(".trash-*")):
            remove(leftover)  # an interrupted save or removal left it
        target = self.folder / f"iteration_{iteration:06d}"
        part = self.folder / f".part-{target.name}"
        part.mkdir()
        try:
            weights = weights_of(self.policy.scorer)
            weights.save(part, self.policy.tokenizer, base=base_of(self.policy))
            if critic := self.critic():
                save_file(critic, part / CRITIC)
            if refreshed := self.reference.state_dict():
                save_file(refreshed, part / REFERENCE)
            save_file(moments, part / "optimizer.safetensors")
            values, tensors = split_tensors(state.get("parts", {}))
            content = {"format": FORMAT, "iteration": iteration, **state, "parts": values}
            if tensors:
                save_file(tensors, part / PARTS)
            (part / "state.json").write_text(json.dumps(content, indent=1))
            write_manifest(part, {"format": FORMAT})
        except BaseException:  # frees space: a full disk would lose the error message
            shutil.rmtree(part, ignore_errors=True)
            raise
        discard(target)
        part.rename(target)
        flush(self.folder)
        self._prune(target)

    def critic(self) -> dict[str, Tensor]:
        """Return the critic's trained weights; its frozen weights are the policy's."""
        critic = self.policy.scorer.critic
        named = () if critic is None else critic.named_parameters()
        return {name: p.detach() for name, p in named if p.requires_grad}

    def newest(self) -> Path | None:
        """Return the newest undamaged checkpoint, or None if the folder has no checkpoint.

        Rank 0 decides for all ranks. ValueError if all checkpoints are damaged.
        """
        newest, damaged = None, []
        for folder in reversed(list_checkpoints(self.folder)) if self.runtime.is_main else ():
            if read_state(folder) is not None:
                newest = folder
                break
            damaged.append(folder.name)
        newest, self.skipped = self.runtime.gather((newest, damaged))[0]
        if newest is None and self.skipped:
            names = ", ".join(self.skipped)
            raise ValueError(
                f"{self.folder} has only damaged checkpoints ({names}); restore or remove them"
            )
        return newest

    def restore(self, folder: Path) -> dict[str, Any]:
        """Load weights and optimiser state of an undamaged checkpoint; return the other values."""
        self.restore_weights(folder, critic=True)
        saved, placement = load_file(folder / "optimizer.safetensors"), self.policy.scorer.placement
        for name, param in trained_parameters(self.optimizer, self.policy):
            key = f"{name}/"
            tensors = {k.removeprefix(key): v for k, v in saved.items() if k.startswith(key)}
            if tensors:
                moments = {k: placement.scatter(v, param) for k, v in tensors.items()}
                for master in placement.master(name, param).values():
                    master.copy_(moments.pop("master", master))
                self.optimizer.state[param] = moments
        state = json.loads((folder / "state.json").read_text())
        self.last = state["iteration"]
        if (path := folder / PARTS).is_file():
            for key, value in load_file(path).items():
                part, _, name = key.partition("/")
                state["parts"][part][name] = value
        return state

    def restore_weights(self, folder: Path, *, critic: bool = False) -> None:
        """Load the policy, and the reference if saved, from a checkpoint or a finished run."""
        reference = placement_of(self.reference).full_tensors(keep=True)
        with self.policy.scorer.placement.full_tensors(keep=True), reference:
            weights_of(self.policy.scorer).load(folder, base=base_of(self.policy))
            if (folder / REFERENCE).is_file():
                self.reference.load_state_dict(load_file(folder / REFERENCE))
            if critic and (weights := self.critic()):
                saved = load_file(folder / CRITIC)
                for name, weight in weights.items():
                    weight.copy_(saved[name])

    def _prune(self, newest: Path) -> None:
        """Keep the last and the best; remove all others, and the damaged folders after `newest`."""
        every = list_checkpoints(self.folder)
        done = every[: every.index(newest) + 1]
        keep = set(done[-self.keep_last :]) if self.keep_last else set(done)
        if self.keep_best:
            keep.add(max(done, key=_objective))
        for folder in every:
            if folder not in keep:
                discard(folder)


def split_tensors(parts: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Split the states of parts into plain values, and tensors with names <part>/<key>.

    TypeError if JSON does not restore a plain value exactly.
    """
    values, tensors = {}, {}
    for name, state in parts.items():
        named = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        tensors |= {
            f"{name}/{key}": v.detach().cpu().clone().contiguous() for key, v in named.items()
        }
        values[name] = {key: value for key, value in state.items() if key not in named}
        if json.loads(json.dumps(values[name], default=str)) != values[name]:
            kinds = "tensors, numbers, texts, lists and dicts with texts as keys"
            raise TypeError(f"{name}.state_dict(): expected {kinds}, got {values[name]!r:.200}")
    return values, tensors


def list_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoint folders in the order of their iterations."""
    folders = [path for path in folder.glob("*") if re.fullmatch(r"iteration_\d+", path.name)]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("iteration_")))


def read_state(folder: Path) -> dict[str, Any] | None:
    """Return the state of a checkpoint; None if damaged, ValueError for another FORMAT."""
    manifest = read_manifest(folder, full=True)
    files = manifest["files"] if manifest else {}
    complete = {"state.json", "optimizer.safetensors"} <= {*files}
    if not complete or not any(re.fullmatch(r"(model|adapter)/.*safetensors", f) for f in files):
        return None
    state = json.loads((folder / "state.json").read_text())
    if (version := state.get("format")) != FORMAT:
        raise ValueError(
            f"{folder} is of format {version}, expected {FORMAT}; move the folder away"
        )
    return state if f"iteration_{state.get('iteration', -1):06d}" == folder.name else None


def save_model(policy: Policy, folder: Path, *, write: bool = True) -> None:
    """Write model and tokenizer in the format that transformers and vLLM load.

    An adapter is merged, and also saved to adapter/. Every rank calls this; one rank writes.
    """
    with policy.scorer.placement.full_tensors(fill=write):
        if write:
            weights_of(policy.scorer).export(folder, policy.tokenizer, base=base_of(policy))


def base_of(policy: Policy) -> str:
    """Return the sha256 of the weights that the policy started from, or ""."""
    return policy.files.sha256 if hasattr(policy, "files") else ""


def discard(folder: Path) -> None:
    """Rename a folder, then remove it: an interrupted removal leaves no partial checkpoint."""
    if os.path.lexists(folder):
        trash = folder.with_name(f".trash-{folder.name}")
        folder.rename(trash)
        remove(trash)


def remove(path: Path) -> None:
    """Remove a folder, a file or a link (not its target), if it exists."""
    is_folder = path.is_dir() and not path.is_symlink()
    shutil.rmtree(path) if is_folder else path.unlink(missing_ok=True)


def gather_moments(
    optimizer: torch.optim.Optimizer, policy: Policy, *, fill: bool = True
) -> dict[str, Tensor]:
    """Gather the optimiser's state over ranks as named tensors on the CPU, or {} if not `fill`."""
    out, placement = {}, policy.scorer.placement
    for name, param in trained_parameters(optimizer, policy):
        if state := optimizer.state.get(param, {}):
            for key, value in (state | placement.master(name, param)).items():
                value = torch.as_tensor(value).detach()
                full = value.full_tensor() if hasattr(value, "full_tensor") else value
                if fill:  # one at a time, since a GPU has no room for all
                    out[f"{name}/{key}"] = full.to("cpu", copy=True).contiguous()
    return out


def trained_parameters(optimizer: torch.optim.Optimizer, policy: Policy):
    """Return (name, parameter) of each weight that the optimiser trains, also of the critic."""
    names = {id(p): name for name, p in policy.scorer.named_parameters()}
    return [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"]]


def _objective(folder: Path) -> float:
    try:
        return float(json.loads((folder / "state.json").read_text())["objective"])
    except (OSError, ValueError, KeyError, TypeError):  # a damaged state is never the best
        return float("-inf")
