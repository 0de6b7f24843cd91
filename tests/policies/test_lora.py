"""The reference and the adapter: what is trained and saved, and what either may be.

Without its adapter a model is the one it started from; a reference follows the policy if it is to.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support.checkpoints import KINDS, make_checkpoint
from support.policies import (
    attended,
    make_lora_policy,
    make_policy,
    move_adapter,
    plain_log_probs,
    rollout,
)
from support.runs import metrics
from support.small_runs import IN_ITERATION_4, Counted, crash, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from envs.transforms.kl import RetrieveKL
from policies.critic import Critic
from policies.load import load_policy, load_reference, weights_of
from policies.models import lora
from policies.models.find import quiet
from policies.models.reward_model import load_reward_model
from trainer.checkpoint import Checkpoints, save_model
from trainer.kl.reference import Reference
from trainer.optimizer import make_optimizer
from trainer.runtime import Runtime

# PeftModel asks transformers by an old name.
OLD_NAME = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


IDS = torch.arange(4, 36).reshape(2, 16)
EVERY = torch.ones_like(IDS, dtype=torch.bool)


# The reference


def flat(batch, key) -> torch.Tensor:
    return batch[key][batch["masks", "all_attention_mask"]]


@pytest.mark.parametrize("pad_model_input", [True, False])
def test_with_the_adapter_off_it_is_the_start_policy(pad_model_input):
    """Compare with plain forwards of a model that never had an adapter."""
    start, policy = make_lora_policy(adapter=False, double=True), make_lora_policy(double=True)
    batch = rollout(policy)  # groups of one prompt: the shared layout
    reference = load_reference(policy)
    move_adapter(policy)
    ids, masks = batch["tokens"].full, batch["masks"]
    pack = {} if pad_model_input else {"pack": True}
    keys = (masks.all_attention_mask, masks.all_response_mask, 1.0, batch["group_id"])
    scored = reference._log_probs(ids, *keys, **pack)  # [B, T]
    wanted = [plain_log_probs(start, ids, 1.0) * response for ids, response, *_ in attended(batch)]
    gap = scored[masks.all_attention_mask] - torch.cat(wanted)
    assert gap.abs().max() < 3e-6  # the last step is float32
    mine = policy.get_new_version(generate=False, inplace=False)(batch)
    moved = [plain_log_probs(policy, ids, 1.0) for ids, *_ in attended(batch)]
    assert (flat(mine, ("log_probs", "full")) - torch.cat(moved)).abs().max() < 1e-5
    assert (torch.cat(moved) - torch.cat(wanted)).abs().max() > 0.1


def test_a_fresh_reference_shares_all_weights_and_has_a_kl_of_exactly_0():
    policy = make_lora_policy()
    reference = load_reference(policy)
    mine = {p.data_ptr() for p in policy.model.parameters()}
    assert {p.data_ptr() for p in reference.scorer.parameters()} == mine
    scores = policy.scorer(IDS, EVERY, reference=reference.scorer)
    assert torch.equal(scores.log_probs, reference.scorer(IDS, EVERY).log_probs)
    assert not scores.divergence.any()


def test_a_reference_that_moves_adds_a_frozen_adapter_alone():
    policy = make_lora_policy()
    mine = {p.data_ptr() for p in policy.model.parameters()}
    moving = load_reference(policy, moves=True).scorer.parameters()
    more = [p for p in moving if p.data_ptr() not in mine]
    adapter = lora.trained_weights(policy.model).values()
    assert sum(p.numel() for p in more) == sum(p.numel() for p in adapter)
    assert not any(p.requires_grad for p in more)


@pytest.mark.parametrize("again", [False, True])
def test_the_exact_kl_has_the_gradient_that_a_separate_reference_gives(again):
    """The reference runs through the same layers, between the policy's forward and backward.

    `again`: the backward computes the policy's layers again.
    """
    policy = make_lora_policy(double=True, gradient_checkpointing=again)
    twin = make_lora_policy(double=True)
    move_adapter(policy)
    pairs = (lora.trained_weights(p.model).values() for p in (twin, policy))
    for mine, theirs in zip(*pairs, strict=True):
        mine.data.copy_(theirs)
    separate = make_lora_policy(adapter=False, double=True).scorer
    own = lora.AdapterScorer(policy.scorer, None)
    kl, grads = [], []
    for one, reference in ((policy, own), (twin, separate)):
        group = torch.zeros(2, dtype=torch.int64)
        scores = one.scorer.train()(IDS, EVERY, reference=reference, group_id=group)
        trained = list(lora.trained_weights(one.model).values())
        loss = scores.log_probs.sum() + 3 * scores.divergence.sum()
        kl.append(scores.divergence)
        grads.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)]))
    torch.testing.assert_close(*kl, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-9)
    assert kl[1].sum() > 1
    assert grads[1].norm() > 1
    assert all((".lora_" in n) == p.requires_grad for n, p in policy.model.named_parameters())


def test_an_adapter_that_has_moved_is_copied():
    policy = make_lora_policy()
    move_adapter(policy)
    batch = rollout(policy)
    reference = load_reference(policy)
    first = reference(batch)["ref_log_probs", "full"]
    mine = policy.get_new_version(generate=False, inplace=False)(batch)["log_probs", "full"]
    kept = batch["masks", "all_response_mask"]
    assert torch.equal(first[kept], mine[kept])
    move_adapter(policy, seed=1)
    assert torch.equal(reference(batch)["ref_log_probs", "full"], first)
    again = load_reference(policy)(batch)["ref_log_probs", "full"]
    assert (again - first)[kept].abs().max() > 0.1
    assert torch.equal(reference(batch)["ref_log_probs", "full"], first), "copies do not meet"


# What is trained and saved


def step(policy, optimizer, seed: int) -> None:
    ids = (IDS + seed) % 40 + 4
    scores = policy.scorer(ids, EVERY)
    value = torch.zeros(()) if scores.values is None else (scores.values - 1).square().mean()
    (value - scores.log_probs.mean()).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("critic", [None, "separate"])
def test_a_checkpoint_holds_the_adapter_and_goes_on_to_the_bit(tmp_path, critic):
    def start():
        policy = make_lora_policy()
        if critic:
            policy.scorer.critic = Critic(policy.scorer, kind=critic)
        optimizer = make_optimizer(policy.scorer, lr=1e-2, weight_decay=0.1)
        return policy, optimizer, Checkpoints(Runtime(tmp_path), policy, optimizer)

    policy, optimizer, saved = start()
    base = {n: p.clone() for n, p in policy.model.named_parameters() if ".lora_" not in n}
    torch.manual_seed(1)  # the adapter of the second one starts elsewhere
    other, fresh, found = start()
    for seed in range(3):
        step(policy, optimizer, seed)
    saved.save(3, {})
    folder = found.newest()
    assert not (folder / "model").exists()
    names = load_file(folder / "adapter" / lora.WEIGHTS)
    assert len(names) == len(lora.trained_weights(policy.model))
    found.restore(folder)
    step(policy, optimizer, 3)
    step(other, fresh, 3)
    assert not lora.is_zero(policy.model)
    named = dict(other.scorer.named_parameters())
    assert all(torch.equal(p, named[name]) for name, p in policy.scorer.named_parameters())
    assert all(torch.equal(p, base[n]) for n, p in policy.model.named_parameters() if n in base)


@OLD_NAME
@pytest.mark.parametrize("kind", KINDS)
def test_the_final_model_is_merged_and_the_adapter_is_pefts(kind, tmp_path):
    from peft import PeftModel

    start = make_checkpoint(tmp_path / "start", kind)
    policy = load_policy(str(start), lora={"r": 4})
    move_adapter(policy)
    save_model(policy, tmp_path / "model")
    ids = torch.arange(5, 25)[None]
    with quiet(), torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        base = AutoModelForCausalLM.from_pretrained(start)
        names = set(load_file(tmp_path / "model" / "model.safetensors"))
        assert names == set(load_file(start / "model.safetensors"))
        mine, theirs, before = (m(input_ids=ids).logits for m in (policy.model, plain, base))
        adapted = PeftModel.from_pretrained(base, tmp_path / "model" / "adapter")
        torch.testing.assert_close(adapted(input_ids=ids).logits, mine, rtol=0, atol=1e-5)
    torch.testing.assert_close(theirs, mine, rtol=0, atol=2e-4)
    assert (before - mine).abs().max() > 0.1
    assert plain.generation_config.eos_token_id == base.generation_config.eos_token_id
    again = load_policy(str(tmp_path / "model"), lora={"r": 2})  # the next run of a chain
    with torch.no_grad():
        assert torch.equal(again.model(input_ids=ids).logits, theirs)


def test_bfloat16_weights_have_a_float32_adapter():
    adapter = lora.trained_weights(make_lora_policy(dtype="bfloat16").model).values()
    assert {p.dtype for p in adapter} == {torch.float32}


# Refusals


@pytest.mark.parametrize(
    ("load", "options", "named"),
    [
        (load_policy, {"dropout": 0.1}, "dropout"),
        (load_policy, {"target_modules": ["q_proj", "qproj"]}, "target_modules.*'qproj'"),
        (load_policy, {"target_modules": ["lm_head"]}, "target_modules.*'lm_head'"),
        (load_reward_model, {}, "r=0"),
    ],
)
def test_adapters_that_cannot_be_right_are_refused(load, options, named):
    with pytest.raises(ValueError, match=rf"policy\.lora\.{named}"):
        load("tiny", lora={"r": 4, **options})


def test_target_modules_are_those_named():
    policy = load_policy("tiny", lora={"r": 3, "target_modules": ["q_proj", "v_proj"]})
    named = lora.trained_weights(policy.model)
    assert {name.split(".")[-3] for name in named} == {"q_proj", "v_proj"}
    assert {min(p.shape) for p in named.values()} == {3}


def test_an_adapter_of_other_weights_is_refused(tmp_path):
    policy = make_lora_policy()
    lora.save_adapter(policy.model, tmp_path, base="a" * 64)
    with pytest.raises(ValueError, match=r"bbbb.*aaaa"):
        lora.load_adapter(policy.model, tmp_path, base="b" * 64)
    other = load_policy("tiny", lora={"r": 4, "target_modules": ["q_proj"]})
    with pytest.raises(ValueError, match="down_proj"):
        lora.load_adapter(other.model, tmp_path, base="a" * 64)


def test_without_peft_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    load_policy("tiny", lora={"r": 0})
    with pytest.raises(ImportError, match=r"\.\[lora\]"):
        load_policy("tiny", lora={"r": 4})


# A model of its own as the reference.


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen2"), "qwen2")


def swapped(folder: Path, target: Path) -> Path:
    """Save the checkpoint with the ids of two tokens exchanged."""
    shutil.copytree(folder, target)
    state = json.loads((target / "tokenizer.json").read_text())
    vocabulary = state["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (target / "tokenizer.json").write_text(json.dumps(state))
    return target


def test_a_reference_with_another_vocabulary_is_refused(folder, tmp_path):
    tiny, qwen = make_policy(), load_policy(str(folder))
    assert len(tiny.tokenizer) > len(qwen.tokenizer)
    for policy, name in ((tiny, folder), (qwen, "tiny"), (qwen, swapped(folder, tmp_path / "b"))):
        with pytest.raises(ValueError, match="vocabulary"):
            load_reference(policy, str(name))


def test_rows_that_pad_an_embedding_are_no_part_of_the_vocabulary(folder, tmp_path):
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder)
        torch.manual_seed(0)
        model.resize_token_embeddings(384, mean_resizing=False)
        model.save_pretrained(tmp_path)
        AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    policy = load_policy(str(folder), max_new_tokens=5)
    batch, reference = rollout(policy, count=2), load_reference(policy, str(tmp_path))
    batch = RetrieveKL(reference)(batch)
    # The logits of the tokens are equal, so a token is as likely as in the policy but for what
    # the 54 new rows take away.
    assert (batch["kl_penalty"][batch["loss_mask"]] > 0).all()


# Following the policy


def moved(policy, seed: int) -> dict[str, torch.Tensor]:
    """Give the policy other weights; return them."""
    generator = torch.Generator().manual_seed(seed)
    named = weights_of(policy.scorer).named()
    for p in named.values():
        p.data += torch.randn(p.shape, generator=generator) * 0.1
    return {name: p.detach().clone() for name, p in named.items()}


def fresh(kind: str, **options) -> tuple:
    """Return a policy, with LoRA or without, and its reference."""
    policy = load_policy("tiny", max_new_tokens=5, lora={"r": 4 if kind == "lora" else 0})
    return policy, Reference(policy, load_reference(policy, moves=True), **options)


def theirs(reference: Reference) -> dict[str, torch.Tensor]:
    return {n: p.clone() for n, p in weights_of(reference.scorer).named().items()}


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("decay", [0.0, 0.75])
def test_a_reference_follows_by_its_formula_when_it_is_due_and_is_saved(kind, decay):
    policy, reference = fresh(kind, every=3, decay=decay)
    want = {name: p.double() for name, p in theirs(reference).items()}
    for iteration in range(1, 8):
        now = moved(policy, iteration)
        reference.refresh(iteration)
        if iteration % 3 == 0:
            want = {n: decay * w + (1 - decay) * now[n].double() for n, w in want.items()}
        got = theirs(reference)
        assert all(
            (got[n].double() - want[n]).abs().max() < (1e-6 if decay else 1e-9) for n in want
        )
        assert bool(reference.state_dict()) == (iteration >= 3)
    assert max((got[n] - now[n]).abs().max() for n in want) > 0.05
    _, other = fresh(kind, every=3, decay=decay)
    other.moved = True
    for name, value in reference.state_dict().items():
        other.state_dict()[name].copy_(value)
    assert all(torch.equal(p, got[n]) for n, p in theirs(other).items())
    assert other.state_dict().keys() == got.keys()


@pytest.mark.runs
def test_after_a_reset_the_kl_starts_at_0_again_and_a_resumed_run_has_its_reference(tmp_path):
    """Stopped in iteration 4 and resumed from 3, after the reference moved in iteration 2."""
    train(tmp_path / "straight", refresh=2)
    rows = metrics(tmp_path / "straight")
    kl = [row["kl/ref_k3"] for row in rows[1:]]
    assert max(kl[0], kl[2]) < 1e-8
    assert min(kl[1], kl[3]) > 1e-5
    train(tmp_path / "cut", Counted(IN_ITERATION_4, crash), refresh=2)
    train(tmp_path / "cut", resume=True, refresh=2)
    assert metrics(tmp_path / "cut") == rows


def test_an_average_in_half_precision_is_refused(folder):
    half = load_policy(str(folder), dtype="bfloat16")
    with pytest.raises(ValueError, match=r"kl\.refresh_decay"):
        Reference(half, load_reference(half), every=1, decay=0.9)


# Lengths


def test_sequences_past_the_256_positions_of_a_model_are_refused(folder):
    name = str(folder)
    for key, sizes in (
        ("max_prompt_tokens", {"max_prompt_tokens": 200, "max_new_tokens": 57}),
        ("max_new_tokens", {"max_new_tokens": 256}),
    ):
        with pytest.raises(ValueError, match=rf"policy\.{key}"):
            load_policy(name, **sizes)
    with pytest.raises(ValueError, match=r"prompt \d+ has .*=6"):
        rollout(load_policy(name, max_new_tokens=250))  # its prompts have more than 6 tokens


# An adapter that somebody else trained


@OLD_NAME
def test_an_adapter_of_peft_is_a_start_model_and_a_reference(tmp_path, monkeypatch):
    """Its logits are those of peft; the merged model is an ordinary folder, built once."""
    monkeypatch.setenv("LEASH_CACHE", str(tmp_path / "cache"))
    base = make_checkpoint(tmp_path / "base", "qwen2")
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    policy = load_policy(str(tmp_path / "adapter"))
    with torch.no_grad():
        expected = adapted(IDS).logits
        torch.testing.assert_close(policy.model(IDS).logits, expected, atol=1e-5, rtol=1e-5)
    start = load_policy(str(base))
    reference = load_reference(start, str(tmp_path / "adapter"))
    scores = [each.scorer(IDS, EVERY).log_probs for each in (reference, policy)]
    assert torch.equal(*scores)
    assert policy.files.sha256 == load_policy(str(tmp_path / "adapter")).files.sha256
    shutil.rmtree(base)
    with pytest.raises(ValueError, match="base_model_name_or_path"):
        load_policy(str(tmp_path / "adapter"))


@OLD_NAME
@pytest.mark.parametrize("place", ["base", "adapter"])
def test_a_merged_adapter_is_of_the_files_as_they_are_now(tmp_path, monkeypatch, place):
    """The template is the adapter's where that folder has a tokenizer; the config is the base's."""
    monkeypatch.setenv("LEASH_CACHE", str(tmp_path / "cache"))
    base = make_checkpoint(tmp_path / "base", "qwen2")
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    if place == "adapter":
        AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "adapter")
    before = load_policy(str(tmp_path / "adapter"))
    template = "{{ 'new' }}" + before.renderer.template
    (tmp_path / place / "chat_template.jinja").write_text(template)
    settings = json.loads((base / "config.json").read_text()) | {"rms_norm_eps": 0.5}
    (base / "config.json").write_text(json.dumps(settings))
    after = load_policy(str(tmp_path / "adapter"))
    assert after.model.config.rms_norm_eps == 0.5
    assert after.renderer.template == template


@OLD_NAME
@pytest.mark.parametrize("lacks", ["layers.1", "magnitude_vector", "base"])
def test_an_adapter_that_is_not_whole_is_refused(lacks, tmp_path, monkeypatch):
    """It lacks the weights of a layer, or DoRA's vectors, or its base is an adapter of it."""
    monkeypatch.setenv("LEASH_CACHE", str(tmp_path / "cache"))
    base, folder = make_checkpoint(tmp_path / "base", "qwen2"), tmp_path / "adapter"
    dora = lacks == "magnitude_vector"
    config = LoraConfig(r=2, target_modules=["q_proj"], use_dora=dora)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    load_policy(str(folder))
    if lacks == "base":
        other = shutil.copytree(folder, tmp_path / "other")
        for one, two in ((folder, other), (other, folder)):
            about = json.loads((one / "adapter_config.json").read_text())
            about["base_model_name_or_path"] = str(two)
            (one / "adapter_config.json").write_text(json.dumps(about))
    else:
        path = folder / "adapter_model.safetensors"
        whole = load_file(path)
        save_file({name: w.clone() for name, w in whole.items() if lacks not in name}, path)
    names = {"base": r"adapter of itself", "layers.1": r"layers\.1.*lora_"}
    with pytest.raises(ValueError, match=names.get(lacks, lacks)) as error:
        load_policy(str(folder))
    assert "\n" not in str(error.value)
