"""Overlap: batch i + n is sampled, by the weights after i iterations, while batch i is learnt from.

For an engine in a process of its own (policy.vllm.url). One thread plays batch after batch; with
n = 1, from the left:

    play 0, play 1 | iteration 0, sync | iteration 1 beside play 2, sync | iteration 2 beside play 3

New weights are handed over when nothing is being played, so results depend on no clock. The ratio
is to the log-probs that sampled, or, with trainer.ImportanceSampling, to those of the policy that
learns, weighted by how far these are apart.
Left out on purpose: batches from several versions of the weights; older weights in a checkpoint: a
resumed run samples its first batches by those that it goes on from.
"""

import threading
import time
from concurrent.futures import Future, wait
from typing import Any

import torch
from tensordict import TensorDictBase

from policies.protocols import Engine, Policy
from trainer.sources import DynamicRollouts, Rollouts
from trainer.weight_sync import Synced, weight_sync


class Overlap:
    """Play what `source` plays, `ahead` iterations ahead of the one that is asked for.

    Its `sample` is called in a thread, its `finished` in the loop's. Logs policy/staleness and
    time/sample_s; of `num_iterations` nothing is played beyond the last.
    """

    def __init__(
        self, source: Rollouts, policy: Policy, *, ahead: int, num_iterations: int
    ) -> None:
        if not hasattr(source, "sample"):
            raise ValueError(f"trainer.overlap expects Rollouts, got {type(source).__name__}")
        if source.runtime.ranks > 1 and isinstance(source, DynamicRollouts):
            # Its rounds would meet the gradients of other ranks.
            raise ValueError("trainer.overlap expects one rank with trainer.DynamicRollouts")
        self.source, self.policy, self.ahead, self.total = source, policy, ahead, num_iterations
        self.env, self.prompts = source.env, source.prompts
        self.plays: dict[int, Future] = {}
        self.last: list[Future] = []  # the play that the next one waits for

    @property
    def rows(self) -> Any:
        """Return the rows that are played; those that do not fit are taken out."""
        return self.source.rows

    @rows.setter
    def rows(self, rows: Any) -> None:
        self.source.rows = rows

    def __call__(self, iteration: int) -> TensorDictBase:
        """Return this rank's trajectories of the iteration, [B, T]."""
        for number in range(iteration, min(iteration + self.ahead + 1, self.total)):
            if number not in self.plays:
                self.plays[number] = self._start(number)
        batch, seconds = self.plays.pop(iteration).result()
        versions, shape = batch.get("policy_version"), batch.get("loss_mask").shape
        behind = (self.policy.version - versions).float().unsqueeze(-1)  # [B, 1]
        batch.set(("logged", "policy/staleness"), behind.expand(shape).clone())
        batch.set(("logged", "time/sample_s"), torch.full_like(behind[:, 0], seconds))
        return self.source.finished(batch)

    def sync(self, policy: Policy, generator: Engine, **proof: Any) -> Synced:
        """Hand new weights over, as `weight_sync` does, once nothing is being played."""
        wait(self.plays.values())
        return weight_sync(policy, generator, **proof)

    def _start(self, number: int) -> Future:
        """Play a batch in a thread, after those before it; a run that ends waits for none."""
        done, before = Future(), self.last

        def play() -> None:
            wait(before)
            try:
                start = time.perf_counter()
                batch = self.source.sample(number)
                done.set_result((batch, time.perf_counter() - start))
            except BaseException as error:  # a reward may raise SystemExit
                done.set_exception(error)

        self.last = [done]
        threading.Thread(target=play, daemon=True).start()
        return done
