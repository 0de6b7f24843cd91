"""Where batches come from: a function of (seed, iteration), shared between the ranks."""

from collections import Counter

import pytest
import torch
from contracts import Words, make_policy, one_process
from drawn import Flat, Many, dynamic

from envs.chat_env import ChatEnv
from policies.random import fold
from trainer.demonstrations import Demonstrations
from trainer.evaluation import Evaluate
from trainer.metrics import summarize
from trainer.runtime import Runtime
from trainer.sources import DynamicRollouts, Rollouts, picks


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


@pytest.mark.parametrize("size", [1, 5, 700, 70_000])
def test_the_order_is_that_of_torch_at_its_usual_width(size):
    for seed, epoch in ((0, 0), (3, 2)):
        generator = torch.Generator().manual_seed(int(fold(seed, epoch)) & (2**63 - 1))
        want = torch.randperm(size, generator=generator).tolist()[:50]
        count = min(size, 50)  # which divides each size
        assert picks(epoch * size // count, size=size, count=count, seed=seed) == want


def test_every_epoch_holds_each_row_once_in_an_order_of_its_own():
    size, count = 7, 3  # 7 iterations make 3 epochs, which begin inside an iteration
    taken = [p for i in range(7) for p in picks(i, size=size, count=count, seed=1)]
    epochs = [taken[k : k + size] for k in range(0, 21, size)]
    assert all(sorted(e) == list(range(size)) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3
    other = [p for i in range(7) for p in picks(i, size=size, count=count, seed=2)]
    assert other != taken


def test_an_iteration_larger_than_the_data_repeats_it_evenly():
    counts = Counter(picks(3, size=4, count=10, seed=0))
    assert sum(counts.values()) == 10
    assert set(counts) == set(range(4))
    assert max(counts.values()) - min(counts.values()) <= 2


def test_prompts_are_a_function_of_seed_and_iteration(tmp_path):
    source, later = rollouts(Runtime(tmp_path, seed=3)), rollouts(Runtime(tmp_path, seed=3))
    first = source.prompts(5)
    for i in (0, 9):
        source.prompts(i)
    torch.rand(3)
    again = later.prompts(5)
    assert (first == again).all()
    want = [int(fold(3, 5, i)) for i in range(2)]
    assert first["stream"].tolist() == want
    other = rollouts(Runtime(tmp_path, seed=4)).prompts(5)
    assert not set(other["stream"].tolist()) & set(want)
    assert not set(source.prompts(6)["stream"].tolist()) & set(want)


def test_ranks_take_the_slices_of_what_one_rank_takes(tmp_path):
    whole = rollouts(Rank(tmp_path, 0, 1), size=4).prompts(1)
    parts = [rollouts(Rank(tmp_path, r, 2), size=4).prompts(1) for r in (0, 1)]
    for key in ("group_id", "stream"):
        assert torch.cat([p[key] for p in parts]).tolist() == whole[key].tolist()
    rows = [r["answer"] for p in parts for r in p.get("row").tolist()]
    assert rows == [r["answer"] for r in whole.get("row").tolist()]
    with pytest.raises(ValueError, match="expected 3 to be divisible by 2 ranks"):
        rollouts(Rank(tmp_path, 0, 2), size=3).prompts(0)


def test_ranks_sample_what_one_rank_samples(tmp_path):
    def replies(runtime):
        return [str(r) for r in rollouts(runtime, size=4)(0).get("response").tolist()]

    whole = replies(Rank(tmp_path, 0, 1))
    parts = [r for k in (0, 1) for r in replies(Rank(tmp_path, k, 2))]
    assert parts == whole


class Writing(Words):
    """Its reward writes into the row that it is given."""

    def reward(self, row, reply):
        row["messages"].append({"role": "user", "content": "and again"})
        row["answer"] = "seen"
        return super().reward(row, reply)


@pytest.mark.parametrize("kind", ["source", "evaluation"])
def test_what_a_reward_writes_into_its_row_is_in_no_later_prompt(tmp_path, kind):
    told = {}
    for task in (Words(), Writing()):
        parts = {"task": task, "env": ChatEnv(task, group_size=2), "generator": make_policy()}
        parts["runtime"] = Runtime(tmp_path)
        if kind == "source":
            source = Rollouts(**parts, size=4)
            batches = [source(0), source(1), source(0)]
            said = [[str(text) for text in batch.get("prompt").tolist()] for batch in batches]
        else:
            parts["env"] = ChatEnv(task)
            evaluate = Evaluate(**parts, num_samples=2)
            said = [evaluate(0), evaluate(0)]
        told[type(task)] = said
    assert told[Writing] == told[Words]


# Dynamic sampling.


def told(batch) -> list[tuple]:
    """Return what each row is, without padding."""
    attended = batch["masks", "all_attention_mask"]
    names = ("reward_raw", "loss_mask", ("log_probs", "full"), ("tokens", "full"))
    rows = []
    for i in range(len(attended)):
        entries = [batch[name][i][attended[i]].tolist() for name in names]
        rows.append((str(batch["prompt"][i]), int(batch["group_id"][i]), *entries))
    return rows


def test_idle_places_are_drawn_again_with_other_rows_and_the_rest_stays(tmp_path):
    runtime = Rank(tmp_path, 0, 1, seed=1)
    source = dynamic(runtime, Many())
    plain = Rollouts(
        task=Many(), env=source.env, generator=source.generator, runtime=runtime, size=4
    )
    redrawn = 0
    for iteration in range(3):
        before, batch = plain(iteration), source(iteration)
        after, draws = told(batch), (batch["logged", "group/resampled"] + 1).tolist()
        for k, row in enumerate(told(before)):
            if row[0] in Many.flat:
                redrawn += 1
                assert after[k][0] not in Many.flat
                assert draws[k] > 1
                assert after[k][1] == row[1] == k // 3, "it keeps its place"
            else:
                assert after[k] == row
                assert draws[k] == 1
        assert batch["loss_mask"].any(-1).all()
        assert told(source(iteration)) == after
    assert redrawn > 3


def test_what_stays_idle_had_a_row_of_its_own_each_time_and_leaves_the_loss(tmp_path):
    source = dynamic(Rank(tmp_path, 0, 1), Flat(), rounds=9)
    batch = source(0)
    assert (batch["logged", "group/resampled"] + 1).tolist() == [10.0] * 12
    assert not batch["loss_mask"].any()
    rows = [[r["answer"] for r in source.prompts(0, k).get("row").tolist()] for k in range(10)]
    for place in range(4):
        assert sorted(r[place] for r in rows[:8]) == sorted(Flat.flat), "each row comes once"
    streams = {int(s) for k in range(10) for s in source.prompts(0, k)["stream"]}
    assert len(streams) == 40
    metrics = summarize(batch.set("reward", batch["reward_raw"]), source.runtime)
    assert metrics["group/zero_variance_fraction"] == 1
    assert metrics["group/resampled"] == 9
    batch = dynamic(Rank(tmp_path, 0, 1), Many())(0)
    metrics = summarize(batch.set("reward", batch["reward_raw"]), source.runtime)
    assert metrics["group/zero_variance_fraction"] == 0
    assert metrics["group/resampled"] == sum(batch["logged", "group/resampled"].tolist()[::3]) / 4


def test_dynamic_sampling_needs_groups(tmp_path):
    parts = {"task": Many(), "generator": make_policy(), "runtime": one_process(), "size": 4}
    with pytest.raises(ValueError, match="group_size >= 2"):
        DynamicRollouts(env=ChatEnv(Many(), group_size=1), **parts)
    with pytest.raises(ValueError, match="rounds >= 1"):
        DynamicRollouts(env=ChatEnv(Many(), group_size=2), rounds=0, **parts)


def demonstrations(mask: str, task=None, system: str | None = None, size: int = 4):
    task = task or Words()
    env = ChatEnv(task, system_prompt=system)
    parts = {"task": task, "env": env, "policy": make_policy(), "runtime": one_process()}
    return Demonstrations(**parts, size=size, mask=mask)(0)


class Chat(Words):
    """One demonstration of two turns."""

    def demonstrations(self) -> list[dict]:
        texts = [("user", "Sort 2 1"), ("assistant", "1 2"), ("user", "8 7"), ("assistant", "7 8")]
        return [{"messages": [{"role": r, "content": c} for r, c in texts]}]


@pytest.mark.parametrize(
    ("mask", "learnt"),
    [("assistant", "1 2<|im_end|>7 8<|im_end|>"), ("prompt", "7 8<|im_end|>")],
)
def test_the_mask_says_which_turns_are_learnt(mask, learnt):
    batch = demonstrations(mask, Chat(), size=2)
    decode = make_policy().tokenizer.decode
    for i in range(2):
        ids = batch["tokens", "full"][i]
        assert decode(ids[batch["loss_mask"][i]]) == learnt
        both = ids[batch["masks", "all_assistant_mask"][i]]
        assert decode(both) == "1 2<|im_end|>7 8<|im_end|>"
    assert batch["temperature"].tolist() == [1.0, 1.0]


def test_demonstrations_are_rendered_with_the_system_prompt_and_padded_right():
    batch = demonstrations("assistant", system="Be brief.")
    policy = make_policy()
    attention = batch["masks", "all_attention_mask"]
    assert torch.equal(
        attention, torch.arange(attention.shape[1]) < attention.sum(-1, keepdim=True)
    )
    texts = {policy.tokenizer.decode(r[m]) for r, m in zip(
        batch["tokens", "full"], attention, strict=True)}  # fmt: skip
    system = {"role": "system", "content": "Be brief."}
    chats = [[system, *row["messages"]] for row in Words().demonstrations()]
    assert texts == {policy.renderer.text(chat) for chat in chats}
