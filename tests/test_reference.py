"""What a reference may be, how it follows the policy, how much of it is scored at a time."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from contracts import make_policy, one_process, rollout
from runs import metrics
from small_runs import IN_ITERATION_4, Counted, crash, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from envs.transforms import RetrieveKL
from policies.load import load_policy, load_reference
from policies.models import quiet
from policies.scorer import Scorer
from policies.weights import weights_of
from trainer.checkpoint import Checkpoints
from trainer.optimizer import make_optimizer
from trainer.reference import Reference


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen2"), "qwen2")


# Vocabulary


def widened(folder: Path, target: Path) -> Path:
    """Save the checkpoint again, with rows that pad its embedding."""
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder)
        torch.manual_seed(0)
        model.resize_token_embeddings(384, mean_resizing=False)
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(folder).save_pretrained(target)
    return target


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
    policy, wide = load_policy(str(folder), max_new_tokens=5), widened(folder, tmp_path / "wide")
    batch, reference = rollout(policy, count=2), load_reference(policy, str(wide))
    batch = RetrieveKL(ref_model=reference, add_to_reward=False)(batch)
    # The logits of the tokens are equal, so a token is as likely as in the policy but for what
    # the 54 new rows take away.
    assert (batch["kl_penalty"][batch["loss_mask"]] > 0).all()


# Parts


def test_the_reference_is_scored_in_parts_of_the_updates_size(monkeypatch):
    policy = make_policy()
    batch = rollout(policy)
    whole = load_reference(policy)(batch)["ref_log_probs", "full"]
    areas, inner = [], Scorer.hidden
    monkeypatch.setattr(
        Scorer, "hidden", lambda self, lay: areas.append(lay.input_ids.numel()) or inner(self, lay)
    )
    order = torch.arange(16).view(4, 4).T.flatten()  # the samples of a prompt lie apart
    for limit, least in ((200, 2), (1, 16), (10**6, 1)):
        areas.clear()
        parts = load_reference(policy, micro_batch_tokens=limit)(batch[order])
        torch.testing.assert_close(parts["ref_log_probs", "full"], whole[order], atol=1e-5, rtol=0)
        assert len(areas) >= least
        assert max(areas) <= limit or limit == 1


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
    want, batch = theirs(reference), rollout(policy)
    for iteration in range(1, 6):
        now = moved(policy, iteration)
        reference.refresh(iteration)
        want = now if iteration == 3 else want
        got = theirs(reference)
        assert all(torch.equal(got[name], want[name]) for name in want)
        assert bool(reference.state_dict()) == (iteration >= 3)
    moved(policy, 6)
    reference.refresh(6)
    kept = batch["masks", "all_response_mask"]
    mine = policy.get_new_version(generate=False, inplace=False)(batch)["log_probs", "full"]
    for _ in range(2):  # and it stays when the policy moves on
        assert torch.equal(reference(batch)["ref_log_probs", "full"][kept], mine[kept])
        moved(policy, 7)


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


@pytest.mark.runs
def test_after_a_reset_the_kl_starts_at_0_again_and_a_resumed_run_has_its_reference(tmp_path):
    """Stopped in iteration 4 and resumed from 3, after the reference moved in iteration 2."""
    train(tmp_path / "straight", refresh=2)
    rows = metrics(tmp_path / "straight")
    kl = [row["kl/ref_k3"] for row in rows[1:]]
    assert max(kl[0], kl[2]) < 1e-8
    assert min(kl[1], kl[3]) > 1e-5
    train(tmp_path / "cut", Counted(IN_ITERATION_4, crash), refresh=2)
    assert len(metrics(tmp_path / "cut")) == 4
    train(tmp_path / "cut", resume=True, refresh=2)
    assert metrics(tmp_path / "cut") == rows


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
    adapted = load_policy(str(folder), lora={"r": 2})
    with pytest.raises(ValueError, match=r"kl\.refresh_every"):
        Reference(adapted, load_reference(adapted, str(folder)), every=1)
    half = load_policy(str(folder), dtype="bfloat16")
    with pytest.raises(ValueError, match=r"kl\.refresh_decay"):
        Reference(half, load_reference(half), every=1, decay=0.9)


# Lengths


def test_sequences_past_the_models_positions_are_refused(folder):
    """Positions are 256."""
    name = str(folder)
    with pytest.raises(ValueError, match=r"policy\.max_prompt_tokens"):
        load_policy(name, max_prompt_tokens=200, max_new_tokens=57)
    load_policy(name, max_prompt_tokens=200, max_new_tokens=56)
    with pytest.raises(ValueError, match=r"policy\.max_new_tokens"):
        load_policy(name, max_new_tokens=256)
    policy = load_policy(name, max_new_tokens=250)
    with pytest.raises(ValueError, match=r"prompt \d+ has .*=6"):
        rollout(policy)  # its prompts have more than 6 tokens
    ids = torch.zeros(1, 300, dtype=torch.int64)
    mask = torch.arange(300) < 257
    with pytest.raises(ValueError, match=r"257 tokens.* is 256"):
        policy.scorer(ids, mask[None])
    policy.scorer(ids, (mask & (torch.arange(300) > 0))[None])
