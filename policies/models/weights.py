"""Save, load and name the weights of a model; lora.py does this for an adapter."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.core_model_loading import revert_weight_conversion

from policies.files import make_readable
from policies.models.find import (
    TAKE_CHECKPOINT,
    ModelFiles,
    check_finite,
    load_model,
    quiet,
    readable,
)


class WeightStream:
    """Iterate over the names and full weights of a model, as in a published checkpoint.

    One weight at a time is gathered from its shards, so all ranks iterate together. If a checkpoint
    splits weights differently (a matrix per expert), the weights of one layer are gathered.
    local: this rank's part of each weight. changed: iterates over them with a merged adapter.
    model: has transformers' conversion of the checkpoint; None if the names are final.
    half: dtype of weights whose shards are float32 masters. `dtypes`: dtypes of the full weights.
    """

    def __init__(
        self,
        local: Mapping[str, Tensor],
        *,
        changed: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
        model: Any = None,
        half: torch.dtype | None = None,
    ) -> None:
        self.local, self.changed, self.model = local, changed or local.items, model
        self.dtypes = {name: weight.dtype for name, weight in local.items()}
        if half is not None:
            masters = [name for name, weight in local.items() if isinstance(weight, DTensor)]
            self.dtypes |= dict.fromkeys(masters, half)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        weights = self.changed()
        return self._published((n, full(w.detach()).to(self.dtypes[n])) for n, w in weights)

    def _empty(self) -> dict[str, Tensor]:
        """Return tensors of the same shapes without memory."""
        one = {name: torch.empty((), dtype=d, device="meta") for name, d in self.dtypes.items()}
        return {name: one[name].expand(weight.shape) for name, weight in self.local.items()}

    def _published(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        if self.model is None:
            yield from weights
            return
        empty = self._empty()
        # A weight that is only renamed stays the same object.
        converted = revert_weight_conversion(self.model, dict(empty))
        renamed = {id(weight): name for name, weight in converted.items()}
        for _, layer in groupby(weights, key=lambda pair: re.findall(r"^.*?\.\d+\.", pair[0])):
            converted = {}
            for name, weight in layer:
                if id(empty[name]) in renamed:
                    yield renamed[id(empty[name])], weight
                else:
                    converted[name] = weight
            if converted:
                yield from revert_weight_conversion(self.model, converted).items()

    def narrow(self, dtype: torch.dtype) -> None:
        """Cast wider matrices to an engine's dtype, unless the model has weights of that dtype."""
        # Routers and biases of experts are float32 on purpose in a half-precision model.
        if dtype not in self.dtypes.values():
            wide = [name for name, weight in self.local.items() if weight.ndim > 1]
            wide = [name for name in wide if self.dtypes[name].itemsize > dtype.itemsize]
            self.dtypes |= dict.fromkeys(wide, dtype)


class ModelWeights:
    """All weights of a model; `base` is the sha256 of the initial weights."""

    needs_base = False  # whether a checkpoint lacks the weights of the base

    def __init__(self, model: Any) -> None:
        self.model = model

    def named(self) -> dict[str, nn.Parameter]:
        """Return the trained weights by name."""
        return dict(self.model.named_parameters())

    def tensors(self) -> dict[str, Tensor]:
        """Return the model's tensors for a checkpoint, by name; a tied weight has several names."""
        return self.model.state_dict(keep_vars=True)

    def stream(self, *, trained: bool = False, half: torch.dtype | None = None) -> WeightStream:
        """Return the weights of the ordinary model, or of `named` if `trained`.

        half: see `WeightStream`.
        """
        if trained:
            return WeightStream(self.named(), half=half)
        return WeightStream(self.model.state_dict(), model=self.model, half=half)

    def export(self, folder: Path, tokenizer: Any, *, base: str = "") -> None:
        """Write an ordinary model that transformers and vLLM load without leash."""
        self._write(folder, tokenizer)

    def _write(self, folder: Path, tokenizer: Any, *, published: bool = True) -> None:
        """Write the ordinary model with the published names and parts, or the modules' names."""
        model = self.ordinary_model()
        if published and not getattr(model, "_weight_conversions", None):
            model._weight_conversions = None  # the default one: it was loaded from a checkpoint
        with quiet():
            model.save_pretrained(folder, save_original_format=published)
            tokenizer.save_pretrained(folder)
        make_readable(folder)

    def ordinary_model(self) -> Any:
        """Return an ordinary transformers model."""
        return self.model

    def save(self, folder: Path, tokenizer: Any, *, base: str = "") -> None:
        """Write the trained weights into the folder of a checkpoint."""
        self._write(folder / "model", tokenizer, published=False)

    def load(self, folder: Path, *, base: str = "") -> None:
        """Load the output of `save` or `export`; raise ValueError for another model's weights."""
        _load_weights(self.model, folder)


def full(tensor: Tensor) -> Tensor:
    """Return the full tensor; all ranks must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; with torch.no_grad() it shares the memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def put(target: Tensor, value: Tensor) -> None:
    """Copy a full tensor, equal on every rank, into a tensor or into this rank's part of it."""
    if isinstance(target, DTensor):
        mesh, placements = target.device_mesh, target.placements
        value = distribute_tensor(value, mesh, placements, src_data_rank=None)
    local(target).copy_(local(value))


@torch.no_grad()
def _load_weights(model: Any, folder: Path) -> None:
    place, mine = folder / "model", model.state_dict(keep_vars=True)
    taken: set[int] = set()
    for name, weight in _read_weights(folder, mine):
        if name not in mine or mine[name].shape != weight.shape:
            raise ValueError(misfit(place, name))
        put(mine[name], weight)  # load_state_dict would run FSDP's hooks
        check_finite(place, {name: local(mine[name])}, remedy=TAKE_CHECKPOINT)
        taken.add(id(mine[name]))  # a tied weight has only one name in a file
    if missing := [name for name, weight in mine.items() if id(weight) not in taken]:
        raise ValueError(misfit(place, missing[0]))


def _read_weights(folder: Path, mine: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a checkpoint or a finished run, named as in the model `mine`."""
    place, path_of = folder / "model", {}
    for path in sorted(place.glob("*.safetensors")):
        with readable(path, "weights", remedy=TAKE_CHECKPOINT), safe_open(path, "pt") as file:
            path_of |= dict.fromkeys(file.keys(), path)
    is_checkpoint = (folder / "state.json").is_file()
    if not is_checkpoint or path_of.keys() - mine.keys():  # old checkpoints: published names
        files = ModelFiles(place, "folder", "")
        yield from load_model(files, dtype="auto", kernels=False).state_dict().items()
        return
    for path in dict.fromkeys(path_of.values()):
        with safe_open(path, "pt") as file:  # one weight in memory at a time
            yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118


def check_base(folder: Path, *, expected: str, got: str) -> None:
    """Raise ValueError if an adapter belongs to other weights; both are sha256."""
    if expected != got:
        raise ValueError(f"{folder}: expected an adapter of {expected[:12]}, got {got[:12]}")


def misfit(place: Path, name: str) -> str:
    """Return the message for a weight that a folder lacks, or that the model lacks."""
    ask = "is the folder complete, and policy.model the one that the run began with?"
    return f"{place} does not fit the model: {name} is missing or unexpected; {ask}"
