"""Overlap of sampling and training: batch i + n is sampled while the policy trains on batch i.

For an engine in a separate process (policy.engine.url). One thread samples batch after batch; for
n = 1, from the left:

    sample 0, 1 | iteration 0, sync | iteration 1 with sample 2, sync | iteration 2 with sample 3

Weights are synced when nothing is being sampled, so results do not depend on timing and a batch has
one version of the weights. The denominator of the ratio is the generator's log-probs or, with
trainer.ImportanceSampling, the trained policy's. A checkpoint does not store older weights: after a
resume the first batches are sampled by the checkpoint's weights.
"""

import threading
import time
from concurrent.futures import Future, wait
from typing import Any

import torch
from tensordict import TensorDictBase

from policies.protocols import EngineGenerator, Policy
from trainer.sources import DynamicRollouts, Rollouts
from trainer.weight_sync import SyncResult, weight_sync


class Overlap:
    """Sample from `source` up to `ahead` iterations ahead of the requested one.

    `source.sample` runs in a thread, `source.finished` in the main one. Logs policy/staleness and
    time/sample_s; samples no batch beyond `num_iterations`.
    """

    def __init__(
        self, source: Rollouts, policy: Policy, *, ahead: int, num_iterations: int
    ) -> None:
        if source.runtime.ranks > 1 and isinstance(source, DynamicRollouts):
            # Collectives of the sampling thread could interleave with collectives of the update.
            raise ValueError("trainer.overlap expects one rank with trainer.DynamicRollouts")
        self.source, self.policy = source, policy
        self.ahead, self.total = ahead, num_iterations
        self.env, self.prompts = source.env, source.prompts
        self.plays: dict[int, Future] = {}
        self.last: list[Future] = []  # the newest batch that was started

    @property
    def rows(self) -> Any:
        """Return the rows of the source; the length filter replaces them."""
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

    def sync(self, policy: Policy, generator: EngineGenerator, **proof: Any) -> SyncResult:
        """Run `weight_sync` once nothing is being sampled."""
        wait(self.plays.values())
        return weight_sync(policy, generator, **proof)

    def _start(self, number: int) -> Future:
        """Sample a batch in a daemon thread, after the batches before it."""
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
