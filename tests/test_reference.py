"""What a reference may be, how it follows the policy, how much of it is scored at a time."""

import json
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from contracts import make_policy, one_process, rollout
from huggingface_hub import constants
from runs import metrics
from small_runs import IN_ITERATION_4, Counted, crash, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from envs.transforms import RetrieveKL
from policies import scorer
from policies.load import load_policy, load_reference
from policies.models import EMBEDDED, quiet
from policies.scorer import Scorer
from policies.weights import weights_of
from policies.wrappers.transformers_wrapper import TransformersWrapper
from trainer.checkpoint import Checkpoints
from trainer.optimizer import make_optimizer
from trainer.reference import NoReference, Reference


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
    assert "has id" in refusal(load_policy(str(folder)), target)


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
    assert "None of 330 there" in text
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
def test_a_reset_makes_the_reference_the_policy_when_it_is_due(kind):
    policy, reference = fresh(kind, every=3)
    start = theirs(reference)
    batch = rollout(policy)
    for iteration in range(1, 7):
        now = moved(policy, iteration)
        reference.refresh(iteration)
        if iteration in (1, 2):
            want = start
        elif iteration == 3:
            want = third = now
        else:
            want = now if iteration == 6 else third
        got = theirs(reference)
        assert all(torch.equal(got[name], want[name]) for name in want)
        assert bool(reference.state_dict()) == (iteration >= 3)
    mine = policy.get_new_version(generate=False, inplace=False)(batch)["log_probs", "full"]
    kept = batch["masks", "all_response_mask"]
    assert torch.equal(reference(batch)["ref_log_probs", "full"][kept], mine[kept])
    moved(policy, 7)
    later = policy.get_new_version(generate=False, inplace=False)(batch)["log_probs", "full"]
    assert (later - mine)[kept].abs().max() > 0.01
    assert torch.equal(reference(batch)["ref_log_probs", "full"][kept], mine[kept])


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_an_average_follows_by_its_formula(kind):
    policy, reference = fresh(kind, every=2, decay=0.75)
    want = {name: p.double() for name, p in theirs(reference).items()}
    for iteration in range(1, 9):
        now = moved(policy, iteration)
        reference.refresh(iteration)
        if iteration % 2 == 0:
            want = {n: 0.75 * w + 0.25 * now[n].double() for n, w in want.items()}
    got = theirs(reference)
    assert all((got[n].double() - want[n]).abs().max() < 1e-6 for n in want)
    assert max((got[n] - now[n]).abs().max() for n in want) > 0.05


def test_after_a_reset_the_kl_of_a_run_starts_at_0_again(tmp_path):
    train(tmp_path / "reset", refresh=2)
    rows = {row["progress/iteration"]: row for row in metrics(tmp_path / "reset")}
    train(tmp_path / "never")
    other = {row["progress/iteration"]: row for row in metrics(tmp_path / "never")}
    kl = [rows[i]["kl/ref_k3"] for i in (1, 2, 3, 4)]
    assert max(kl[0], kl[2]) < 1e-8
    assert min(kl[1], kl[3]) > 1e-5
    assert other[3]["kl/ref_k3"] > 1e-5
    assert rows[2]["kl/ref_k3"] == other[2]["kl/ref_k3"]


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_resumed_run_has_the_reference_it_had(decay, tmp_path):
    """Stopped in iteration 4 and resumed from 3, after the reference moved in iteration 2."""
    follow = {"refresh": 2, "decay": decay}
    train(tmp_path / "straight", **follow)
    shown = train(tmp_path / "cut", Counted(IN_ITERATION_4, crash), **follow)
    assert shown.endswith("boom\n")
    train(tmp_path / "cut", resume=True, **follow)
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "straight")


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_checkpoint_holds_a_reference_that_has_moved(kind, tmp_path):
    def parts():
        policy, reference = fresh(kind, every=1, decay=0.5)
        optimizer = make_optimizer(policy.scorer, lr=1e-3)
        runtime = one_process()
        runtime.folder = tmp_path
        return policy, reference, Checkpoints(runtime, policy, optimizer, reference=reference)

    policy, reference, saved = parts()
    saved.save(1, {})
    assert not list(saved.newest().glob("reference*")), "it is the start"
    moved(policy, 0)
    reference.refresh(1)
    saved.save(2, {})
    _, other, found = parts()
    found.restore(found.newest())
    want, got = theirs(reference), theirs(other)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert other.state_dict().keys() == want.keys()


def test_references_that_cannot_follow_are_refused(folder):
    policy = load_policy(str(folder))
    with pytest.raises(ValueError, match=r"every >= 0 and 0 <= decay < 1, got 1 and 1"):
        Reference(policy, load_reference(policy), every=1, decay=1.0)
    adapted = load_policy(str(folder), lora={"r": 2})
    with pytest.raises(ValueError, match=r"kl\.refresh_every expects"):
        Reference(adapted, load_reference(adapted, str(folder)), every=1)
    half = load_policy(str(folder), dtype="bfloat16")
    Reference(half, load_reference(half), every=1)
    with pytest.raises(ValueError, match="would round away"):
        Reference(half, load_reference(half), every=1, decay=0.9)


def test_a_policy_that_was_made_by_hand_has_a_reference(folder):
    loaded = load_policy(str(folder), max_new_tokens=3)
    policy = TransformersWrapper(
        Scorer(loaded.model), tokenizer=loaded.tokenizer, generate_kwargs={"max_new_tokens": 3}
    )
    reference = Reference(policy, load_reference(policy))
    batch = reference(rollout(policy, count=1))
    assert reference.sha256 == ""
    assert batch["kl_penalty"].abs().max() < 1e-5


def test_without_a_reference_a_batch_stays_as_it_is(folder):
    none, batch = NoReference(), rollout(load_policy(str(folder), max_new_tokens=3), count=1)
    keys = set(batch.keys(True))
    none.refresh(1)
    assert none(batch) is batch
    assert set(batch.keys(True)) == keys
    assert (none.scorer, none.sha256, none.state_dict()) == (None, "", {})


# Lengths


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_sequences_past_the_models_positions_are_refused(kind, tmp_path):
    name = str(make_checkpoint(tmp_path, kind))
    with pytest.raises(ValueError, match=r"_prompt_tokens=200 .*_new_tokens=57.*=256"):
        load_policy(name, max_prompt_tokens=200, max_new_tokens=57)
    load_policy(name, max_prompt_tokens=200, max_new_tokens=56)
    with pytest.raises(ValueError, match=r"policy\.max_new_tokens=256 exceed"):
        load_policy(name, max_new_tokens=256)
    policy = load_policy(name, max_new_tokens=250)
    with pytest.raises(ValueError, match=r"prompt \d+ has .*=256.*250"):
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
