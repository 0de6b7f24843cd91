"""What a reference may be, how much of it is scored at a time, and how long sequences may get."""

import json
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from contracts import make_policy, rollout
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

from envs.transforms import RetrieveKL
from policies import scorer
from policies.load import load_policy, load_reference
from policies.models import EMBEDDED, quiet
from policies.scorer import Scorer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen2"), "qwen2")


def changed(folder: Path, target: Path, *, rows: int | None = None, token: str = "") -> Path:
    """Save the checkpoint again, its embedding resized or its vocabulary longer by a token."""
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if token:
            tokenizer.add_tokens([token])
        if rows:
            torch.manual_seed(0)
            model.resize_token_embeddings(rows, mean_resizing=False)
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    return target


def refusal(policy, name: Path | str) -> str:
    with pytest.raises(ValueError, match=r"reference|found") as caught:
        load_reference(policy, str(name))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Vocabulary


def test_a_foreign_vocabulary_is_refused_smaller_or_larger(folder):
    tiny, qwen = make_policy(), load_policy(str(folder))
    assert len(tiny.tokenizer) > len(qwen.tokenizer)
    for policy, name in ((tiny, folder), (qwen, "tiny")):
        text = refusal(policy, name)
        assert "policy's vocabulary" in text
        assert "same family" in text


def test_two_tokens_that_changed_places_are_another_vocabulary(folder, tmp_path):
    target = changed(folder, tmp_path / "swapped")
    state = json.loads((target / "tokenizer.json").read_text())
    vocabulary = state["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (target / "tokenizer.json").write_text(json.dumps(state))
    assert f"id {vocabulary['b']} is 'b' in it and 'a'" in refusal(load_policy(str(folder)), target)


def test_rows_that_pad_an_embedding_are_no_part_of_the_vocabulary(folder, tmp_path):
    policy = load_policy(str(folder), max_new_tokens=5)
    wide = changed(folder, tmp_path / "wide", rows=384)
    batch = rollout(policy, count=2)
    batch = RetrieveKL(ref_model=load_reference(policy, str(wide)), add_to_reward=False)(batch)
    # The logits of the tokens are equal, so a token is as likely as in the policy but for what
    # the 54 new rows take away.
    kl = batch["kl_penalty"][batch["loss_mask"]]
    assert (kl > 0).all()
    padded = load_policy(str(wide), max_new_tokens=5)
    assert load_reference(padded, str(folder)).found.folder == folder
    longer = load_policy(str(changed(folder, tmp_path / "longer", token="<extra>", rows=384)))
    assert load_reference(longer, str(wide)).found.folder == wide
    text = refusal(longer, folder)
    assert "330 embeddings" in text
    assert "'<extra>' has id 330" in text


def test_the_reference_is_looked_for_where_the_policy_was(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    text = refusal(load_policy(str(folder), source="hub"), EMBEDDED)
    assert "not found" in text
    assert "same family" in refusal(load_policy(str(folder)), EMBEDDED), "the embedded copy"


# Parts


def test_the_reference_is_scored_in_parts_of_the_updates_size(monkeypatch):
    policy = make_policy()
    batch = rollout(policy)
    whole = load_reference(policy)(batch)["ref_log_probs", "full"]
    areas, inner = [], Scorer.hidden
    monkeypatch.setattr(
        Scorer, "hidden", lambda self, lay: areas.append(lay.input_ids.numel()) or inner(self, lay)
    )
    for limit, least in ((200, 2), (1, 16), (10**6, 1)):
        areas.clear()
        parts = load_reference(policy, micro_batch_tokens=limit)(batch)
        torch.testing.assert_close(parts["ref_log_probs", "full"], whole, atol=1e-5, rtol=0)
        assert len(areas) >= least
        assert max(areas) <= limit or limit == 1
    order = torch.arange(16).view(4, 4).T.flatten()  # the samples of a prompt lie apart
    apart = load_reference(policy, micro_batch_tokens=200)(batch[order])
    torch.testing.assert_close(apart["ref_log_probs", "full"], whole[order], atol=1e-5, rtol=0)


# Lengths


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_sequences_past_the_models_positions_are_refused(kind, tmp_path):
    name = str(make_checkpoint(tmp_path, kind))
    with pytest.raises(ValueError, match=r"_prompt_tokens=200 .*_new_tokens=57.* is 256") as e:
        load_policy(name, max_prompt_tokens=200, max_new_tokens=57)
    assert "257 tokens" in str(e.value)
    load_policy(name, max_prompt_tokens=200, max_new_tokens=56)
    with pytest.raises(ValueError, match=r"policy\.max_new_tokens=256 make"):
        load_policy(name, max_new_tokens=256)
    policy = load_policy(name, max_new_tokens=250)
    with pytest.raises(ValueError, match=r"prompt \d+ of the batch .*250.*=256"):
        rollout(policy)  # its prompts have more than 6 tokens
    ids = torch.zeros(1, 300, dtype=torch.int64)
    mask = torch.arange(300) < 257
    with pytest.raises(ValueError, match=r"257 tokens.* is 256"):
        policy.scorer(ids, mask[None])
    policy.scorer(ids, (mask & (torch.arange(300) > 0))[None])


# Head


def test_half_precision_is_no_other_head(folder, monkeypatch):
    inner = scorer.Head.__call__
    for options in ({"dtype": "bfloat16"}, {"autocast": "bfloat16"}):
        load_policy(str(folder), **options)
        monkeypatch.setattr(scorer.Head, "__call__", lambda self, h: 1.1 * inner(self, h))
        with pytest.raises(ValueError, match="output embeddings"):
            load_policy(str(folder), **options)
        monkeypatch.undo()
