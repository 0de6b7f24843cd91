"""Runs that sample ahead, and the slow loop that says what they must do."""

import copy
from collections.abc import Callable

import torch
from engines import Copy
from tensordict import TensorDictBase
from torch import Tensor

from policies.scorer import Scorer
from policies.wrappers.transformers_wrapper import TransformersWrapper
from trainer.evaluation import Evaluate
from trainer.overlap import Overlap
from trainer.sources import Rollouts
from trainer.trainer import Trainer

Change = Callable[[Trainer], object]


def nothing(loop: Trainer) -> None:
    """Leave a loop as it is."""


def elsewhere(policy: TransformersWrapper, kind: type[Copy] = Copy) -> Copy:
    """Return an engine that computes to the bit what the policy does: torch looks at gradients."""
    return kind(**{**policy._settings, "model": Scorer(copy.deepcopy(policy.model))})


class Slow:
    """Sample batch j by the weights after max(0, j - behind) iterations, from a list of all."""

    def __init__(self, source: Rollouts, policy: TransformersWrapper, behind: int) -> None:
        self.behind, self.weights, self.source = behind, list[dict[str, Tensor]](), source
        self.model, self.source.generator = policy.model, elsewhere(policy)
        self.rows, self.env, self.prompts = source.rows, source.env, source.prompts

    @torch.no_grad()
    def __call__(self, iteration: int) -> TensorDictBase:
        assert len(self.weights) == iteration
        self.weights.append({k: v.clone() for k, v in self.model.state_dict().items()})
        chosen = max(0, iteration - self.behind)
        self.source.generator.model.load_state_dict(self.weights[chosen])
        self.source.generator.version = chosen
        return self.source(iteration)


def slowly(behind: int, change: Change = nothing) -> Change:
    """Return what puts the slow source into a loop."""

    def changed(loop: Trainer) -> None:
        change(loop)
        loop.source = Slow(loop.source, loop.policy, behind)

    return changed


def ahead(
    number: int,
    change: Change = nothing,
    *,
    make: Callable[[TransformersWrapper], TransformersWrapper] = elsewhere,
) -> Change:
    """Return what lets a loop sample so many iterations ahead, by an engine that `make` makes."""

    def changed(loop: Trainer) -> None:
        change(loop)
        generator = make(loop.policy)
        loop.source.generator = loop.generator = generator
        loop.source = Overlap(
            loop.source, loop.policy, ahead=number, num_iterations=loop.num_iterations
        )
        old = loop.evaluate
        sizes = {"num_samples": 2, "prompts_per_batch": old.chunk, "every": old.every}
        parts = {"task": old.task, "env": loop.source.env, "runtime": loop.runtime}
        loop.evaluate = Evaluate(**parts, generator=generator, **sizes)

    return changed
