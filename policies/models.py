"""Where a model comes from: a folder, the tiny model, the embedded copy, the hub's cache, the hub.

`find_model` names the place, `load_model` and `load_tokenizer` read it. The module itself is
torch-free. Left out on purpose: code from the hub is never run.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from policies.cache import build_once, cache_dir, sha256_file
from policies.quiet import quiet, readable

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

TINY = "tiny"
EMBEDDED = "HuggingFaceTB/SmolLM2-135M-Instruct"
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
PAD_NAMES = ("<|finetune_right_pad_id|>", "<pad>", "<|pad|>", "[PAD]", "<|endoftext|>", "<unk>")

Origin = Literal["folder", "tiny", "embedded", "cache", "hub"]


@dataclass(frozen=True)
class FoundModel:
    """A model in a local folder, where it came from, and the sha256 of its weights."""

    folder: Path
    origin: Origin
    sha256: str

    def about(self) -> dict[str, str]:
        """Return what status.json says of the model."""
        return {"name": str(self.folder), "origin": self.origin, "sha256": self.sha256}


def find_model(model: str, *, source: str = "auto") -> FoundModel:
    """Return where `model` is: a folder, "tiny", or a hub id; download it if it must be.

    Order: folder, tiny model, embedded copy, local hub cache, hub. `source="hub"` skips the
    embedded copy. A model that is nowhere is a one-line ValueError; HF_HUB_OFFLINE is honoured.

    >>> find_model("./no-such-folder")
    Traceback (most recent call last):
    ...
    ValueError: model ./no-such-folder: expected a folder with a config.json, there is none at ...
    """
    if source not in ("auto", "hub"):
        raise ValueError(f"expected source auto or hub, got {source!r}")
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return FoundModel(folder.absolute(), "folder", hash_weights(folder))
    if model == TINY:
        return _find_tiny()
    if fault := no_model(model):
        raise ValueError(fault)
    if model == EMBEDDED and source == "auto":
        from policies.embedded import find_embedded

        embedded = find_embedded()
        if embedded is not None:
            return embedded
    from policies.hub import find_on_hub

    return find_on_hub(model, embedded=model == EMBEDDED and source == "auto")


def _find_tiny() -> FoundModel:
    version = sha256_file(Path(__file__).with_name("tiny.py"))[:12]
    folder = cache_dir() / "models" / f"tiny-{version}"
    with quiet():
        manifest = build_once(folder, _build_tiny)
    return FoundModel(folder, "tiny", manifest["files"]["model.safetensors"]["sha256"])


def _build_tiny(folder: Path) -> dict[str, str]:
    from policies.tiny import build_tiny

    return build_tiny(folder)


def no_model(model: str) -> str | None:
    """Return why a name can be no model, without a look at the hub; None if it may be one."""
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return quantised(folder)
    named = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model) and not folder.is_dir()
    if named or model == TINY:
        return None
    model_of_run = (folder / "model" / "config.json").is_file() and folder / "model"
    return (
        f"model {model}: expected a folder with a config.json, there is none at "
        f"{folder.absolute()}; give {model_of_run or f'such a folder or a hub id like {EMBEDDED}'}"
    )


def quantised(folder: Path) -> str | None:
    """Return that the weights in a folder are quantised, which training would not see, or None."""
    try:
        config = json.loads((folder / "config.json").read_text())
        method = (config.get("quantization_config") or {}).get("quant_method", "some method")
        given = method if config.get("quantization_config") else None
        for path in () if given else folder.glob("*.safetensors"):
            with path.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            kinds = {part["dtype"] for name, part in header.items() if name != "__metadata__"}
            given = next((kind for kind in kinds if kind[:2] in ("F8", "F4", "F6")), given)
    except (OSError, ValueError, AttributeError, TypeError, OverflowError, KeyError, MemoryError):
        return None  # broken files are named where they are loaded
    told = "expected weights of 16 or 32 bits, which training changes"
    return given and f"{folder}: {told}, got quantised ones ({given}); name the model before that"


def too_few_positions(model: str, *, prompt: int | None, new: int) -> Iterator[str]:
    """Yield that the longest sequence does not fit into a local model, if it does not."""
    try:
        config = json.loads((Path(model).expanduser() / "config.json").read_text())
        most = config.get("text_config", config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):  # no local model, or one that load names broken
        return
    if isinstance(most, int) and (prompt or 1) + new > most:
        asked = f"policy.max_prompt_tokens={prompt} and " if prompt else ""
        yield (
            f"{asked}policy.max_new_tokens={new} make up to {(prompt or 1) + new} tokens, "
            f"{model} has max_position_embeddings {most}; lower one of them"
        )


def hash_weights(folder: Path) -> str:
    """Return the sha256 of a folder's weights: of the file, or of the list of the files' hashes.

    A file of the hub's cache is named by its sha256 and is not read.
    """
    files = sorted(next((found for p in WEIGHTS if (found := [*folder.glob(p)])), []))
    if not files:
        raise ValueError(
            f"{folder} has a config.json but no weights ({' or '.join(WEIGHTS)}); "
            "was the download or the save interrupted?"
        )
    hashes = {}
    for path in files:
        blob = path.resolve().name
        hashes[path.name] = blob if re.fullmatch("[0-9a-f]{64}", blob) else sha256_file(path)
    if len(hashes) == 1:
        return hashes.popitem()[1]
    lines = "".join(f"{digest}  {name}\n" for name, digest in hashes.items())
    return hashlib.sha256(lines.encode()).hexdigest()


def load_model(
    found: FoundModel, *, dtype: str = "float32", device: Any = None
) -> "PreTrainedModel":
    """Load a causal language model in eval mode, dropout 0, sdpa attention.

    `device=None` leaves it on the CPU. Weights missing from the folder, or a model that is not a
    causal language model, are a ValueError: nothing is ever left at random values.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"expected dtype float32, bfloat16 or float16, got {dtype!r}")
    local = {"local_files_only": True, "trust_remote_code": False}
    if fault := quantised(found.folder):
        raise ValueError(fault)
    with quiet():
        with readable(found.folder, "config.json"):
            config = AutoConfig.from_pretrained(found.folder, **local)
        _zero_dropout(config)
        if type(config) not in AutoModelForCausalLM._model_mapping:
            raise ValueError(
                f"{found.folder}: expected a causal language model, got a {config.model_type}"
            )
        with readable(found.folder, "weights"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                found.folder, config=config, dtype=getattr(torch, dtype),
                attn_implementation="sdpa", output_loading_info=True, **local,
            )  # fmt: skip
    model, info = loaded
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ValueError(
            f"{found.folder}: the weights lack {len(missing)} of the model's tensors, "
            f"{missing[0]} the first; is this a complete checkpoint of a {config.model_type}?"
        )
    return model.eval().to(device or "cpu")


def _zero_dropout(config: Any) -> None:
    """Set every dropout rate of a config, and of its text part, to 0."""
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in vars(part).items():
            if name.endswith(("dropout", "pdrop", "dropout_prob", "layerdrop")) and value:
                setattr(part, name, 0.0)


def load_tokenizer(found: FoundModel) -> "PreTrainedTokenizerFast":
    """Load a fast tokenizer with a pad token, checked against the model's embedding.

    Without a pad token of its own it pads with an unused special token, else with EOS; masks come
    from lengths, so EOS is still learnt. A token id past the embedding is a ValueError.
    """
    from transformers import AutoConfig, AutoTokenizer

    local = {"local_files_only": True, "trust_remote_code": False}
    if not any((found.folder / name).is_file() for name in VOCABULARIES):  # would load an empty one
        raise ValueError(f"{found.folder}: expected a tokenizer ({' or '.join(VOCABULARIES)}), got "
                         "none; copy it from the model that this one came from")  # fmt: skip
    with quiet(), readable(found.folder, "config.json"):
        rows = AutoConfig.from_pretrained(found.folder, **local).get_text_config().vocab_size
    with quiet(), readable(found.folder, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(found.folder, use_fast=True, **local)
    if not tokenizer.is_fast:
        raise ValueError(f"{found.folder}: expected a fast tokenizer (tokenizer.json), got a slow "
                         f"{type(tokenizer).__name__}; save it with its fast version")  # fmt: skip
    vocabulary = tokenizer.get_vocab()
    token, largest = max(vocabulary.items(), key=lambda item: item[1])
    if largest >= rows:
        raise ValueError(
            f"{found.folder}: token {token!r} has id {largest}, the model's embedding has {rows} "
            "rows; expected every id below that: is the tokenizer another model's?"
        )
    if tokenizer.pad_token_id is None:
        pad = next((name for name in PAD_NAMES if name in vocabulary), tokenizer.eos_token)
        if pad is None:
            raise ValueError(f"{found.folder}: the tokenizer has neither a pad nor an eos token; "
                             "set eos_token in tokenizer_config.json")  # fmt: skip
        tokenizer.pad_token = pad
    return tokenizer


def has_adapter(model: Any) -> bool:
    """Return whether there is a LoRA adapter in a model (see policies/lora.py)."""
    return any(hasattr(layer, "lora_A") for layer in model.modules())


def token_ids(source: Any, name: str) -> list[int]:
    """Return the ids that a config or tokenizer has under a name: none, one or several."""
    value = getattr(source, name, None)
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
