"""Sharded tensors in files: each rank writes and reads its part by torch.distributed.checkpoint.

The files are safetensors, without pickles; their headers have the place of each part. The number of
ranks that read may differ from the number that wrote. No rank needs a full tensor in memory.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from policies.files import hash_files, read_manifest
from policies.load import weights_of
from policies.models.find import TAKE_CHECKPOINT, check_finite
from policies.models.weights import check_base, local, misfit
from policies.scorer import Scorer

FILE = 2**29  # bytes; while a rank writes a file, its host needs up to `COPIES` times as much
COPIES = 3  # tensors copied from the GPU, bytes of each tensor, bytes of the file


@torch.no_grad()
def write_shards(named: Mapping[str, Tensor], folder: Path, *, rank: int) -> dict[str, Any]:
    """Write this rank's part of each tensor; all ranks call this with the same names.

    A tensor that every rank holds is written once. Return the entries of this rank's files for a
    manifest of the folder above.
    """
    numbers, size = {}, 0
    for name, tensor in named.items():
        size += local(tensor).nbytes
        numbers[name] = 1 + size // FILE
    options = {"save_distributed": True, "fqn_to_index_mapping": numbers}  # rank 0's counts
    with _error_of_a_rank():
        writer = HuggingFaceStorageWriter(str(folder), **options)
        save(dict(named), storage_writer=writer)
    return hash_files(folder.glob(f"shard-{rank + 1:05d}-*"), folder.parent)


class ShardFiles:
    """The tensors that `write_shards` wrote below a checkpoint, by group and name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reader = HuggingFaceStorageReader(str(folder))
        metadata: Mapping[str, Any] = self.reader.read_metadata().state_dict_metadata
        self.shapes = {
            name: torch.empty(one.size, dtype=one.properties.dtype, device="meta")
            for name, one in metadata.items()
        }

    def tensors(self, group: str) -> dict[str, Tensor]:
        """Return tensors without values of the shapes and dtypes of a group, by name."""
        start = f"{group}/"
        names = [name for name in self.shapes if name.startswith(start)]
        return {name.removeprefix(start): self.shapes[name] for name in names}

    def read(self, group: str, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors, full or in parts, by their names in a group; all ranks call this."""
        self._read({f"{group}/{name}": target for name, target in targets.items()})

    def read_weights(self, scorer: Scorer, *, base: str) -> None:
        """Fill the weights of a policy; raise if they belong to another model or LoRA base."""
        weights = weights_of(scorer)
        if weights.needs_base:
            manifest = read_manifest(self.folder.parent) or {"about": {}}
            check_base(self.folder, expected=base, got=manifest["about"].get("base", ""))
        groups = dict[str, Tensor]()
        for name, weight in names_in_scorer(scorer, weights.tensors()).items():
            saved = f"weights/{name}"
            groups[saved if saved in self.shapes else f"optimizer/{name}/master"] = weight
        if unknown := {f"weights/{name}" for name in self.tensors("weights")} - groups.keys():
            raise ValueError(misfit(self.folder, min(unknown)))
        self._read(groups)
        check_finite(
            self.folder, {n: local(w.detach()) for n, w in groups.items()}, remedy=TAKE_CHECKPOINT
        )

    @torch.no_grad()
    def _read(self, targets: dict[str, Tensor]) -> None:
        for name, target in targets.items():
            if name not in self.shapes or self.shapes[name].shape != target.shape:
                raise ValueError(misfit(self.folder, name))
        with warnings.catch_warnings(), _error_of_a_rank():
            # The warning says that there is only one process.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(dict(targets), storage_reader=self.reader)


def names_in_scorer(scorer: Scorer, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's tensors, each once, by the names that they have in its scorer."""
    every = [*scorer.state_dict(keep_vars=True).items(), *scorer.named_parameters()]
    names = {id(tensor): name for name, tensor in every}  # a tied weight keeps one name
    return {names[id(tensor)]: tensor for tensor in tensors.values()}


@contextmanager
def _error_of_a_rank() -> Iterator[None]:
    """Raise one rank's error on all ranks, in place of DCP's list of errors."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None
