"""Save, load and name the trained weights: all of a model, or those of its adapter."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from policies.cache import make_readable
from policies.models import lora
from policies.models.find import has_adapter, quiet
from policies.models.sharding import full
from policies.scorer import Scorer


class WeightStream:
    """Iterate over the names and full weights of a model, as in its checkpoint.

    One weight at a time is gathered from its shards, so all ranks iterate together.
    local: what this rank holds of each weight. changed: iterates over them with a merged adapter.
    half: dtype of weights whose shards are float32 masters. `dtypes`: those of the full weights.
    """

    def __init__(
        self,
        local: Mapping[str, Tensor],
        *,
        changed: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
        half: torch.dtype | None = None,
    ) -> None:
        self.local, self.changed = local, changed or local.items
        self.dtypes = {name: weight.dtype for name, weight in local.items()}
        if half is not None:
            masters = [name for name, weight in local.items() if isinstance(weight, DTensor)]
            self.dtypes |= dict.fromkeys(masters, half)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.changed():
            yield name, full(weight.detach()).to(self.dtypes[name])

    def narrow(self, dtype: torch.dtype) -> None:
        """Cast wider matrices to an engine's dtype, unless the model has weights of that dtype."""
        # Routers and biases of experts are float32 on purpose in a half-precision model.
        if dtype not in self.dtypes.values():
            wide = [name for name, weight in self.local.items() if weight.ndim > 1]
            wide = [name for name in wide if self.dtypes[name].itemsize > dtype.itemsize]
            self.dtypes |= dict.fromkeys(wide, dtype)


class ModelWeights:
    """All weights of a model; `base` is the sha256 of the initial weights."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def named(self) -> dict[str, nn.Parameter]:
        """Return the trained weights by name."""
        return dict(self.model.named_parameters())

    def merged(self) -> dict[str, Tensor]:
        """Return the state dict of the ordinary model with these weights."""
        return self.model.state_dict()

    def stream(self, *, trained: bool = False, half: torch.dtype | None = None) -> WeightStream:
        """Return the weights of `merged`, or of `named` if `trained`; half: see `WeightStream`."""
        return WeightStream(self.named() if trained else self.merged(), half=half)

    def export(self, folder: Path, tokenizer: Any, *, base: str = "") -> None:
        """Write an ordinary model that transformers and vLLM load without leash."""
        with quiet():
            self.ordinary_model().save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        make_readable(folder)

    def ordinary_model(self) -> Any:
        """Return an ordinary transformers model."""
        return self.model

    def save(self, folder: Path, tokenizer: Any, *, base: str = "") -> None:
        """Write the trained weights into the folder of a checkpoint."""
        self.export(folder / "model", tokenizer)

    def load(self, folder: Path, *, base: str = "") -> None:
        """Load the output of `save` or `export`; weights of another model are a ValueError."""
        _load_weights(self.model, folder)


class AdapterWeights(ModelWeights):
    """The weights of an adapter; the model under it never changes."""

    def __init__(self, model: Any, adapter: str | None = lora.TRAINED) -> None:
        super().__init__(model)
        self.adapter = adapter

    def named(self) -> dict[str, nn.Parameter]:
        """Return the weights of the adapter, by name."""
        return lora.trained_weights(self.model, self.adapter)

    def merged(self) -> dict[str, Tensor]:
        """Return the state dict of the model with the adapter merged."""
        return dict(lora.merged_weights(self.model))

    def stream(self, *, trained: bool = False, half: torch.dtype | None = None) -> WeightStream:
        """Return the weights of `merged`, or of `named` if `trained`; half: see `WeightStream`."""
        if trained:
            return super().stream(trained=True, half=half)
        changed = partial(lora.merged_weights, self.model)
        return WeightStream(lora.base_weights(self.model), changed=changed, half=half)

    def ordinary_model(self) -> Any:
        """Return an ordinary model with the adapter merged."""
        with torch.device("meta"):  # no second copy of weights that are only written
            plain = type(self.model)(self.model.config)
        plain.load_state_dict(self.merged(), assign=True)
        plain.tie_weights()
        plain.generation_config = self.model.generation_config
        return plain

    def export(self, folder: Path, tokenizer: Any, *, base: str = "") -> None:
        """Write the merged model, and the adapter in a subfolder so as not to apply it twice."""
        super().export(folder, tokenizer)
        lora.save_adapter(self.model, folder / "adapter", base=base)
        make_readable(folder)

    def save(self, folder: Path, tokenizer: Any, *, base: str = "") -> None:
        """Write the adapter into the folder of a checkpoint."""
        lora.save_adapter(self.model, folder / "adapter", base=base)

    def load(self, folder: Path, *, base: str = "") -> None:
        """Read the adapter of a checkpoint or of a finished run."""
        places = [folder / "adapter", folder / "model" / "adapter"]
        place = next((place for place in places if place.is_dir()), places[0])
        lora.load_adapter(self.model, place, base=base)


def weights_of(scorer: Scorer) -> ModelWeights:
    """Return the weights of a scorer's model, or those of its adapter if it has one."""
    if not has_adapter(scorer.model):
        return ModelWeights(scorer.model)
    return AdapterWeights(scorer.model, getattr(scorer, "adapter", lora.TRAINED))


@torch.no_grad()
def _load_weights(model: Any, folder: Path) -> None:
    weights: dict[str, Tensor] = {}
    for path in sorted((folder / "model").glob("*.safetensors")):
        weights |= load_file(path)
    mine = model.state_dict()
    ties = model.config.tie_word_embeddings
    tied = (getattr(model, "_tied_weights_keys", None) if ties else None) or ()
    wrong = [name for name in mine if name not in weights and name not in tied]
    wrong += [n for n in weights if n not in mine or weights[n].shape != mine[n].shape]
    if wrong:
        raise ValueError(f"{folder} does not fit the model: {wrong[:3]} missing or unexpected")
    for name, weight in weights.items():  # load_state_dict would run FSDP's hooks
        mine[name].copy_(weight)
