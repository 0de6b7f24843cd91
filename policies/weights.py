"""Save, load and name the weights that training moves: all of a model, or those of its adapter."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from policies import lora
from policies.cache import share
from policies.models import has_adapter, quiet
from policies.scorer import Scorer


class ModelWeights:
    """All weights of a model. `base` is the sha256 of those that training started from."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def named(self) -> dict[str, nn.Parameter]:
        """Return the weights that training moves, by name."""
        return dict(self.model.named_parameters())

    def merged(self) -> dict[str, Tensor]:
        """Return the state dict of the ordinary model that these weights make."""
        return self.model.state_dict()

    def export(self, folder: Path, tokenizer: Any, *, base: str = "") -> None:
        """Write an ordinary model that transformers and vLLM load without leash."""
        with quiet():
            self.plain().save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        share(folder)

    def plain(self) -> Any:
        """Return a model with nothing of ours in it."""
        return self.model

    def save(self, folder: Path, tokenizer: Any, *, base: str = "") -> None:
        """Write what training has moved into the folder of a checkpoint."""
        self.export(folder / "model", tokenizer)

    def load(self, folder: Path, *, base: str = "") -> None:
        """Read what `save` or `export` wrote; another model's is a ValueError."""
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
        """Return the state dict of the model with the adapter in its weights."""
        return lora.merged_weights(self.model)

    def plain(self) -> Any:
        """Return a model with the adapter in its weights."""
        with torch.device("meta"):  # no second copy of what is only written
            plain = type(self.model)(self.model.config)
        plain.load_state_dict(self.merged(), assign=True)
        plain.tie_weights()
        plain.generation_config = self.model.generation_config
        return plain

    def export(self, folder: Path, tokenizer: Any, *, base: str = "") -> None:
        """Write the merged model, and the adapter apart: beside it, it would be put on twice."""
        super().export(folder, tokenizer)
        lora.save_adapter(self.model, folder / "adapter", base=base)
        share(folder)

    def save(self, folder: Path, tokenizer: Any, *, base: str = "") -> None:
        """Write the adapter into the folder of a checkpoint."""
        lora.save_adapter(self.model, folder / "adapter", base=base)

    def load(self, folder: Path, *, base: str = "") -> None:
        """Read the adapter of a checkpoint or of a finished run."""
        places = [folder / "adapter", folder / "model" / "adapter"]
        place = next((place for place in places if place.is_dir()), places[0])
        lora.load_adapter(self.model, place, base=base)


def weights_of(scorer: Scorer) -> ModelWeights:
    """Return the weights of a scorer's model: those of its adapter, if there is one."""
    if not has_adapter(scorer.model):
        return ModelWeights(scorer.model)
    return AdapterWeights(scorer.model, getattr(scorer, "adapter", lora.TRAINED))


@torch.no_grad()
def _load_weights(model: Any, folder: Path) -> None:
    found: dict[str, Tensor] = {}
    for path in sorted((folder / "model").glob("*.safetensors")):
        found |= load_file(path)
    mine = model.state_dict()
    ties = model.config.tie_word_embeddings
    tied = (getattr(model, "_tied_weights_keys", None) if ties else None) or ()
    wrong = [name for name in mine if name not in found and name not in tied]
    wrong += [n for n in found if n not in mine or found[n].shape != mine[n].shape]
    if wrong:
        raise ValueError(f"{folder} does not fit the model: {wrong[:3]} missing or unexpected")
    for name, weight in found.items():  # load_state_dict would tell shards of it
        mine[name].copy_(weight)
