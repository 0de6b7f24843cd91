"""Weights of a saved model, read into one that is there."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


@torch.no_grad()
def load_weights(model: Any, folder: Path) -> None:
    """Read what `save` or `export` wrote; another model's is a ValueError."""
    found: dict[str, Tensor] = {}
    for path in sorted((folder / "model").glob("*.safetensors")):
        found |= load_file(path)
    mine = model.state_dict()
    missing = [name for name in mine if name not in found]
    unexpected = [name for name in found if name not in mine]
    unexpected += [n for n in found if n in mine and found[n].shape != mine[n].shape]
    ties = model.config.tie_word_embeddings
    tied = getattr(model, "_tied_weights_keys", None) if ties else ()
    missing = [name for name in missing if name not in (tied or ())]
    if missing or unexpected:
        raise ValueError(
            f"{folder} does not fit the model: missing {missing[:3]}, unexpected "
            f"{unexpected[:3]}; resume with the run's own config"
        )
    for name, weight in found.items():  # load_state_dict would tell shards of it
        mine[name].copy_(weight)
