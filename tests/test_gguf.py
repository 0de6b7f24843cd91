"""GGUF files of exported models: what transformers reads back is what went in."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from policies.load import load_policy
from trainer.modes.gguf_file import check_family, split_name, write_gguf

TEXTS = [
    "Sort the digits: 4071",
    "What's  7 + 5?\n\nI'll see.",
    "naïve 你好 123456 <|im_end|>x",
    "",
]
SIZES = {
    "vocab_size": 403,  # three more rows than tokens
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False, rms_norm_eps=1e-5),
    "llama_tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**SIZES, tie_word_embeddings=True),
}


def exported(folder, model):
    """Write an exported folder of a model with the tokenizer of the tiny one."""
    model.save_pretrained(folder)
    load_policy("tiny").tokenizer.save_pretrained(folder)
    return model


def ids() -> torch.Tensor:
    return torch.arange(40).reshape(2, 20) * 7 % 400


@pytest.mark.parametrize("name", ["tiny", *CONFIGS])
def test_a_file_read_back_is_the_same_model_and_tokenizer(name, tmp_path):
    torch.manual_seed(3)
    if name == "tiny":
        model = load_policy("tiny").model
    else:
        model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
        for parameter in model.parameters():  # norms and biases too
            torch.nn.init.normal_(parameter, std=0.2)
    exported(tmp_path, model)
    path = write_gguf(tmp_path, "f32", name="mine")
    told = {"gguf_file": path.name, "local_files_only": True}
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **told)
    with torch.no_grad():
        torch.testing.assert_close(again(ids()).logits, model(ids()).logits, atol=1e-4, rtol=1e-4)
    ours, theirs = (
        AutoTokenizer.from_pretrained(tmp_path),
        AutoTokenizer.from_pretrained(tmp_path, **told),
    )
    for text in TEXTS:
        assert theirs(text)["input_ids"] == ours(text)["input_ids"]
    chat = [{"role": "user", "content": "Hi"}]
    shown = [t.apply_chat_template(chat, tokenize=False) for t in (ours, theirs)]
    assert shown[0] == shown[1]
    assert theirs.eos_token == ours.eos_token


def test_half_precision_is_half_the_file_and_rounds(tmp_path):
    model = exported(tmp_path, load_policy("tiny").model)
    sizes = {kind: write_gguf(tmp_path, kind, name="x").stat().st_size for kind in ("f32", "f16")}
    matrices = sum(2 * p.numel() for p in model.parameters() if p.ndim > 1)
    assert sizes["f32"] - sizes["f16"] == pytest.approx(matrices, abs=2000)


def test_other_families_and_tokenizers_are_one_line():
    with pytest.raises(
        ValueError, match=r"llama, qwen2, qwen3 .* got a model of type gpt2"
    ) as said:
        check_family(GPT2Config())
    assert "\n" not in str(said.value)
    long = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match="rotary embeddings of type linear"):
        check_family(LlamaConfig(**SIZES, rope_parameters=long))
    with pytest.raises(ValueError, match=r"byte-level BPE .* got \['Metaspace'\]"):
        split_name({"pre_tokenizer": {"type": "Metaspace"}})
