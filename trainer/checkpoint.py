"""Checkpoints of safetensors and JSON, written atomically and verified before use.

A checkpoint is written under a temporary name, every file is synced and listed with its sha256 in
MANIFEST.json, and the folder is renamed into place. A resume uses the newest that verifies.

    checkpoints/iteration_000040/ model/ optimizer.safetensors state.json MANIFEST.json

critic.safetensors holds a critic (model/ stays an ordinary model), reference.safetensors a
refreshed reference, parts.safetensors the tensors of other parts. A policy with LoRA has adapter/,
in peft's format, in place of model/: its base weights never change.
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
        self.last: int | None = None  # iterations in the last saved or restored one
        self.skipped: list[str] = []  # damaged checkpoints that `newest` skipped

    def maybe_save(self, iteration: int, state: dict[str, Any], *, last: bool = False) -> None:
        """Save after each `every` iterations and after the last."""
        if self.every and (last or iteration % self.every == 0):
            self.save(iteration, state)

    def save(self, iteration: int, state: dict[str, Any]) -> None:
        """Write the checkpoint of `iteration` finished iterations; ranks must agree."""
        check_agreement(self.policy.scorer, self.runtime, iteration=iteration)
        main = self.runtime.is_main
        moments = self._moments(materialize=main)
        reference = placement_of(self.reference).plain(fill=main)
        with self.policy.scorer.placement.plain(fill=main), reference:
            self.runtime.set_phase("save")
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
        except BaseException:  # after a full disk, the error message needs space
            shutil.rmtree(part, ignore_errors=True)
            raise
        discard(target)
        part.rename(target)
        flush(self.folder)
        self._prune(target)

    def critic(self) -> dict[str, Tensor]:
        """Return the critic's trained weights; the others belong to the frozen policy."""
        critic = self.policy.scorer.critic
        named = () if critic is None else critic.named_parameters()
        return {name: p.detach() for name, p in named if p.requires_grad}

    def _moments(self, *, materialize: bool = True) -> dict[str, Tensor]:
        """Gather the optimiser's state over ranks as named tensors; {} unless `materialize`."""
        out, placement = {}, self.policy.scorer.placement
        for name, param in trained_parameters(self.optimizer, self.policy):
            if state := self.optimizer.state.get(param, {}):
                for key, value in (state | placement.master(name, param)).items():
                    value = torch.as_tensor(value).detach()
                    full = value.full_tensor() if hasattr(value, "full_tensor") else value
                    out |= {f"{name}/{key}": full.clone().contiguous()} if materialize else {}
        return out

    def newest(self) -> Path | None:
        """Return the newest checkpoint that verifies, None without any checkpoint.

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
                f"{self.folder} has only damaged ones ({names}); restore or remove them"
            )
        return newest

    def restore(self, folder: Path) -> dict[str, Any]:
        """Load weights and optimiser from a verified checkpoint; return its state."""
        self.restore_weights(folder, critic=True)
        saved, placement = load_file(folder / "optimizer.safetensors"), self.policy.scorer.placement
        for name, param in trained_parameters(self.optimizer, self.policy):
            start = f"{name}/"
            parts = {k.removeprefix(start): v for k, v in saved.items() if k.startswith(start)}
            if parts:
                state = {k: placement.scatter(v, param) for k, v in parts.items()}
                for master in placement.master(name, param).values():
                    master.copy_(state.pop("master", master))
                self.optimizer.state[param] = state
        state = json.loads((folder / "state.json").read_text())
        self.last = state["iteration"]
        if (path := folder / PARTS).is_file():
            for key, value in load_file(path).items():
                name, _, tensor = key.partition("/")
                state["parts"][name][tensor] = value
        return state

    def restore_weights(self, folder: Path, *, critic: bool = False) -> None:
        """Load policy and reference from a checkpoint, or the policy from a finished run."""
        reference = placement_of(self.reference).plain(keep=True)
        with self.policy.scorer.placement.plain(keep=True), reference:
            weights_of(self.policy.scorer).load(folder, base=base_of(self.policy))
            if (folder / REFERENCE).is_file():
                self.reference.load_state_dict(load_file(folder / REFERENCE))
            if critic and (weights := self.critic()):
                saved = load_file(folder / CRITIC)
                for name, weight in weights.items():
                    weight.copy_(saved[name])

    def _prune(self, newest: Path) -> None:
        """Keep the last and the best; remove iterations after `newest`, which are damaged."""
        every = list_checkpoints(self.folder)
        done = every[: every.index(newest) + 1]
        keep = set(done[-self.keep_last :]) if self.keep_last else set(done)
        if self.keep_best:
            keep.add(max(done, key=_score))
        for folder in every:
            if folder not in keep:
                discard(folder)


def split_tensors(parts: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Split the states of parts into plain values and tensors, the latter by <part>/<key>.

    TypeError for a state that JSON does not restore exactly.
    """
    plain, tensors = {}, {}
    for name, state in parts.items():
        named = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        tensors |= {
            f"{name}/{key}": v.detach().cpu().clone().contiguous() for key, v in named.items()
        }
        plain[name] = {key: value for key, value in state.items() if key not in named}
        if json.loads(json.dumps(plain[name], default=str)) != plain[name]:
            kinds = "tensors, numbers, texts, lists and dicts with texts as keys"
            raise TypeError(f"{name}.state_dict(): expected {kinds}, got {plain[name]!r:.200}")
    return plain, tensors


def list_checkpoints(folder: Path) -> list[Path]:
    """List the folders with names of checkpoints, the latest iteration last."""
    named = [path for path in folder.glob("*") if re.fullmatch(r"iteration_\d+", path.name)]
    return sorted(named, key=lambda path: int(path.name.removeprefix("iteration_")))


def read_state(folder: Path) -> dict[str, Any] | None:
    """Return the state of a checkpoint; None if it is damaged."""
    manifest = read_manifest(folder, full=True)
    files = manifest["files"] if manifest else {}
    complete = {"state.json", "optimizer.safetensors"} <= {*files}
    if not complete or not any(re.fullmatch(r"(model|adapter)/.*safetensors", f) for f in files):
        return None
    state = json.loads((folder / "state.json").read_text())
    if (version := state.get("format")) != FORMAT:
        raise ValueError(
            f"{folder} is of format {version}, this leash reads {FORMAT}; move it away"
        )
    return state if f"iteration_{state.get('iteration', -1):06d}" == folder.name else None


def save_model(policy: Policy, folder: Path, *, write: bool = True) -> None:
    """Write model and tokenizer in the format that transformers and vLLM load.

    An adapter is merged, and also saved to adapter/ as peft does. `write`: only on one rank.
    """
    with policy.scorer.placement.plain(fill=write):
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


def trained_parameters(optimizer: torch.optim.Optimizer, policy: Policy):
    """Return (name, parameter) pairs that the optimiser trains, of scorer and critic."""
    names = {id(p): name for name, p in policy.scorer.named_parameters()}
    return [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"]]


def _score(folder: Path) -> float:
    try:
        return float(json.loads((folder / "state.json").read_text())["objective"])
    except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: never the best
        return float("-inf")
