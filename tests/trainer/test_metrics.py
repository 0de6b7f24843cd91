"""Metrics, transcripts and evaluation, by hand numbers."""

import json
import math
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from support.policies import make_policy, one_process, plain_log_probs
from support.small_runs import Unjudged
from support.tasks import Words
from tensordict import NonTensorStack, TensorDict, TensorDictBase

from envs.chat_env import ChatEnv
from envs.rows import LazyRows
from envs.tasks.facts import Facts
from envs.tasks.mix import Mix
from envs.tasks.short_answers import Answers
from envs.tasks.sort_digits import SortDigits
from envs.tasks.task import Response, Reward
from policies import load_policy, load_reference
from trainer.evaluation import Evaluate, sample
from trainer.kl.reference import Reference
from trainer.metrics import summarize
from trainer.pages.diagnosis import Diagnosis
from trainer.runtime import Runtime
from trainer.transcripts import transcript, transcripts

MASK = torch.tensor(
    [[0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]]
).bool()  # [B, T]; in row 3 a tool speaks between two turns
REWARDS = [1.0, 0.0, 0.5, 0.5, 2.0, 2.0]


def batch() -> TensorDict:
    """Three groups of two: one whose rewards differ, two of equal rewards; row 4 is filtered."""
    td = TensorDict({"loss_mask": MASK}, [6])
    response = MASK.clone()
    response[4, 1:] = True
    td["masks", "all_response_mask"] = response
    raw = torch.zeros(6, 4)
    raw[:, 1] = torch.tensor(REWARDS)
    td["reward_raw"] = raw
    td["reward"] = raw - 0.25 * MASK
    td["reward_part", "length"] = torch.tensor(REWARDS) / 2
    gen = torch.full((6, 4), -1.0)
    ref = gen - 0.5
    ref[2] = -0.8
    td["log_probs", "full"], td["ref_log_probs", "full"] = gen, ref
    td["kl_penalty"] = gen - ref
    td["advantage"] = torch.arange(24.0).reshape(6, 4) * MASK
    td["truncated"] = torch.tensor([True, False, True, False, False, False])
    td["logged", "each/token"] = torch.ones(6, 4)
    td["logged", "each/row"] = torch.arange(6.0)
    td["group_id"] = torch.tensor([4, 4, 0, 0, 2, 2])
    td["prompt"] = NonTensorStack(*[f"prompt {i}" for i in range(6)])
    td["response"] = NonTensorStack(*[f"response {i}" for i in range(6)])
    td["answer"] = NonTensorStack(*["", "right", *"cdef"])
    return td


class TwoRanks(Runtime):
    """This process and another one, whose batch is the same."""

    def all_reduce_sum(self, values):
        return {k: 2 * v for k, v in values.items()}


def means_are_over_their_rows_or_tokens() -> None:
    got = summarize(batch(), one_process())
    tokens, sampled = 9, 12  # 2 + 1 + 3 + 2 + 0 + 1; the filter leaves the KL of row 4
    k1 = 0.5 * 9 - 0.2 * 3
    k3 = (math.exp(-0.5) + 0.5 - 1) * 9 + (math.exp(0.2) - 0.2 - 1) * 3
    want = {
        "reward/raw_mean": 1.0,
        "reward/mean": 1.0 - 0.25 * tokens / 6,
        "reward/std": math.sqrt((1 + 0 + 0.25 + 0.25 + 4 + 4) / 6 - 1),
        "reward_part/length": 0.5,
        "kl/ref": k1 / sampled,
        "kl/ref_k3": k3 / sampled,
        "kl/ref_sequence": k1 / 6,
        "response/length_mean": 12 / 6,
        "response/length_max": 3.0,
        "response/truncated_fraction": 2 / 6,
        "group/zero_variance_fraction": 2 / 3,
        "each/token": 1.0,
        "each/row": 15 / 6,
    }
    assert got == pytest.approx(want, abs=1e-6)


def test_every_mean_is_over_its_rows_or_kept_tokens_of_all_ranks(tmp_path):
    means_are_over_their_rows_or_tokens()
    alone = summarize(batch(), one_process())
    assert summarize(batch(), TwoRanks(tmp_path)) == pytest.approx(alone)
    ungrouped = batch()[torch.tensor([0, 2, 4])]
    assert "group/zero_variance_fraction" not in summarize(ungrouped, one_process())


def test_a_batch_whose_responses_were_all_dropped_has_no_reward_and_no_kl():
    td = batch()
    td["dropped"], td["reward_errors"] = torch.ones(6, dtype=torch.bool), torch.ones(6)
    got, full = summarize(td, one_process()), summarize(batch(), one_process())
    assert (got["reward/errors"], got["reward/dropped_fraction"]) == (6, 1)
    measured = ("reward/mean", "reward/raw_mean", "reward/std", "reward_part/length")
    gone = {*measured, "kl/ref", "kl/ref_k3", "kl/ref_sequence", "group/zero_variance_fraction"}
    gone.add("each/token")
    assert full.keys() - got.keys() == gone


# Transcripts.


def test_transcripts_show_whole_groups_of_the_best_the_worst_and_the_median():
    td = batch()

    def kept(count: int | str) -> list[int]:
        rows = transcripts(td, 7, count=count, kind="train")
        return [int(r["prompt"][-1]) for r in rows]

    # rows 4 and 5 earn 2, row 0 1, rows 2 and 3 0.5, row 1 nothing; groups are pairs of rows
    assert kept("all") == kept(99) == [4, 5, 0, 2, 3, 1], "the highest reward first"
    assert kept(4) == [4, 5, 0, 2, 1], "the groups of the best and of the worst, and the median"
    assert kept(0) == [4, 2, 1]
    row = transcript(td, 1, 7, kind="train")
    texts = {"prompt": "prompt 1", "answer": "right", "response": "response 1", "kind": "train"}
    numbers = {"reward": 0.0, "parts": {"length": 0.0}, "advantage": 5.0, "kl": 0.5}
    assert row == {**texts, **numbers, "iteration": 7, "group": 4, "truncated": False}
    td["reward_raw"][0, 1] = 0.1  # a float32: 0.10000000149
    assert transcript(td, 0, 7, kind="train")["reward"] == 0.1
    td["dropped"] = td["group_id"] == 2
    assert kept("all") == [2, 3, 0, 1]


def test_the_best_the_median_and_the_worst_response_are_kept_token_by_token():
    td, tokenizer = batch(), make_policy().tokenizer
    attention = torch.tensor([[1, 1, 1, 1]] * 6).bool()
    attention[1, 3] = False  # row 1 is shorter: its last column is padding
    td["masks", "all_attention_mask"] = attention
    word = tokenizer.encode("abcd", add_special_tokens=False)[:4]
    td["tokens", "full"] = torch.tensor([word] * 6)
    rows = transcripts(td, 7, count=0, kind="train", tokenizer=tokenizer)
    assert [r["rank"] for r in rows] == ["best", "median", "worst"]
    # row 1: one sampled token, then two that were not, of which one is padding
    assert rows[2]["pieces"] == {
        "text": [tokenizer.decode([i]) for i in word[1:3]],
        "log_prob": [-1.0, None],
        "kl": [0.5, None],
        "advantage": [5.0, None],
    }


# Evaluation.


class Marked(Words):
    """Every third response is right; responses to the first row are dropped if `drops`."""

    def __init__(self, drops: bool = False) -> None:
        super().__init__()
        self.drops, self.count = drops, 0

    def label(self, row: dict) -> str:
        return "first" if row == self.rows("eval")[0] else "rest"

    def reward(self, row: dict, response: Response) -> Reward:
        self.count += 1
        first = row["answer"] == self.rows("eval")[0]["answer"]
        made = Reward(total=float(len(row["answer"])), parts={}, success=self.count % 3 == 0)
        return replace(made, dropped=self.drops and first)


def evaluate(task=None, **options) -> Evaluate:
    task = task or Marked()
    parts = {"task": task, "generator": make_policy(), "runtime": one_process()}
    parts["env"] = ChatEnv(task)
    return Evaluate(**{**parts, "num_samples": 3, "prompts_per_batch": 3, **options})


def test_responses_that_another_match_takes_for_right_are_counted_before_training(tmp_path):
    path = tmp_path / "d.jsonl"

    def task(*answers: str) -> Answers:
        cells = [{"question": f"{i}?", "answer": answer} for i, answer in enumerate(answers)]
        path.write_text("\n".join(map(json.dumps, cells)))
        return Answers(str(path), eval_dataset=str(path))

    options = {"num_samples": 1, "greedy": False}
    options["generator"] = load_policy("tiny", max_new_tokens=16)
    _, records = evaluate(task(*"abcdefgh"), **options)(0)
    found = [re.findall(r"(?<!\S)[A-Za-z]{2,}(?!\S)", r["response"]) for r in records]
    play = evaluate(task(*(words[0] if words else "Lima" for words in found)), **options)
    scores, _ = play(0, kind="before")
    share = sum(map(bool, found)) / 8
    assert 0.2 < share < 0.9
    assert (scores["eval/sampled_accuracy"], scores["eval/right_by_words"]) == (0, share)
    assert "eval/right_by_words" not in play(1)[0]
    assert "env.match=words" in Diagnosis([{"progress/iteration": 0, **scores}]).findings[0].text


def test_rows_weigh_alike_in_a_short_last_chunk_and_one_right_sample_solves_a_row():
    shares = []
    scores, records = evaluate(num_samples=2)(5, kind="after", on_progress=shares.append)
    texts = [r["answer"] for r in Marked().rows("eval")]
    assert scores == {
        "eval/sampled_accuracy": 2 / 8,  # of the chunks of 6 and 2 sampled responses: 3 and 6,
        "eval/pass@2": 2 / 4,
        "eval/sampled_accuracy/first": 0,
        "eval/sampled_accuracy/rest": 2 / 6,
        "eval/greedy_accuracy": 2 / 4,  # then of the 4 greedy ones 9 and 12
        "eval/greedy_accuracy/first": 1,
        "eval/greedy_accuracy/rest": 1 / 3,
        "eval/reward": sum(map(len, texts)) / 4,
    }
    assert shares == [0, 6 / 12, 8 / 12]
    assert [r["prompt"] for r in records] == texts
    assert {(r["kind"], r["iteration"], r["kl"]) for r in records} == {("after", 5, None)}


def test_an_evaluation_without_a_judged_response_has_no_score():
    assert evaluate(Unjudged())(0)[0] == {}


class Split(Words):
    """Train and eval rows differ."""

    def rows(self, split: str) -> list[dict]:
        rows = super().rows(split)
        return rows[2:] if split == "train" else rows[:2]


class Swapped(Split):
    def rows(self, split: str) -> list[dict]:
        return super().rows("eval" if split == "train" else "train")


def in_turn() -> Mix:
    """Two tasks whose rows alternate."""
    return Mix({"digits": SortDigits(num_rows=200), "facts": Facts()}, num_rows=240)


def test_training_rows_are_evaluated_as_held_out_ones_under_names_of_their_own():
    held_out, _ = evaluate(Split())(0)
    trained, _ = evaluate(Swapped())(0)
    assert trained != held_out
    both, records = evaluate(Split(), train_rows=9)(0)
    renamed = {name.replace("eval/", "eval_train/"): value for name, value in trained.items()}
    assert both == held_out | renamed
    assert len(records) == 2, "of the held-out rows"
    first, _ = evaluate(Split(), train_rows=1)(0)
    alone, _ = evaluate(Swapped(), max_rows=1)(0)
    assert first["eval_train/reward"] == alone["eval/reward"]


@pytest.mark.parametrize("count", [9, 20, 40])
@pytest.mark.parametrize("build", [Facts, in_turn])
def test_fewer_rows_have_each_kinds_share_whether_sorted_by_kind_or_in_turn(build, count):
    task = build()
    limited = evaluate(task, train_rows=count, max_rows=count)
    parts = limited.beside | {"eval": limited}
    for split, part in parts.items():
        counts = Counter(map(task.label, task.rows(split)))
        used = Counter(part.labels)
        assert used.total() == count
        errors = {k: abs(used[k] - count * n / counts.total()) for k, n in counts.items()}
        assert max(errors.values()) < 1
        assert max(errors[min(errors)], errors[max(errors)]) <= 0.5, "no label is favoured"


def test_fewer_rows_without_labels_are_of_the_whole_list_and_generated_ones_the_first():
    task = SortDigits(num_rows=200)
    rows = [{**row, "place": place} for place, row in enumerate(task.rows("eval"))]
    task.rows = lambda _: rows
    used = [row["place"] for row in evaluate(task, max_rows=40).rows]
    assert used == sorted(set(used))
    assert len(used) == 40
    thirds = Counter(3 * place // len(rows) for place in used)
    assert min(thirds[third] for third in range(3)) >= 5
    assert 10 <= sum(place % 2 for place in used) <= 30, "no fixed step"
    task.rows = lambda _: LazyRows(rows.__getitem__, range(len(rows)), listed=False)
    assert evaluate(task, max_rows=5).rows == rows[:5]


@pytest.mark.parametrize(("drops", "kept"), [(False, 12), (True, 9)])
def test_the_kl_of_an_evaluation_is_that_of_its_sampled_responses(drops, kept):
    """Against another model, by plain forwards: a mean over kept responses, and their tokens."""
    policy, other = make_policy(), load_policy("tiny")
    played: list[TensorDictBase] = []

    def on_batch(name: str, batch: TensorDictBase, _: list[int]) -> None:
        played.extend([batch] * (name == "sampled"))

    reference, temperature = Reference(policy, load_reference(other)), 0.6
    options = {"retrieve_kl": reference, "temperature": temperature}
    scores, _ = evaluate(Marked(drops), **options)(0, on_batch=on_batch)
    sums, count = [], 0
    for row in (row for batch in played for row in batch if not row["dropped"]):
        real = row["masks", "all_attention_mask"]
        ids, sampled = row["tokens", "full"][real], row["masks", "all_response_mask"][real]
        mine, theirs = (plain_log_probs(model, ids, temperature) for model in (policy, other))
        sums.append((mine - theirs)[sampled].sum().item())
        count += int(sampled.sum())
    assert len(sums) == kept
    assert scores["eval/kl_ref_sequence"] == pytest.approx(sum(sums) / kept, rel=1e-4)
    assert scores["eval/kl_ref"] == pytest.approx(sum(sums) / count, rel=1e-4)
    assert (scores["eval/sampled_accuracy"], scores["eval/pass@3"]) == (1 / 3, 1)


def a_frontier_is_of_responses_at_temperature_one() -> None:
    """Raise AssertionError unless eval.temperature does not change the responses of a frontier."""
    at_one: list[list[float]] = []

    def on_batch(_: str, batch: TensorDictBase, rows: list[int]) -> None:
        at_one.extend(batch["reward_raw"].sum(-1).view(len(rows), -1).tolist())

    evaluate(Words(), num_samples=4, greedy=False)(0, on_batch=on_batch)
    found = sample(evaluate(Words(), temperature=0.2), 4)
    assert (found["rows"], found["reward"]) == ([0, 1, 2, 3], at_one)


def test_a_frontier_leaves_out_what_the_task_drops_and_counts_it():
    found = sample(evaluate(Marked(drops=True)), 4)
    assert (found["asked"], found["rows"]) == (4, [1, 2, 3])


def test_a_frontier_is_sampled_at_temperature_one():
    a_frontier_is_of_responses_at_temperature_one()


def test_the_seed_alone_changes_a_response(tmp_path):
    whole = evaluate()(0)[1]
    other = evaluate(runtime=Runtime(tmp_path, seed=1))(0)[1]
    pairs = zip(whole, other, strict=True)
    assert all(one["response"] != two["response"] for one, two in pairs)
    _, records = evaluate(prompts_per_batch=1, greedy=False)(9)
    assert [r["response"] for r in records] == [r["response"] for r in whole]
    made = evaluate(every=4)
    assert [i for i in range(1, 11) if made.due(i, 10)] == [4, 8, 10]
