"""Sampling ahead: the weights that sample each batch, to the bit, and what errors leave.

It is for an engine in another process (tests/test_vllm_runs.py); these play in a thread of this
one, by a copy of the weights.
"""

import copy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contracts import make_policy
from engines import Copy
from runs import metrics
from small_runs import IN_EVALUATION_2, Counted, crash, train
from tensordict import TensorDictBase
from torch import Tensor

from policies.scorer import Scorer
from policies.wrappers.transformers_wrapper import TransformersWrapper
from trainer.evaluation import Evaluate
from trainer.overlap import Overlap
from trainer.sources import DynamicRollouts, Rollouts
from trainer.trainer import Trainer

pytestmark = pytest.mark.runs


def engine_of(policy: TransformersWrapper) -> Copy:
    """Return an engine that computes to the bit what the policy does: torch looks at gradients."""
    return Copy(**{**policy._settings, "model": Scorer(copy.deepcopy(policy.model))})


class Slow:
    """Sample batch j by the weights after max(0, j - behind) iterations, from a list of all."""

    def __init__(self, source: Rollouts, policy: TransformersWrapper, behind: int) -> None:
        self.behind, self.weights, self.source = behind, list[dict[str, Tensor]](), source
        self.model, self.source.generator = policy.model, engine_of(policy)
        self.rows, self.env, self.prompts = source.rows, source.env, source.prompts

    @torch.no_grad()
    def __call__(self, iteration: int) -> TensorDictBase:
        assert len(self.weights) == iteration
        self.weights.append({k: v.clone() for k, v in self.model.state_dict().items()})
        chosen = max(0, iteration - self.behind)
        self.source.generator.model.load_state_dict(self.weights[chosen])
        self.source.generator.version = chosen
        return self.source(iteration)


def slowly(loop: Trainer, behind: int) -> None:
    """Put the slow source into a loop."""
    loop.source = Slow(loop.source, loop.policy, behind)


def ahead(loop: Trainer, number: int) -> None:
    """Let a loop sample so many iterations ahead."""
    old, total = loop.evaluate, loop.num_iterations
    loop.source.generator = loop.generator = engine_of(loop.policy)
    parts = {"env": loop.source.env, "generator": loop.generator, "runtime": loop.runtime}
    sizes = {"num_samples": 2, "prompts_per_batch": old.chunk, "every": old.every}
    loop.evaluate = Evaluate(task=old.task, **parts, **sizes)
    loop.source = Overlap(loop.source, loop.policy, ahead=number, num_iterations=total)


def draw_again(loop: Trainer) -> None:
    old = loop.source
    parts = {"env": old.env, "generator": old.generator, "runtime": old.runtime}
    loop.source = DynamicRollouts(task=loop.evaluate.task, size=4, rounds=3, **parts)


def learnt(folder: Path) -> tuple[list[dict], bytes]:
    """Return the metrics of a run that do not depend on how it sampled, and its model."""
    own = ("sync/", "policy/staleness")
    rows = [{k: v for k, v in row.items() if not k.startswith(own)} for row in metrics(folder)]
    return rows, (folder / "model" / "model.safetensors").read_bytes()


def staleness(folder: Path) -> list[int | None]:
    return [row.get("policy/staleness") for row in metrics(folder)]


@pytest.fixture(scope="module")
def two_ahead(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ahead")
    train(folder, change=lambda loop: ahead(loop, 2))
    return folder


def test_batch_j_is_sampled_by_the_weights_of_j_less_the_number_ahead(two_ahead, tmp_path):
    train(tmp_path / "slow", change=lambda loop: slowly(loop, 2))
    train(tmp_path / "plain")
    assert learnt(two_ahead) == learnt(tmp_path / "slow")
    assert learnt(two_ahead) != learnt(tmp_path / "plain")
    assert staleness(two_ahead) == [None, 0, 1, 2, 2]


def test_a_resumed_run_samples_its_first_batches_by_the_weights_that_it_has(two_ahead, tmp_path):
    folder = shutil.copytree(two_ahead, tmp_path / "run")
    for later in (2, 3, 4):
        shutil.rmtree(folder / "checkpoints" / f"iteration_{later:06d}")
    train(folder, resume=True, change=lambda loop: ahead(loop, 2))
    assert staleness(folder)[2:] == [0, 1, 2]


def test_prompts_that_teach_nothing_are_drawn_again_by_the_same_weights(tmp_path):
    for name, put in ("slow", slowly), ("ahead", ahead):
        train(tmp_path / name, change=lambda loop, put=put: (draw_again(loop), put(loop, 1)))
    assert learnt(tmp_path / "ahead") == learnt(tmp_path / "slow")
    assert any(row["group/resampled"] for row in metrics(tmp_path / "ahead")[1:])


def test_an_error_in_a_batch_ahead_leaves_the_iterations_before_it_whole(tmp_path):
    task = Counted(IN_EVALUATION_2 + 4, crash)  # sampled while the second iteration is learnt
    assert train(tmp_path, task, change=lambda loop: ahead(loop, 1)).endswith("boom\n")
    rows = metrics(tmp_path)
    assert [row["progress/iteration"] for row in rows] == [0, 1, 2]
    assert "eval/sampled_accuracy" in rows[-1]
    assert (tmp_path / "checkpoints" / "iteration_000002").is_dir()


def test_several_ranks_that_draw_again_are_refused():
    source: Any = DynamicRollouts.__new__(DynamicRollouts)
    source.runtime = SimpleNamespace(ranks=2)
    with pytest.raises(ValueError, match=r"trainer\.overlap"):
        Overlap(source, make_policy(), ahead=1, num_iterations=4)
