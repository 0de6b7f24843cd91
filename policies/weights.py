"""What training moves of a model, and how it is kept: the border behind which LoRA stands.

Everything that saves, loads, copies or hands over weights asks `weights_of` and knows no more.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from policies.cache import share
from policies.models import has_adapter
from policies.quiet import quiet
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

    @torch.no_grad()
    def load(self, folder: Path, *, base: str = "") -> None:
        """Read what `save` or `export` wrote; another model's is a ValueError."""
        from safetensors.torch import load_file

        found: dict[str, Tensor] = {}
        for path in sorted((folder / "model").glob("*.safetensors")):
            found |= load_file(path)
        mine = self.model.state_dict()
        missing = [name for name in mine if name not in found]
        unexpected = [name for name in found if name not in mine]
        unexpected += [n for n in found if n in mine and found[n].shape != mine[n].shape]
        ties = self.model.config.tie_word_embeddings
        tied = getattr(self.model, "_tied_weights_keys", None) if ties else ()
        missing = [name for name in missing if name not in (tied or ())]
        if missing or unexpected:
            raise ValueError(
                f"{folder} does not fit the model: missing {missing[:3]}, unexpected "
                f"{unexpected[:3]}; resume with the run's own config"
            )
        for name, weight in found.items():  # load_state_dict would tell shards of it
            mine[name].copy_(weight)


def weights_of(scorer: Scorer) -> ModelWeights:
    """Return the weights of a scorer's model: those of its adapter, if there is one."""
    if not has_adapter(scorer.model):
        return ModelWeights(scorer.model)
    from policies.lora import TRAINED, AdapterWeights

    return AdapterWeights(scorer.model, getattr(scorer, "adapter", TRAINED))
