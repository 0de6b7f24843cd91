"""Where batches come from: a function of (seed, iteration), shared between the ranks."""

import pytest
import torch
from contracts import Words, make_policy, one_process
from drawn import Flat, Many, dynamic
from hypothesis import given
from hypothesis import strategies as st

from envs.chat_env import ChatEnv
from policies.random import fold
from trainer.demonstrations import Demonstrations
from trainer.evaluation import Evaluate
from trainer.metrics import summarize
from trainer.runtime import Runtime
from trainer.sources import Rollouts, picks


class Rank(Runtime):
    """One of several ranks."""

    def __init__(self, folder, rank: int, ranks: int, seed: int = 0) -> None:
        self.place = (0, 1)  # nobody to meet
        super().__init__(folder, seed=seed)
        self.place = (rank, ranks)

    rank = property(lambda self: self.place[0])
    ranks = property(lambda self: self.place[1])


def rollouts(runtime, size: int = 2) -> Rollouts:
    env = ChatEnv(Words(), group_size=3)
    return Rollouts(task=Words(), env=env, generator=make_policy(), runtime=runtime, size=size)


@pytest.mark.parametrize("size", [1, 700, 70_000])
def test_the_order_is_that_of_torch_at_its_usual_width(size):
    generator = torch.Generator().manual_seed(int(fold(3, 2)) & (2**63 - 1))
    want = torch.randperm(size, generator=generator).tolist()[:50]
    count = min(size, 50)  # which divides each size
    assert picks(2 * size // count, size=size, count=count, seed=3) == want


@given(size=st.integers(1, 9), count=st.integers(1, 12), seed=st.integers(0, 99))
def test_every_epoch_holds_each_row_once(size, count, seed):
    """Epochs begin inside an iteration, or several times in one."""
    taken = [p for i in range(2 * size) for p in picks(i, size=size, count=count, seed=seed)]
    epochs = [taken[k : k + size] for k in range(0, len(taken), size)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)


def test_prompts_are_a_function_of_seed_and_iteration(tmp_path):
    source, later = rollouts(Runtime(tmp_path, seed=3)), rollouts(Runtime(tmp_path, seed=3))
    first = source.prompts(5)
    source.prompts(0)
    torch.rand(3)
    assert (first == later.prompts(5)).all()
    want = [int(fold(3, 5, i)) for i in range(2)]
    assert first["stream"].tolist() == want
    other = rollouts(Runtime(tmp_path, seed=4)).prompts(5)
    assert not set(other["stream"].tolist()) & set(want)
    assert not set(source.prompts(6)["stream"].tolist()) & set(want)


def test_ranks_take_the_slices_of_what_one_rank_takes_and_sample_the_same(tmp_path):
    source = rollouts(Rank(tmp_path, 0, 1), size=4)
    halves = [rollouts(Rank(tmp_path, r, 2), size=4) for r in (0, 1)]
    whole, parts = source.prompts(1), [half.prompts(1) for half in halves]
    for key in ("group_id", "stream"):
        assert torch.cat([p[key] for p in parts]).tolist() == whole[key].tolist()
    replies = [str(r) for half in halves for r in half(0).get("response").tolist()]
    assert replies == [str(r) for r in source(0).get("response").tolist()]
    with pytest.raises(ValueError, match="2 ranks"):
        rollouts(Rank(tmp_path, 0, 2), size=3).prompts(0)


class Writing(Words):
    """Its reward writes into the row that it is given."""

    def reward(self, row, reply):
        row["messages"].append({"role": "user", "content": "and again"})
        row["answer"] = "seen"
        return super().reward(row, reply)


def test_what_a_reward_writes_into_its_row_is_in_no_later_prompt():
    found = {}
    for task in (Words(), Writing()):
        parts = {"task": task, "generator": make_policy(), "runtime": one_process()}
        source = Rollouts(**parts, env=ChatEnv(task, group_size=2), size=4)
        texts = [list(map(str, source(i).get("prompt").tolist())) for i in (0, 0)]
        evaluate = Evaluate(**parts, env=ChatEnv(task), num_samples=2)
        found[type(task)] = texts, evaluate(0), evaluate(0)
    assert found[Writing] == found[Words]


# Dynamic sampling.


def rows_of(batch) -> list[tuple]:
    """Return what each row is, without padding."""
    names = ("reward_raw", "loss_mask", ("log_probs", "full"), ("tokens", "full"))
    return [
        (str(row["prompt"]), int(row["group_id"]), *(row[name][real].tolist() for name in names))
        for row in batch
        for real in [row["masks", "all_attention_mask"]]
    ]


def test_idle_places_are_drawn_again_with_other_rows_and_the_rest_stays(tmp_path):
    source = dynamic(Rank(tmp_path, 0, 1, seed=1), Many())
    redrawn = 0
    for iteration in range(2):
        before, batch = Rollouts.sample(source, iteration), source(iteration)
        after, draws = rows_of(batch), batch["logged", "group/resampled"].tolist()
        for k, row in enumerate(rows_of(before)):
            if row[0] in Many.flat:
                redrawn += 1
                assert after[k][0] not in Many.flat
                assert draws[k] > 0
                assert after[k][1] == row[1] == k // 3, "it keeps its place"
            else:
                assert (after[k], draws[k]) == (row, 0)
        assert batch["loss_mask"].any(-1).all()
        assert rows_of(source(iteration)) == after
    assert redrawn > 3


def test_what_stays_idle_had_a_row_of_its_own_each_time_and_leaves_the_loss(tmp_path):
    source = dynamic(Rank(tmp_path, 0, 1), Flat(), rounds=9)
    batch = source(0)
    assert not batch["loss_mask"].any()
    rows = [[r["answer"] for r in source.prompts(0, k).get("row").tolist()] for k in range(10)]
    for place in range(4):
        assert sorted(r[place] for r in rows[:8]) == sorted(Flat.flat), "each row comes once"
    streams = {int(s) for k in range(10) for s in source.prompts(0, k)["stream"]}
    assert len(streams) == 40
    metrics = summarize(batch.set("reward", batch["reward_raw"]), source.runtime)
    assert (metrics["group/zero_variance_fraction"], metrics["group/resampled"]) == (1, 9)


# Demonstrations.


class Chat(Words):
    """A demonstration of two turns."""

    def demonstrations(self) -> list[dict]:
        texts = [("user", "Sort 2 1"), ("assistant", "1 2"), ("user", "8 7"), ("assistant", "7 8")]
        return [{"messages": [{"role": r, "content": c} for r, c in texts]}]


@pytest.mark.parametrize("mask", ["assistant", "prompt"])
def test_the_mask_says_which_turns_are_learnt(mask):
    policy, task = make_policy(), Chat()
    env = ChatEnv(task, system_prompt="Be brief.")
    parts = {"task": task, "env": env, "policy": policy, "runtime": one_process()}
    batch = Demonstrations(**parts, size=1, mask=mask)(0)
    masks = batch["masks", "all_attention_mask"], batch["loss_mask"]
    whole, learnt = (policy.tokenizer.decode(batch["tokens", "full"][keep]) for keep in masks)
    system = {"role": "system", "content": "Be brief."}
    assert whole == policy.renderer.text([system, *task.demonstrations()[0]["messages"]])
    assert learnt == {"assistant": "1 2<|im_end|>", "prompt": ""}[mask] + "7 8<|im_end|>"
