"""Tiny random checkpoints in the manners of the common families, and small data files.

Each kind has its own tokenizer style, template and special tokens; all are made here, offline.

qwen2  byte-level BPE, ChatML with a default system message, no generation tags, its own pad token
llama  byte-level BPE that adds a BOS, headers, content trimmed, two EOS ids, no pad token
gemma  pieces with metaspace and byte fallback, no system role, two EOS ids in generation_config
gpt2   byte-level BPE, pad == eos == the only special token, plain "User:" lines
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

KINDS = ("qwen2", "llama", "gemma", "gpt2")


TEXT = """The quick brown fox jumps over the lazy dog. What is the capital of France? It is Paris.
Tom has 3 apples and buys 4 more. How many apples does Tom have now? 3 + 4 = 7.
You are a helpful assistant. Sort the digits in ascending order. Hello, how are you today?
User: system user assistant model. Sure, here is a short answer to the question.
"""


LLAMA = ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id")


SPECIAL = {
    "qwen2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama": [f"<|{name}|>" for name in LLAMA],
    "gemma": ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
    "gpt2": ["<|endoftext|>"],
}


NAMED = {
    "qwen2": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "llama": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "gemma": {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")},
    "gpt2": {f"{name}_token": "<|endoftext|>" for name in ("bos", "eos", "pad")},
}


STOPS = {
    "qwen2": ["<|im_end|>", "<|endoftext|>"],
    "llama": ["<|end_of_text|>", "<|eot_id|>"],
    "gemma": ["<eos>", "<end_of_turn>"],
    "gpt2": ["<|endoftext|>"],
}


TEMPLATES = {
    "qwen2": (
        "{% if messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n'"
        " + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "llama": (
        "{{ bos_token }}{% for message in messages %}"
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
        " + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
        "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
        "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
    ),
    "gpt2": (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "{{ 'Assistant: ' + message['content'] + eos_token + '\\n' }}{% else %}"
        "{{ message['role'] | capitalize + ': ' + message['content'] + '\\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
    ),
}


def make_checkpoint(folder: Path, kind: str, *, head: int = 8) -> Path:
    """Write a tiny random checkpoint of a kind into a folder and return the folder.

    `head` is the size of an attention head; vLLM's CPU kernels start at 32.
    """
    assert kind in KINDS, f"expected one of {KINDS}, got {kind!r}"
    backend = _pieces() if kind == "gemma" else _byte_level(kind)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=TEMPLATES[kind],
        clean_up_tokenization_spaces=False,
        model_max_length=256,
        **NAMED[kind],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(KINDS.index(kind))
        model = _model(kind, tokenizer, head)
    stops = tokenizer.convert_tokens_to_ids(STOPS[kind])
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
    model.generation_config = GenerationConfig(eos_token_id=stops, **ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _byte_level(kind: str) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=_added(kind),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT.splitlines(), trainer)
    if kind == "llama":
        bos = "<|begin_of_text|>"
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, backend.token_to_id(bos))],
        )
    return backend


def _pieces() -> Tokenizer:
    """Return a BPE in sentencepiece's manner: spaces as a letter, unknown letters as bytes."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    byte_tokenizer = [*(chr(c) for c in range(33, 127)), "\u2581", "\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=[*_added("gemma"), *(f"<0x{byte:02X}>" for byte in range(256))],
        initial_alphabet=byte_tokenizer,
        show_progress=False,
    )
    backend.train_from_iterator(TEXT.splitlines(), trainer)
    # The trainer lists the byte pieces as special; sentencepiece has them as ordinary pieces.
    state = json.loads(backend.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] in SPECIAL["gemma"]]
    return Tokenizer.from_str(json.dumps(state))


def _added(kind: str) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False) for name in SPECIAL[kind]]


def _model(kind: str, tokenizer: Any, head: int) -> PreTrainedModel:
    shared = {
        "vocab_size": len(tokenizer),
        "initializer_range": 0.1,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if kind == "gpt2":
        shared |= {"n_positions": 256, "n_embd": 4 * head, "n_layer": 2, "n_head": 4}
    else:
        shared |= {
            "hidden_size": 4 * head,
            "head_dim": head,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": kind != "llama",
        }
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shared))


def byte_tokenizer(special: list[str], template: str | None = None, **names: str):
    """Return a fast tokenizer that has a token for each byte and for each special text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **names)
