"""An exported model as one GGUF file, for llama.cpp and what is built on it.

Names and metadata are those of gguf's own tables; the q and k of Llama are turned to the order of
its rotary embedding there. Left out on purpose: quantisation (llama-quantize does it), families and
tokenizers beyond those named below, scaled rotary embeddings.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2

FAMILIES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
KINDS = {
    "f32": (torch.float32, gguf.LlamaFileType.ALL_F32),
    "f16": (torch.float16, gguf.LlamaFileType.MOSTLY_F16),
}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {LLAMA3: "llama-bpe", QWEN2: "qwen2"}  # what llama.cpp calls them


def check(policy: Any) -> None:
    """Raise ValueError unless a policy can be a GGUF file."""
    check_family(policy.model.config)
    split_name(json.loads(policy.tokenizer.backend_tokenizer.to_str()))


def check_family(config: Any) -> None:
    """Raise ValueError unless a model of this configuration can be a GGUF file."""
    scaled = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if config.model_type not in FAMILIES:
        got = f"a model of type {config.model_type}"
    elif scaled != "default":
        got = f"rotary embeddings of type {scaled}"
    elif getattr(config, "use_sliding_window", False):
        got = "a sliding window"
    else:
        return
    raise ValueError(
        f"gguf= writes {', '.join(FAMILIES)} with plain rotary embeddings, got {got}; leave it out "
        "and convert the exported folder with llama.cpp's convert_hf_to_gguf.py"
    )


def split_name(backend: dict[str, Any]) -> str:
    """Return llama.cpp's name for how a tokenizer.json cuts a text before its merges.

    >>> split_name({"pre_tokenizer": {"type": "ByteLevel", "use_regex": True}})
    'gpt-2'
    """
    node = backend.get("pre_tokenizer") or {}
    parts = node.get("pretokenizers", [node])
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"] and parts[0]["use_regex"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and (name := SPLITS.get(parts[0]["pattern"].get("Regex"))):
        return name
    raise ValueError(
        f"gguf= writes byte-level BPE split as by GPT-2, SmolLM, Llama 3 or Qwen 2, got {kinds}; "
        "leave it out and convert the exported folder with llama.cpp's convert_hf_to_gguf.py"
    )


def write_gguf(folder: Path, kind: str, *, name: str) -> Path:
    """Write a GGUF file into the folder of an exported model, of what is there.

    `kind`: f32 or f16 of the matrices; vectors are float32.
    """
    config = AutoConfig.from_pretrained(folder)
    check_family(config)
    arch = FAMILIES[config.model_type]
    dtype, file_type = KINDS[kind]
    path = folder / f"model-{kind}.gguf"
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_name(name)
    writer.add_file_type(file_type)
    _add_shape(writer, config)
    _add_tokenizer(writer, folder, config.vocab_size)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    files = sorted(folder.glob("*.safetensors"))
    for key, tensor in (pair for file in files for pair in load_file(file).items()):
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert target is not None, key
        if config.model_type == "llama" and (".q_proj." in key or ".k_proj." in key):
            query = ".q_proj." in key
            tensor = _turned(
                tensor, config.num_attention_heads if query else config.num_key_value_heads
            )
        wide = dtype if tensor.ndim > 1 else torch.float32
        writer.add_tensor(target, np.ascontiguousarray(tensor.detach().to("cpu", wide).numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _turned(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows of q or k with the two halves of each head interleaved, as llama.cpp rotates."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _add_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, size: int) -> None:
    """Add tokens, merges, special ids and the chat template; rows beyond them are unused."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    backend = json.loads(Tokenizer.from_file(str(folder / "tokenizer.json")).to_str())
    pre, added = split_name(backend), {t["id"]: t for t in backend["added_tokens"]}
    texts = {index: text for text, index in tokenizer.get_vocab().items()}
    tokens, kinds = [], []
    for index in range(size):
        special = added[index]["special"] if index in added else None
        tokens.append(texts.get(index, f"[PAD{index}]"))
        plain = gguf.TokenType.NORMAL if index in texts else gguf.TokenType.UNUSED
        named = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
        kinds.append(plain if special is None else named)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = backend["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    for add, index in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
    ):
        if index is not None:
            add(index)
    empty = tokenizer("")["input_ids"]
    writer.add_add_bos_token(bool(empty) and empty[0] == tokenizer.bos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
