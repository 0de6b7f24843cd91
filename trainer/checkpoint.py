"""Checkpoints: safetensors and JSON only, complete or absent, verified before they are believed.

A checkpoint is written under a temporary name, every file is synced and listed with its sha256 in
manifest.json, and the folder is renamed into place. The newest one that verifies counts.

    checkpoints/iteration_000040/ model/ optimizer.safetensors state.json manifest.json
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from policies.models import quiet
from policies.transformers_wrapper import TransformersWrapper
from trainer.runtime import Runtime

FORMAT = 1


class Checkpoints:
    """Save and find the checkpoints of a run folder."""

    def __init__(
        self,
        runtime: Runtime,
        policy: TransformersWrapper,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 0,
        keep_last: int = 2,
        keep_best: bool = False,
    ) -> None:
        self.runtime, self.policy, self.optimizer = runtime, policy, optimizer
        self.every, self.keep_last, self.keep_best = every, keep_last, keep_best
        self.folder = runtime.folder / "checkpoints"

    def maybe_save(self, iteration: int, state: dict[str, Any]) -> None:
        """Save after every `every` iterations (rank 0; the others wait)."""
        if self.every and iteration % self.every == 0:
            self.save(iteration, state)

    def save(self, iteration: int, state: dict[str, Any]) -> None:
        """Write the checkpoint of `iteration` finished iterations."""
        if self.runtime.is_main:
            self.folder.mkdir(exist_ok=True)
            target = self.folder / f"iteration_{iteration:06d}"
            part = self.folder / f".part-{target.name}"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            save_model(self.policy, part / "model")
            save_file(self._moments(), part / "optimizer.safetensors")
            content = {"format": FORMAT, "iteration": iteration, **state}
            (part / "state.json").write_text(json.dumps(content, indent=1))
            seal(part)
            discard(target)
            part.rename(target)
            sync(self.folder)
            self._prune()
        self.runtime.accelerator.wait_for_everyone()

    def _moments(self) -> dict[str, torch.Tensor]:
        """Return the optimiser's state as named tensors."""
        out = {}
        for name, param in _named(self.optimizer, self.policy):
            for key, value in self.optimizer.state.get(param, {}).items():
                out[f"{name}/{key}"] = torch.as_tensor(value).detach().clone().contiguous()
        return out

    def restore(self, folder: Path) -> dict[str, Any]:
        """Load weights and optimiser from a verified checkpoint; return its state."""
        weights = {}
        for path in sorted((folder / "model").glob("*.safetensors")):
            weights |= load_file(path)
        missing, unexpected = self.policy.model.load_state_dict(weights, strict=False)
        tied = set(getattr(self.policy.model, "_tied_weights_keys", None) or {})
        if set(missing) - tied or unexpected:
            raise ValueError(
                f"{folder} does not fit the model: missing {missing[:3]}, unexpected "
                f"{unexpected[:3]}; resume with the run's own config"
            )
        saved = load_file(folder / "optimizer.safetensors")
        for name, param in _named(self.optimizer, self.policy):
            prefix = f"{name}/"
            found = {k[len(prefix) :]: v for k, v in saved.items() if k.startswith(prefix)}
            if found:
                step = found.pop("step").cpu()
                moments = {k: v.to(param.device) for k, v in found.items()}
                self.optimizer.state[param] = {"step": step, **moments}
        return json.loads((folder / "state.json").read_text())

    def newest(self) -> Path | None:
        """Return the newest checkpoint that verifies, or None."""
        for folder in sorted(self.folder.glob("iteration_*"), reverse=True):
            if verify(folder):
                return folder
        return None

    def _prune(self) -> None:
        done = sorted(self.folder.glob("iteration_*"))
        keep = set(done[-self.keep_last :]) if self.keep_last else set(done)
        if self.keep_best and done:
            keep.add(max(done, key=_score))
        for folder in done:
            if folder not in keep:
                discard(folder)


def save_model(policy: TransformersWrapper, folder: Path) -> None:
    """Write the model and its tokenizer so that transformers and vLLM load them without leash."""
    with quiet():
        policy.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)


def seal(folder: Path) -> None:
    """Sync every file and write manifest.json with its size and sha256."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        sync(path)
        name = path.relative_to(folder).as_posix()
        files[name] = {"size": path.stat().st_size, "sha256": sha256(path)}
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({"format": FORMAT, "files": files}, indent=1))
    sync(manifest)
    sync(folder)


def verify(folder: Path) -> bool:
    """Return whether every file of the manifest is there with its size and sha256."""
    try:
        files = json.loads((folder / "manifest.json").read_text())["files"]
    except (OSError, ValueError, KeyError):
        return False
    return all(
        (folder / name).is_file()
        and (folder / name).stat().st_size == entry["size"]
        and sha256(folder / name) == entry["sha256"]
        for name, entry in files.items()
    )


def discard(folder: Path) -> None:
    """Remove a folder so that no half of it is ever mistaken for a checkpoint."""
    if folder.exists():
        trash = folder.with_name(f".trash-{folder.name}")
        shutil.rmtree(trash, ignore_errors=True)
        folder.rename(trash)
        shutil.rmtree(trash)


def sha256(path: Path) -> str:
    """Return the hex sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _named(optimizer: torch.optim.Optimizer, policy: TransformersWrapper):
    """Return (name, parameter) of what the optimiser trains."""
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [(n, p) for n, p in policy.model.named_parameters() if id(p) in trained]


def _score(folder: Path) -> float:
    state = json.loads((folder / "state.json").read_text())
    return state.get("objective") or float("-inf")
