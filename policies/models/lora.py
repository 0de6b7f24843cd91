"""LoRA: a low-rank adapter on the linear layers of a frozen model (Hu et al. 2021, 2106.09685).

y = W x + alpha/r * B A x, where only A [r, in] and B [out, r] are trained, in float32. B starts at
0: without the adapter the model is the one that training started from. Experts, whose matrices are
one parameter [experts, out, in], have an A and a B each. peft inserts its layers into the model
without changing its class, so scorer and sampler need no special case. An adapter as policy.model
is merged (`policies.models.find.merge_adapter`); a new one then starts at 0.

Not supported: adapters of embeddings and of the output head, because the scorer reads the head's
weights; routers that are not linear layers; dropout, because scores would be random.
"""

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from policies.files import make_readable
from policies.models.fast import products
from policies.models.fast.layers import is_close
from policies.models.find import TAKE_CHECKPOINT, check_finite, quiet, readable
from policies.models.weights import ModelWeights, WeightStream, check_base, put
from policies.optional_packages import EXTRAS
from policies.scorer import Scorer

TRAINED = "default"  # peft's name for an unnamed adapter
WEIGHTS = "adapter_model.safetensors"
LINEAR = (nn.Linear, products.Linear, Conv1D)
# Linear layers whose weights their module reads itself, in forward or to clamp them, by its class.
READ_BY_CLASS = {
    "Gemma3nTextAltUp": ("correction_coefs", "prediction_coefs"),
    "LongcatFlashTopkRouter": ("classifier",),
}
# In a model with experts peft takes these names of linear layers for experts in transformers 4, and
# leaves shared experts and dense layers without an adapter; the weights themselves it adapts.
RENAMED = frozenset({"gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"})


def add_adapter(
    model: Any,
    *,
    r: int = 16,
    alpha: float = 32.0,
    target_modules: Sequence[str] | None = None,
    dropout: float = 0.0,
) -> float:
    """Freeze a model and insert a trainable adapter of rank `r`.

    Return the share of the weights in matrices, except embeddings and head, without an adapter.
    target_modules: names of linear layers (q_proj, down_proj, ...) and of expert parameters
    (gate_up_proj); None: all but the output head. Weights that are frozen before get none, because
    a text never reaches them.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ImportError(EXTRAS["peft"]) from error
    if dropout:
        raise ValueError(f"expected policy.lora.dropout=0, got {dropout}: it changes log-probs")
    linear, experts = _linear_layers(model), _experts(model)
    names = sorted({_last(name) for name in (*linear, *experts)})
    unknown = sorted(set(target_modules or ()) - set(names))
    if unknown:
        raise ValueError(f"expected policy.lora.target_modules among {names}, got {unknown}")
    wanted = set(target_modules or names)
    layers = {name for name in linear if _last(name) in wanted}
    parameters = [name for name in experts if _last(name) in wanted]
    if experts:
        renamed = {name for name in layers if _last(name) in RENAMED}
        layers -= renamed
        parameters += [f"{name}.weight" for name in renamed]
    targets = {_last(name) for name in layers}
    if any(_last(name) in targets for name, _ in model.named_modules() if name not in layers):
        targets = layers  # for example in an image encoder
    config = LoraConfig(
        r=r,
        lora_alpha=alpha,
        target_modules=sorted(targets),
        target_parameters=sorted(parameters) or None,
        lora_dropout=0.0,
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in linear.values()),
        task_type="CAUSAL_LM",
    )
    sizes = {name: p.numel() for name, p in matrices(model).items()}
    inject_adapter_in_model(config, model, adapter_name=TRAINED)
    for weight in trained_weights(model).values():  # bfloat16 would lose small steps
        weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))
    _check_merge(model)
    adapted = adapted_weights(model)
    return sum(size for name, size in sizes.items() if name not in adapted) / sum(sizes.values())


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _linear_layers(model: Any) -> dict[str, Any]:
    """Return the trained linear layers by name, without the output head; GPT-2 names them Conv1D.

    Layers of `read_by` are left out: an adapter acts in the layer's forward only.
    """
    head = model.get_output_embeddings()
    left_out = {
        f"{name}.{layer}" for name, module in model.named_modules() for layer in read_by(module)
    }
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, LINEAR)
        and layer is not head
        and layer.weight.requires_grad
        and (type(layer) in LINEAR or _multiplies(layer))
        and name not in left_out
    }


def read_by(module: nn.Module) -> Collection[str]:
    """Return the names of the linear layers of a module whose weights its own code reads.

    The fused kernels of a Mamba layer (recognised by its parameters A_log and D) read dt_proj in
    version 1, and out_proj in version 2, which has no dt_proj.
    """
    if {"A_log", "D"} <= {name for name, _ in module.named_parameters(recurse=False)}:
        return ("dt_proj",) if hasattr(module, "dt_proj") else ("out_proj",)
    return READ_BY_CLASS.get(type(module).__name__, ())


@torch.no_grad()
def _multiplies(layer: Any) -> bool:
    """Return whether a subclass of nn.Linear computes W x + b; routers also choose experts."""
    x = torch.ones_like(layer.weight[:1])  # [1, in]
    out = layer(x)
    return isinstance(out, Tensor) and is_close(out, F.linear(x, layer.weight, layer.bias))


def _experts(model: nn.Module) -> list[str]:
    """Return the names of the trained parameters that hold a matrix for each expert."""
    return [
        f"{module_name}.{name}"
        for module_name, module in model.named_modules()
        for name, p in module.named_parameters(recurse=False)
        if p.ndim == 3 and p.requires_grad and not isinstance(module, nn.Conv1d)
    ]


def _check_merge(model: Any) -> None:
    """Raise ValueError if an adapter cannot be added to its weight; try one of equal layers."""
    base, tried = base_weights(model), set()
    for name, layer in _layers(model).items():
        adapted = _adapted_name(name, layer)
        kind = re.sub(r"\d+", "#", adapted)
        if kind not in tried:
            tried.add(kind)
            got = tuple(layer.get_delta_weight(TRAINED).shape)
            want = tuple(base[adapted].shape) if adapted in base else None
            if got != want:
                raise ValueError(
                    f"{type(model).__name__}: LoRA cannot be merged into {adapted}: expected an "
                    f"update of shape {want}, got {got}; leave it out of policy.lora.target_modules"
                )


def matrices(model: Any) -> dict[str, nn.Parameter]:
    """Return the trained matrices of a model by name, without embeddings and output head."""
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    left_out = {id(p) for m in (*tables, model.get_output_embeddings()) for p in m.parameters()}
    return {
        name: p
        for name, p in model.named_parameters()
        if p.requires_grad
        and p.ndim > 1
        and min(p.shape[-2:]) > 1
        and not name.endswith("bias")  # biases of experts: a row per expert
        and id(p) not in left_out
    }


def adapted_weights(model: nn.Module) -> set[str]:
    """Return the names, as without an adapter, of the weights that the adapter changes."""
    return {_adapted_name(name, layer) for name, layer in _layers(model).items()}


def _layers(model: nn.Module) -> dict[str, Any]:
    return {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}


def trained_weights(model: nn.Module, adapter: str | None = TRAINED) -> dict[str, nn.Parameter]:
    """Return the weights of an adapter by name, without the adapter's name in it."""
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


def reference_scorer(scorer: Scorer, *, moves: bool) -> AdapterScorer:
    """Return the scorer of a reference on the policy's model, without its adapter.

    With a frozen copy of the adapter, if it is not at zero any more or the reference `moves`.
    """
    bare = is_zero(scorer.model) and not moves
    return AdapterScorer(scorer, None if bare else freeze_copy(scorer.model))


def base_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of the model under the adapter."""
    weights = {name: value for name, value in model.state_dict().items() if ".lora_" not in name}
    return {_plain_name(name): value for name, value in weights.items()}


def _plain_name(name: str) -> str:
    """Return the name that a layer or weight has without an adapter."""
    return re.sub(r"(\.base_layer)+(?=\.|$)", "", name)  # experts: a layer per parameter


def _adapted_name(name: str, layer: Any) -> str:
    """Return the name of the weight that an adapter's layer changes."""
    return f"{_plain_name(name)}.{getattr(layer, 'parameter_name', 'weight')}"


@torch.no_grad()
def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the state dict with W + alpha/r * B A for W; without an adapter, unchanged."""
    layers = {_adapted_name(name, layer): layer for name, layer in _layers(model).items()}
    for name, weight in base_weights(model).items():
        layer = layers.get(name)
        if layer is None:
            yield name, weight
        else:
            yield name, (weight + layer.get_delta_weight(TRAINED)).to(weight.dtype)


def save_adapter(model: Any, folder: Path, *, base: str = "") -> None:
    """Write the adapter as peft does; `base`: sha256 of the weights that it belongs to."""
    write_adapter(trained_weights(model), adapter_config(model), folder, base=base)


def adapter_config(model: Any) -> Any:
    """Return peft's config of the adapter, ready to be written."""
    config = copy.deepcopy(model.peft_config[TRAINED])
    config.base_model_name_or_path, config.inference_mode = model.name_or_path, True
    config.target_modules = sorted(config.target_modules)  # a set has no fixed order
    if config.target_parameters:
        config.target_parameters = sorted(config.target_parameters)
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
    """Read what `save_adapter` wrote; raise ValueError for another base or other layers."""
    from safetensors import safe_open

    mine, path = trained_weights(model), folder / WEIGHTS
    with readable(path, "adapter", remedy=TAKE_CHECKPOINT), safe_open(path, framework="pt") as file:
        theirs = (file.metadata() or {}).get("base", "")
        named = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    check_base(folder, expected=base, got=theirs)
    weights = {name.removeprefix("base_model.model."): weight for name, weight in named.items()}
    if differ := sorted(weights.keys() ^ mine.keys()):
        fault = f"{differ[:3]} is in one of them"
        raise ValueError(f"{folder} does not fit the model: {fault}; {TAKE_CHECKPOINT}")
    check_finite(path, weights, remedy=TAKE_CHECKPOINT)
    for name, weight in mine.items():
        put(weight, weights[name])


class AdapterWeights(ModelWeights):
    """The weights of an adapter; the model under it never changes."""

    needs_base = True

    def __init__(self, model: Any, adapter: str | None = TRAINED) -> None:
        super().__init__(model)
        self.adapter = adapter

    def stream(self, *, trained: bool = False, half: torch.dtype | None = None) -> WeightStream:
        """Return the weights of the merged model, or only the adapter's if `trained`."""
        if trained:
            return super().stream(trained=True, half=half)
        changed = partial(merged_weights, self.model)
        return WeightStream(base_weights(self.model), changed=changed, model=self.model, half=half)

    def named(self) -> dict[str, nn.Parameter]:
        """Return the weights of the adapter, by name."""
        return trained_weights(self.model, self.adapter)

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights of the adapter, by name."""
        return dict(self.named())

    def ordinary_model(self) -> Any:
        """Return an ordinary model with the adapter merged."""
        with torch.device("meta"):  # without memory: the weights are only written
            plain = type(self.model)(self.model.config)
        plain.load_state_dict(dict(merged_weights(self.model)), assign=True)
        plain.tie_weights()
        plain.generation_config = self.model.generation_config
        return plain

    def export(self, folder: Path, tokenizer: Any, *, base: str = "") -> None:
        """Write the merged model; the adapter is in a subfolder, so that none applies it twice."""
        super().export(folder, tokenizer)
        save_adapter(self.model, folder / "adapter", base=base)
        make_readable(folder)

    def save(self, folder: Path, tokenizer: Any, *, base: str = "") -> None:
        """Write the adapter into the folder of a checkpoint."""
        save_adapter(self.model, folder / "adapter", base=base)

    def load(self, folder: Path, *, base: str = "") -> None:
        """Read the adapter of a checkpoint or of a finished run."""
        places = [folder / "adapter", folder / "model" / "adapter"]
        place = next((place for place in places if place.is_dir()), places[0])
        load_adapter(self.model, place, base=base)
