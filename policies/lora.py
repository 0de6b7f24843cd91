"""LoRA: a low-rank adapter on the linear layers of a frozen model (Hu et al. 2021, 2106.09685).

y = W x + alpha/r * B A x, where only A [r, in] and B [out, r] are trained, in float32. B starts at
0: without the adapter the model is the one that training started from. peft inserts its layers
into the model without changing its class, so scorer and sampler need no special case.

Left out on purpose: adapters of embeddings and of the output head (the scorer reads the head's
weights), dropout, quantised weights.
An adapter as policy.model is merged (`policies.models.merge_adapter`); a new one then starts at 0.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from policies.models import quiet
from policies.optional_packages import EXTRAS
from policies.scorer import Scorer

TRAINED = "default"  # peft's name for an unnamed adapter
WEIGHTS = "adapter_model.safetensors"


def add_adapter(
    model: Any,
    *,
    r: int = 16,
    alpha: float = 32.0,
    target_modules: Sequence[str] | None = None,
    dropout: float = 0.0,
) -> None:
    """Freeze a model and insert a trainable adapter of rank `r`.

    target_modules: names of linear layers (q_proj, down_proj, ...); None: all but the output head.
    Layers whose weights are frozen before get none: a text never reaches them.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ImportError(EXTRAS["peft"]) from error
    if dropout:
        raise ValueError(f"expected policy.lora.dropout=0, got {dropout}: it changes log-probs")
    linear = _linear_layers(model)
    reached = {name for name, layer in linear.items() if layer.weight.requires_grad}
    names = sorted({name.rpartition(".")[2] for name in reached})
    unknown = sorted(set(target_modules or ()) - set(names))
    if unknown:
        raise ValueError(f"expected policy.lora.target_modules among {names}, got {unknown}")
    targets = sorted(target_modules or names)
    if len(reached) < len(linear):  # layers of the same name are in a tower of images
        targets = sorted(name for name in reached if name.rpartition(".")[2] in targets)
    config = LoraConfig(
        r=r,
        lora_alpha=alpha,
        target_modules=targets,
        lora_dropout=0.0,
        fan_in_fan_out=any(type(layer).__name__ == "Conv1D" for layer in linear.values()),
        task_type="CAUSAL_LM",
    )
    inject_adapter_in_model(config, model, adapter_name=TRAINED)
    for weight in trained_weights(model).values():  # bfloat16 would lose small steps
        weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))


def _linear_layers(model: Any) -> dict[str, Any]:
    """Return the linear layers by name, without the output head; GPT-2 names them Conv1D."""
    head = model.get_output_embeddings()
    return {
        name: layer
        for name, layer in model.named_modules()
        if (isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D") and layer is not head
    }


def _layers(model: nn.Module) -> dict[str, Any]:
    return {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}


def trained_weights(model: nn.Module, adapter: str | None = TRAINED) -> dict[str, nn.Parameter]:
    """Return the weights of an adapter; their names leave out the adapter's name."""
    parts = ((name.split(f".{adapter}.", 1), p) for name, p in model.named_parameters())
    return {".".join(name): p for name, p in parts if len(name) == 2 and ".lora_" in name[0]}


def is_zero(model: nn.Module) -> bool:
    """Return whether the adapter changes nothing, as at the start."""
    return not any(p.any() for name, p in trained_weights(model).items() if ".lora_B" in name)


def freeze_copy(model: nn.Module) -> str:
    """Insert a frozen copy of the adapter's current weights; return the copy's name."""
    layers = _layers(model).values()
    name = f"copy{max(len(layer.lora_A) for layer in layers)}"
    for layer in layers:
        for part in (layer.lora_A, layer.lora_B):
            part[name] = copy.deepcopy(part[TRAINED]).requires_grad_(False)
        layer.lora_dropout[name] = nn.Identity()
        layer.scaling[name] = layer.scaling[TRAINED]
    return name


@contextmanager
def using(model: nn.Module, adapter: str | None) -> Iterator[None]:
    """Use another adapter, or with None the bare model, inside the block."""
    # peft's own switches also change requires_grad, which would disturb a running update.
    layers = _layers(model).values()
    before = [(layer._disable_adapters, layer._active_adapter) for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = adapter is None
            layer._active_adapter = layer._active_adapter if adapter is None else adapter
        yield
    finally:
        for layer, (off, active) in zip(layers, before, strict=True):
            layer._disable_adapters, layer._active_adapter = off, active


class AdapterScorer(Scorer):
    """Score with another adapter on the same weights; None is the bare model."""

    def __init__(self, scorer: Scorer, adapter: str | None) -> None:
        share = scorer.share_prompts
        super().__init__(scorer.model, share_prompts=share, autocast=scorer.autocast)
        self.adapter = adapter

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Use the adapter as well, for sampling and scoring inside the block."""
        with using(self.model, self.adapter), super().precision():
            yield


def base_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of the model under the adapter."""
    weights = {name: value for name, value in model.state_dict().items() if ".lora_" not in name}
    return {name.replace(".base_layer.", "."): value for name, value in weights.items()}


@torch.no_grad()
def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with W + alpha/r * B A for W; without an adapter, unchanged."""
    out = base_weights(model)
    for name, layer in _layers(model).items():
        weight = out[f"{name}.weight"]
        out[f"{name}.weight"] = (weight + layer.get_delta_weight(TRAINED)).to(weight.dtype)
    return out


def save_adapter(model: Any, folder: Path, *, base: str = "") -> None:
    """Write the adapter as peft does; `base` is the sha256 of the weights it belongs to."""
    write_adapter(trained_weights(model), adapter_config(model), folder, base=base)


def adapter_config(model: Any) -> Any:
    """Return peft's config of the adapter, ready to be written."""
    config = copy.deepcopy(model.peft_config[TRAINED])
    config.base_model_name_or_path, config.inference_mode = model.name_or_path, True
    config.target_modules = sorted(config.target_modules)  # a set has no fixed order
    return config


def write_adapter(
    named: Mapping[str, Tensor], config: Any, folder: Path, *, base: str = ""
) -> None:
    """Write adapter weights, named as in `trained_weights`, as peft does."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = {f"base_model.model.{name}": weight.detach() for name, weight in named.items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt", "base": base})
    with quiet():
        config.save_pretrained(folder)


@torch.no_grad()
def load_adapter(model: nn.Module, folder: Path, *, base: str = "") -> None:
    """Read what `save_adapter` wrote; another base or other layers are a ValueError."""
    from safetensors import safe_open

    mine = trained_weights(model)
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        theirs = (file.metadata() or {}).get("base", "")
        if theirs != base:
            raise ValueError(f"{folder}: expected an adapter of {base[:12]}, got {theirs[:12]}")
        names = {name.removeprefix("base_model.model."): name for name in file.keys()}  # noqa: SIM118
        if differ := sorted(names.keys() ^ mine.keys()):
            raise ValueError(f"{folder} does not fit the model: {differ[:3]} is in one of them")
        for name, weight in mine.items():
            weight.copy_(file.get_tensor(names[name]))
