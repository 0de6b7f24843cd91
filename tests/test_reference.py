"""What a reference may be, how it follows the policy, how much of it is scored at a time."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from contracts import make_policy, rollout
from runs import metrics
from small_runs import IN_ITERATION_4, Counted, crash, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from envs.transforms import RetrieveKL
from policies.load import load_policy, load_reference
from policies.models import quiet
from policies.weights import weights_of
from trainer.reference import Reference


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
    batch = RetrieveKL(ref_model=reference, add_to_reward=False)(batch)
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
    reference.refresh(6)
    kept = batch["masks", "all_response_mask"]
    mine = policy.get_new_version(generate=False, inplace=False)(batch)["log_probs", "full"]
    for _ in range(2):  # and it stays when the policy moves on
        assert torch.equal(reference(batch)["ref_log_probs", "full"][kept], mine[kept])
        moved(policy, 7)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_an_average_follows_by_its_formula_and_is_saved(kind):
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
    _, other = fresh(kind, every=2, decay=0.75)
    other.load_state_dict(reference.state_dict())
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
