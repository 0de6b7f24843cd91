"""What training moves of a model, and how it is kept: the border behind which LoRA stands.

Everything that saves, loads, copies or hands over weights asks `weights_of` and knows no more.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

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

    def load(self, folder: Path, *, base: str = "") -> None:
        """Read what `save` or `export` wrote; another model's is a ValueError."""
        import_module("policies.saved_weights").load_weights(self.model, folder)


def weights_of(scorer: Scorer) -> ModelWeights:
    """Return the weights of a scorer's model: those of its adapter, if there is one."""
    if not has_adapter(scorer.model):
        return ModelWeights(scorer.model)
    from policies.lora import TRAINED, AdapterWeights

    return AdapterWeights(scorer.model, getattr(scorer, "adapter", TRAINED))
