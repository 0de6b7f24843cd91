"""What several pages use: small models, made once, and log-probs by plain forwards."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from checkpoints import make_checkpoint
from contracts import plain_log_probs
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM


@cache
def folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="specification-")


@cache
def checkpoint(kind: str) -> Path:
    """Return a folder with a tiny random model of a family."""
    return make_checkpoint(Path(folder().name) / kind, kind)


@cache
def opt(seed: int = 0) -> OPTForCausalLM:
    """Return a tiny OPT of random weights, as many tokens as the tokenizer of `no_template`."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "init_std": 0.2}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512}
    config = OPTConfig(vocab_size=len(no_template(-1)[1]), **sizes, **layers)
    return OPTForCausalLM(config).eval()


def no_template(seed: int = 0) -> tuple[Any, Any]:
    """Return a model and a tokenizer without a chat template that puts a BOS before every text."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint("llama"))
    tokenizer.chat_template = None
    tokenizer.pad_token = tokenizer.eos_token
    return (opt(seed) if seed >= 0 else None), tokenizer


def plain(wrapper: Any, td: TensorDict, key: Any, temperature: float = 1.0) -> Tensor:
    """Return log-probs [B, T] of dense rows by a plain forward each, 0 outside a mask."""
    full, attended = td["tokens"].full, td["masks"].all_attention_mask
    out = torch.zeros(full.shape, dtype=torch.float64)
    for ids, real, row in zip(full, attended, out, strict=True):
        row[real] = plain_log_probs(wrapper, ids[real], temperature)
    return out * td[key]
