"""Checkpoints of safetensors and JSON, written atomically and verified before use.

A checkpoint is written under a temporary name, every file is synced and listed with its sha256 in
MANIFEST.json, and the folder is renamed into place. A resume uses the newest undamaged checkpoint.

    checkpoints/iteration_000040/ model/ optimizer.safetensors state.json MANIFEST.json

Optional files: critic.safetensors (the critic is not in model/), reference.safetensors (a refreshed
reference) and parts.safetensors (tensors from `state_dict()` of tasks, rewards and other parts).
With LoRA, adapter/ in peft's format replaces model/, because the base weights never change. model/
names tensors as the modules do; only the final model has the published names. Ranks that hold
shards write shards/ in place of all tensors but parts.safetensors (trainer/scale/shards.py).
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
from policies.models.weights import put
from policies.protocols import Policy
from policies.scorer import Scorer
from trainer.kl.reference import NoReference, Reference
from trainer.runtime import Runtime, check_agreement

FORMAT = 2
PARTS = "parts.safetensors"
SHARDS = "shards"


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
        """Write a checkpoint after `iteration`; raise RuntimeError if weights of ranks differ."""
        check_agreement(self.policy.scorer, self.runtime, iteration=iteration)
        self.runtime.set_phase("save")
        target = self.folder / f"iteration_{iteration:06d}"
        part = self.folder / f".part-{target.name}"
        if self.runtime.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in (*self.folder.glob(".part-*"), *self.folder.glob(".trash-*")):
                remove(leftover)  # an interrupted save or removal left it
            part.mkdir()
        try:
            hashed = self.write_tensors(part)
            if self.runtime.is_main:
                self._write_state(part, {"iteration": iteration, **state}, hashed)
        except BaseException:  # frees space: a full disk would lose the error message
            shutil.rmtree(part, ignore_errors=True)
            raise
        if self.runtime.is_main:
            discard(target)
            part.rename(target)
            flush(self.folder)
            self._prune(target)
        self.last = iteration
        self.runtime.wait()

    def write_tensors(self, part: Path) -> dict[str, Any]:
        """Write weights and optimiser state; return sha256 of files that are hashed already.

        All ranks call this; without shards rank 0 writes.
        """
        if self.runtime.is_main:
            weights = weights_of(self.policy.scorer)
            weights.save(part, self.policy.tokenizer, base=base_of(self.policy))
            if critic := self.critic():
                save_file(critic, part / "critic.safetensors")
            if refreshed := self.reference.state_dict():
                save_file(refreshed, part / "reference.safetensors")
            moments = moments_of(self.optimizer, self.policy.scorer)
            on_host = {name: value.cpu().contiguous() for name, value in moments.items()}
            save_file(on_host, part / "optimizer.safetensors")
        return {}

    def _write_state(self, part: Path, state: dict[str, Any], hashed: dict[str, Any]) -> None:
        values, tensors = split_tensors(state.get("parts", {}))
        if tensors:
            save_file(tensors, part / PARTS)
        content = {"format": FORMAT, **state, "parts": values}
        (part / "state.json").write_text(json.dumps(content, indent=1))
        write_manifest(part, {"format": FORMAT, "base": base_of(self.policy)}, hashed)

    def critic(self) -> dict[str, Tensor]:
        """Return the critic's trained weights; its frozen weights are the policy's."""
        critic = self.policy.scorer.critic
        named = () if critic is None else critic.named_parameters()
        return {name: p.detach() for name, p in named if p.requires_grad}

    def newest(self) -> Path | None:
        """Return the newest undamaged checkpoint, or None if the folder has no checkpoint.

        Each rank hashes a share of the files. Raise ValueError if all checkpoints are damaged.
        """
        self.skipped, share = [], slice(self.runtime.rank, None, self.runtime.ranks)
        for folder in reversed(self.runtime.gather(list_checkpoints(self.folder))[0]):
            if all(self.runtime.gather(read_state(folder, share=share) is not None)):
                return folder
            self.skipped.append(folder.name)
        if self.skipped:
            names = ", ".join(self.skipped)
            raise ValueError(
                f"{self.folder} has only damaged checkpoints ({names}); restore or remove them"
            )
        return None

    def restore(self, folder: Path) -> dict[str, Any]:
        """Load weights and optimiser state of an undamaged checkpoint; return the other values."""
        files = open_checkpoint(folder)
        self._read_weights(files)
        files.read("critic", self.critic())
        self._read_moments(files)
        state = json.loads((folder / "state.json").read_text())
        self.last = state["iteration"]
        if (path := folder / PARTS).is_file():
            for key, value in load_file(path).items():
                part, _, name = key.partition("/")
                state["parts"][part][name] = value
        return state

    def restore_weights(self, folder: Path) -> None:
        """Load the policy, and the reference if saved, from a checkpoint or a finished run."""
        self._read_weights(open_checkpoint(folder))

    def _read_weights(self, files: Any) -> None:
        files.read_weights(self.policy.scorer, base=base_of(self.policy))
        if files.tensors("reference"):
            self.reference.moved = True
            files.read("reference", self.reference.state_dict())

    def _read_moments(self, files: Any) -> None:
        """Load the optimiser's state, and the float32 masters that are the shards themselves."""
        by_weight: dict[str, dict[str, Tensor]] = {}
        for name, like in files.tensors("optimizer").items():
            weight, _, key = name.rpartition("/")
            by_weight.setdefault(weight, {})[key] = like
        targets = {}
        for name, param in trained_parameters(self.optimizer, self.policy.scorer):
            likes = by_weight.get(name, {})
            masters = self.policy.scorer.placement.master(name, param)
            state = {k: empty_for(param, v) for k, v in likes.items() if k not in masters}
            targets |= {f"{name}/{key}": value for key, value in state.items()}
            targets |= {f"{name}/{k}": v for k, v in masters.items() if k in likes}
            if state:
                self.optimizer.state[param] = state
        files.read("optimizer", targets)

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


class Files:
    """Tensors of a checkpoint or of a finished run, in files of full tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tensors(self, group: str) -> dict[str, Tensor]:
        """Return the memory-mapped tensors of a group by name, or {} if the group has no file."""
        path = self.folder / f"{group}.safetensors"
        return load_file(path) if path.is_file() else {}

    def read(self, group: str, targets: dict[str, Tensor]) -> None:
        """Fill `targets`, full tensors or shards, from the tensors of a group by name."""
        tensors = self.tensors(group) if targets else {}
        for name, target in targets.items():
            put(target, tensors[name])

    def read_weights(self, scorer: Scorer, *, base: str) -> None:
        """Fill the weights of a policy; raise if they belong to another model or LoRA base."""
        weights_of(scorer).load(self.folder, base=base)


def open_checkpoint(folder: Path) -> Any:
    """Return the reader for the tensors of a checkpoint or of a finished run."""
    if not (folder / SHARDS).is_dir():
        return Files(folder)
    from policies.models.shard_files import ShardFiles

    return ShardFiles(folder / SHARDS)


def empty_for(param: Tensor, like: Tensor) -> Tensor:
    """Return an empty tensor for a value of the optimiser's state, sharded as the weight is."""
    if like.shape == param.shape:
        return torch.empty_like(param.detach(), dtype=like.dtype)
    return torch.empty(like.shape, dtype=like.dtype, device=param.device)


def split_tensors(parts: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Split the states of parts into plain values, and tensors with names <part>/<key>.

    Raise TypeError if JSON does not restore a plain value exactly.
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


def read_state(folder: Path, *, share: slice = slice(None)) -> dict[str, Any] | None:
    """Return the state of a checkpoint, or None if it is damaged.

    Raise ValueError for another FORMAT. `share`: see `read_manifest`.
    """
    manifest = read_manifest(folder, full=True, share=share)
    files = manifest["files"] if manifest else {}
    ordinary = "optimizer.safetensors" in files
    weights = r"(model|adapter)/.*safetensors" if ordinary else rf"{SHARDS}/.*safetensors"
    if "state.json" not in files or not any(re.fullmatch(weights, file) for file in files):
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


def moments_of(optimizer: torch.optim.Optimizer, scorer: Scorer) -> dict[str, Tensor]:
    """Return this rank's part of the optimiser's state, and of the masters, by name."""
    out = {}
    for name, param in trained_parameters(optimizer, scorer):
        if state := optimizer.state.get(param, {}):
            for key, value in (state | scorer.placement.master(name, param)).items():
                out[f"{name}/{key}"] = torch.as_tensor(value).detach()
    return out


def trained_parameters(optimizer: torch.optim.Optimizer, scorer: Scorer):
    """Return (name, parameter) of each weight that the optimiser trains, the critic's too."""
    names = {id(p): name for name, p in scorer.named_parameters()}
    return [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"]]


def _objective(folder: Path) -> float:
    try:
        return float(json.loads((folder / "state.json").read_text())["objective"])
    except (OSError, ValueError, KeyError, TypeError):  # a damaged state is never the best
        return float("-inf")
