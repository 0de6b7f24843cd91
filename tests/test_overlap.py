"""Sampling ahead: which weights sample which batch, to the bit, and what stops and errors leave."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contracts import leash, make_policy, rollout
from engines import Stale
from overlapped import ahead, elsewhere, slowly
from runs import lines, metrics
from small_runs import IN_EVALUATION_2, IN_ITERATION_2, Counted, crash, train
from steps import double_policy, grad_of, gradient, tables

from conf.compose import compose_checked
from policies.wrappers.transformers_wrapper import TransformersWrapper
from trainer.advantage import GroupAdvantage
from trainer.objectives import GRPOObjective
from trainer.overlap import Overlap
from trainer.sources import DynamicRollouts
from trainer.trainer import Trainer


def learnt(folder: Path) -> tuple[list[dict], bytes]:
    """Return the metrics of a run that do not say how it sampled, and its model."""
    own = ("sync/", "policy/staleness")
    rows = [{k: v for k, v in row.items() if not k.startswith(own)} for row in metrics(folder)]
    return rows, (folder / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> dict[int, tuple]:
    out = {}
    for behind in (0, 1, 2):
        folder = tmp_path_factory.mktemp(f"behind{behind}")
        train(folder, change=slowly(behind))
        out[behind] = learnt(folder)
    return out


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> dict[int, Path]:
    out = {}
    for number in (1, 2):
        out[number] = tmp_path_factory.mktemp(f"ahead{number}")
        train(out[number], change=ahead(number))
    return out


def test_a_slow_loop_by_older_weights_learns_something_else(slow, tmp_path):
    train(tmp_path)
    assert learnt(tmp_path) == slow[0]
    assert len({model for _, model in slow.values()}) == 3


@pytest.mark.parametrize("number", [1, 2])
def test_batch_j_is_sampled_by_the_weights_of_j_less_the_number_ahead(number, slow, straight):
    assert learnt(straight[number]) == slow[number]
    said = [row.get("policy/staleness") for row in metrics(straight[number])]
    assert said == [None, *(min(j, number) for j in range(4))]
    assert all(row["time/sample_s"] > 0 for row in lines(straight[number] / "metrics.jsonl")[1:])


def test_a_resumed_run_samples_its_first_batches_by_the_weights_that_it_has(straight, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(straight[2], folder)
    for later in (2, 3, 4):
        shutil.rmtree(folder / "checkpoints" / f"iteration_{later:06d}")
    assert "resumed  from iteration 1\n" in train(folder, resume=True, change=ahead(2))
    assert [row["policy/staleness"] for row in metrics(folder)[2:]] == [0, 1, 2]


def test_an_error_in_a_reward_ends_the_run_where_it_would_without(tmp_path):
    for name, options in (("with", {"change": ahead(2)}), ("without", {})):
        shown = train(tmp_path / name, Counted(IN_ITERATION_2, crash), **options)
        assert shown.endswith("boom\n")
        assert [row["progress/iteration"] for row in metrics(tmp_path / name)] == [0, 1]
    assert metrics(tmp_path / "with")[0] == metrics(tmp_path / "without")[0]


def test_an_error_in_a_batch_ahead_leaves_what_comes_before_it_whole(tmp_path):
    task = Counted(IN_EVALUATION_2 + 4, crash)  # sampled while the second iteration is learnt
    shown = train(tmp_path, task, change=ahead(1))
    assert shown.endswith("boom\n")
    assert task.count > task.at + 1, "the evaluation came after it"
    rows = metrics(tmp_path)
    assert [row["progress/iteration"] for row in rows] == [0, 1, 2]
    assert "eval/sampled_accuracy" in rows[-1]
    assert (tmp_path / "checkpoints" / "iteration_000002").is_dir()


def test_an_engine_that_takes_no_weights_ends_the_run_before_it_samples_by_them(tmp_path):
    def stale(policy: TransformersWrapper) -> Stale:
        return elsewhere(policy, Stale)

    with pytest.raises(RuntimeError, match="the engine is stale"):
        train(tmp_path, change=ahead(1, make=stale))
    assert [row["progress/iteration"] for row in metrics(tmp_path)] == [0]


def test_several_ranks_that_draw_again_are_refused():
    source: Any = DynamicRollouts.__new__(DynamicRollouts)
    source.runtime = SimpleNamespace(ranks=2)
    with pytest.raises(ValueError, match=r"expects one rank with .*DynamicRollouts"):
        Overlap(source, make_policy(), ahead=1, num_iterations=4)


def test_prompts_that_teach_nothing_are_drawn_again_by_the_same_weights(tmp_path):
    def dynamic(loop: Trainer) -> None:
        old = loop.source
        parts = {"env": old.env, "generator": old.generator, "runtime": old.runtime}
        loop.source = DynamicRollouts(task=loop.evaluate.task, size=4, rounds=3, **parts)

    train(tmp_path / "slow", change=slowly(1, dynamic))
    train(tmp_path / "ahead", change=ahead(1, dynamic))
    assert learnt(tmp_path / "ahead") == learnt(tmp_path / "slow")
    drawn = [row["group/resampled"] for row in metrics(tmp_path / "ahead")[1:]]
    assert any(drawn)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["experiment=grpo_tiny", "trainer.overlap=-1"], "expected trainer.overlap >= 0, got -1"),
        (["experiment=grpo_tiny", "trainer.overlap=1"], "policy.engine=vllm and policy.vllm.url"),
    ],
)
def test_what_cannot_sample_ahead_is_refused(words, told):
    with pytest.raises(ValueError, match=told):
        compose_checked(words)


@pytest.fixture(name="double")
def double_fixture():
    return double_policy()


def test_the_ratio_is_to_the_log_probs_that_sampled_however_old_in_float64(double):
    """Against a loop over tokens: the policy has learnt twice since it sampled."""
    batch = rollout(double, turns=2, count=2)
    batch["log_probs", "full"] = batch["log_probs", "full"].double()
    batch = GroupAdvantage(group_size=4, leash=leash(0.0))(batch)
    sampled_by = batch["log_probs", "full"].clone()
    with torch.no_grad():
        for weight in double.model.parameters():
            weight.mul_(1.03).mul_(0.99)
    objective = GRPOObjective(clip_low=0.1, clip_high=0.3, leash=leash(0.0))
    got, said = gradient(double, objective, batch, micro_batch_tokens=120)
    loss, count, far = torch.zeros((), dtype=torch.float64), 0, 0
    for row in range(len(batch)):
        real = batch["masks", "all_attention_mask"][row]
        ids, learnt = batch["tokens", "full"][row][real], batch["loss_mask"][row][real]
        old, advantage = sampled_by[row][real].double(), batch["advantage"][row][real].double()
        table = tables(double.model, ids)
        for t in range(1, len(ids)):
            if learnt[t]:
                ratio = (table[t - 1, ids[t]] - old[t]).exp()
                clipped = ratio.clamp(0.9, 1.3)
                loss = loss - torch.minimum(ratio * advantage[t], clipped * advantage[t])
                count, far = count + 1, max(far, float(ratio.detach()))
    double.model.zero_grad()
    (loss / count).backward()
    want = grad_of(double)
    assert (got - want).norm() / want.norm() < 1e-6
    assert said["policy/ratio_max"] == pytest.approx(far)
    assert far > 1.05
