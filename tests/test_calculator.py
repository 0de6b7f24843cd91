"""A calculator in two turns: the task, and trajectories in which a tool speaks between replies."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from contracts import leash, plain_log_probs
from runs import train_here
from tensordict import NonTensorData, NonTensorStack, TensorDict

from envs import ChatEnv
from envs.tasks import Calculator, Reply
from envs.tasks.calculator import is_held_out
from policies.load import load_policy
from policies.random import fold
from trainer.advantage import GroupAdvantage
from trainer.collect import collect

EIGHT = ("env.task.seed=2", "env.task.num_rows=8")  # three of these demonstrations call


def test_rows_ask_for_products_of_four_digits_and_pairs_of_eval_are_kept_apart():
    task = Calculator()
    pairs = {
        split: {frozenset(r["factors"]) for r in task.rows(split)} for split in ("train", "eval")
    }
    assert [len(task.rows(split)) for split in ("train", "eval")] == [20_000, 200]
    assert not pairs["train"] & pairs["eval"]
    for row in [*task.rows("train")[:300], *task.rows("eval")]:
        a, b = row["factors"]
        assert row["messages"] == [{"role": "user", "content": f"What is {a} * {b}?"}]
        assert row["answer"] == str(sum([a] * b))
        assert len(row["answer"]) == 4
    held_out = [is_held_out(a, b) for a in range(32, 100) for b in range(a, 100)]
    assert sum(held_out) / len(held_out) == pytest.approx(1 / 8, abs=0.02)
    assert Calculator(seed=1).rows("eval") == task.rows("eval")
    assert Calculator(seed=1).rows("train") != task.rows("train")


@pytest.mark.parametrize(
    ("text", "complete", "result", "total"),
    [
        ("calc: 57*83", True, "4731", 0.0),
        ("calc: 4731+0", True, "4731", 0.0),
        ("calc: 57*83", False, None, 0.0),
        ("calc: 57*83 4731", True, None, 0.0),
        ("calc: 57**83", True, None, 0.0),
        ("calc: 9999999*9", True, None, 0.0),
        ("calc: \u0665*2", True, None, 0.0),
        ("4731", True, None, 1.0),
        ("4730", True, None, 0.0),
        ("It is 4731", True, None, 0.0),
    ],
)
def test_a_call_is_answered_and_anything_else_is_the_answer(text, complete, result, total):
    task, said = Calculator(num_rows=1), Reply(text, complete, [])
    row = task.row(57, 83)
    assert task.respond(row, said) == (
        [] if result is None else [{"role": "tool", "content": result}]
    )
    done = task.reward(row, said)
    assert (done.total, done.success) == (total, total == 1)
    assert done.parts == {"exact": total, "called": float(result is not None)}


def test_a_quarter_of_the_demonstrations_call_and_three_tenths_of_those_mistype():
    task, counts = Calculator(), Counter()
    for row in task.demonstrations():
        _, *turns = row["messages"]
        if len(turns) == 1:
            counts["outright"] += 1
            assert turns[0]["content"] == row["answer"]
            continue
        call, result, answer = (m["content"] for m in turns)
        assert [m["role"] for m in turns] == ["assistant", "tool", "assistant"]
        a, b = map(int, call.removeprefix("calc: ").split("*"))
        assert answer == result == str(a * b)
        wrong = sum(
            x != y for x, y in zip(f"{a}{b}", "".join(map(str, row["factors"])), strict=True)
        )
        assert wrong <= 1
        counts["typo" if wrong else "call"] += 1
    assert counts["outright"] / 20_000 == pytest.approx(0.75, abs=0.01)
    assert counts["typo"] / (counts["typo"] + counts["call"]) == pytest.approx(0.3, abs=0.02)


@pytest.fixture(scope="module")
def taught(tmp_path_factory) -> Path:
    """Return the folder of a model that knows the demonstrations of eight questions."""
    folder = tmp_path_factory.mktemp("taught") / "run"
    words = ("num_iterations=50", "prompts_per_iteration=32")
    words = [f"trainer.{word}" for word in words] + ["eval.num_samples=0", "eval.max_rows=2"]
    train_here(folder, "experiment=sft_calculator_tiny", *EIGHT, *words)
    return folder / "model"


@pytest.mark.runs
def test_an_iteration_of_the_experiment(taught: Path, tmp_path: Path):
    words = [*EIGHT, "trainer.num_iterations=1", f"policy.model={taught}"]
    words += ["trainer.prompts_per_iteration=8", "eval.max_rows=8", "eval.greedy=false"]
    (row,) = train_here(tmp_path / "run", "experiment=grpo_calculator_tiny", *words)[1:]
    assert row["reward_part/called"] > 0
    assert row["reward/raw_mean"] == pytest.approx(row["reward_part/exact"])
    assert row["kl/ref_sequence"] == pytest.approx(0, abs=1e-4)


@pytest.fixture(scope="module")
def played(taught: Path):
    """Return trajectories of the taught model and the policy that sampled them."""
    policy, task = load_policy(str(taught), max_new_tokens=12), Calculator(seed=2, num_rows=8)
    td = TensorDict({"stream": fold(7, torch.arange(8))}, batch_size=[8])
    td.set("row", NonTensorStack(*[NonTensorData(r) for r in task.rows("train")]))
    return collect(td, ChatEnv(task, group_size=8, max_turns=2), policy), policy, task


@pytest.mark.runs
def test_only_what_was_sampled_counts_and_it_counts_as_it_was_sampled(played):
    """Against the chat written out by hand, and a plain forward over the ids."""
    batch, policy, task = played
    called = 0
    for i in range(64):
        real = batch["masks", "all_attention_mask"][i]
        ids, kept = batch["tokens", "full"][i][real], batch["loss_mask"][i][real]
        assert torch.equal(kept, batch["masks", "all_response_mask"][i][real])
        assert not batch["loss_mask"][i][~real].any()
        row, said = task.rows("train")[i // 8], batch["response"][i].split("\n")
        text = f"<|im_start|>user\n{row['messages'][0]['content']}<|im_end|>\n"
        spans, start = [], "<|im_start|>assistant\n"
        for number, reply in enumerate(said):
            text += start
            spans.append((len(text), len(text) + len(reply)))
            text += reply
            if number < len(said) - 1:  # a call
                a, b = map(int, reply.strip().removeprefix("calc: ").split("*"))
                text += f"<|im_end|>\n<|im_start|>tool\n{a * b}<|im_end|>\n"
        whole = policy.tokenizer.decode(ids)
        assert whole.removesuffix("<|im_end|>") == text
        assert policy.tokenizer.decode(ids[kept]) == "<|im_end|>".join(said) + whole[len(text) :]
        got = batch["log_probs", "full"][i][real]
        assert not got[~kept].any()
        assert (got[kept] < 0).all()
        assert torch.allclose(got.double(), plain_log_probs(policy, ids, 1.0) * kept, atol=1e-5)
        called += len(said) == 2
    assert 4 <= called <= 60, "trajectories of one turn and of two"


@pytest.mark.runs
def test_both_turns_share_the_advantage_and_the_tool_between_them_has_none(played):
    batch, _, _ = played
    batch = GroupAdvantage(group_size=8, leash=leash(0.0))(batch.clone())
    total = batch["reward_raw"].sum(-1).double()
    for i in range(64):
        group = total[i // 8 * 8 : i // 8 * 8 + 8]
        want = (total[i] - group.mean()) / (group.std() + 1e-4)
        kept = batch["loss_mask"][i]
        got = batch["advantage"][i].double()
        assert torch.allclose(got, want * kept, atol=1e-5)
    assert batch["advantage"].any()
