"""The loop: a list of verbs on one TensorDict, whose keys trainer/batch.py says.

    batch = source(i)            rollouts (reset -> generate -> step until done) or demonstrations
    batch = retrieve_kl(batch)   reference log-probs and the per-token KL, once per trajectory
    batch = advantage(batch)     the leash in the reward, group baseline or GAE
    metrics = update(batch)      epochs x minibatches x micro-batches: the only gradients
    weight_sync(policy, gen)     the generator gets the new weights; it may be the policy itself
    retrieve_kl.refresh(i)       the reference follows the policy, if it is to
    leash.follow(metrics)        the coefficient follows the KL, if it is to

Left out on purpose: replay across iterations. A new feature is a file that replaces one of the
verbs, never a branch in the loop: so is sampling ahead (trainer/overlap.py). Who watches is an
observer.
"""

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from tensordict import TensorDictBase

from policies.protocols import Generator, Policy
from trainer.checkpoint import Checkpoints, remove, save_model
from trainer.early_stopping import EarlyStopping
from trainer.evaluation import Evaluate
from trainer.kl import Leash
from trainer.metrics import summarize
from trainer.observer import Observer
from trainer.reference import NoReference, Reference
from trainer.resuming import Progress, restore_run
from trainer.runtime import Runtime, Stopped, check_agreement, peak
from trainer.transcripts import transcripts
from trainer.update import Update
from trainer.weight_sync import Synced, hand_over, weight_sync

Verb = Callable[[TensorDictBase], TensorDictBase]


@dataclass
class Trainer:
    """Run the loop on the parts that train.py put together.

    `policy` learns, `generator` samples: the policy itself unless an engine does.
    """

    runtime: Runtime
    policy: Policy
    generator: Generator
    source: Callable[[int], TensorDictBase]
    retrieve_kl: Reference | NoReference
    advantage: Verb
    update: Update
    evaluate: Evaluate
    leash: Leash
    checkpoints: Checkpoints
    num_iterations: int
    replies: int | str = 16  # of an iteration that are kept, or "all"
    observers: Observer = field(default_factory=Observer)
    progress: Progress = field(default_factory=Progress)
    synced: Synced = field(default_factory=Synced)
    enough: EarlyStopping | None = None
    inputs: dict[str, str] = field(default_factory=dict)  # sha256 of files of the configuration
    parts: dict[str, Any] = field(default_factory=dict)  # with a state of their own, by key

    def run(self, *, resume: bool = False) -> float:
        """Train to the last iteration; return the objective of a sweep."""
        if self.update.objective.leash not in (None, self.leash):
            raise ValueError("expected one Leash, got two: hand the Trainer that of its objective")
        if resume:
            restore_run(self)
        self.synced = hand_over(self.policy, self.generator)  # a resumed policy, say
        gc.freeze()  # the set-up's objects stay: full collections need not walk them
        self.runtime.on_stop = self.observers.stopping
        self.runtime.write_status(iteration=self.progress.iteration)  # the parent: it has begun
        try:
            self.observers.begin()
            self._catch_up()
            while self.progress.iteration < self.num_iterations:
                self._iteration(self.progress.iteration)
            return self._finish()
        except BaseException as error:
            try:
                self._end("preempted" if isinstance(error, Stopped) else "failed")
            except Exception as second:  # the first error is the one to tell
                self.observers.say(f"and then, on leaving: {type(second).__name__}: {second}")
            raise

    def _iteration(self, i: int) -> None:
        clock = Clock()
        batch = self._batch(i, clock)
        self.runtime.at("update")
        batch = self.advantage(batch)
        metrics = self.update(batch)
        clock.lap("update")
        sync = getattr(self.source, "sync", weight_sync)  # what samples ahead has its own
        self.synced = sync(self.policy, self.generator, last=self.synced)
        self.retrieve_kl.refresh(i + 1)
        clock.lap("sync")
        metrics |= summarize(batch, self.runtime) | {"kl/coeff": self.leash.coeff}
        metrics |= self.runtime.maxima(self.synced.metrics())
        self.leash.follow(metrics, replies=len(batch) * self.runtime.ranks)
        self._count(batch, metrics, clock)
        self._log(batch, metrics)
        done = self.progress.iteration
        self.checkpoints.maybe_save(done, self.state_dict(), last=done == self.num_iterations)

    def _batch(self, i: int, clock: "Clock") -> TensorDictBase:
        """Return the iteration's batch with its KL; a stop up to here leaves the weights alone."""
        parts = self._states()
        try:
            self.runtime.at("collect")
            with self.runtime.stoppable():
                batch = self.source(i)
                clock.lap("collect")
                self.runtime.check_stop()
                self.runtime.at("score")
                batch = self.retrieve_kl(batch)
                clock.lap("score")
                self.runtime.check_stop()
        except Stopped:  # the resumed run plays this iteration again
            self._save(parts)
            raise
        return batch

    def _catch_up(self) -> None:
        """Evaluate before training, or make up for the evaluation that a stop cut off."""
        if self.progress.iteration == 0:
            self._evaluate({}, kind="before")
        elif self.progress.unevaluated is not None:
            self._evaluate(self.progress.unevaluated, kind="eval")

    def _count(self, batch: TensorDictBase, metrics: dict[str, float], clock: "Clock") -> None:
        """Add the progress, time and perf metrics."""
        tokens = float(batch.get(("masks", "all_attention_mask")).sum())
        total = self.runtime.sums({"tokens": tokens, "samples": float(batch.batch_size[0])})
        self.progress.iteration += 1
        self.progress.tokens += int(total["tokens"])
        self.progress.samples += int(total["samples"])
        self.progress.seconds = time.monotonic() - self.runtime.started
        metrics |= {
            "progress/iteration": self.progress.iteration,
            "progress/step": self.update.step,
            "progress/tokens": self.progress.tokens,
            "progress/samples": self.progress.samples,
        }
        metrics |= clock.seconds()
        metrics["perf/tokens_per_s"] = total["tokens"] / max(metrics["time/iteration_s"], 1e-9)
        most = {"perf/peak_memory_gib": peak(self.runtime.device) / 2**30}
        metrics |= self.runtime.maxima(most)

    def _log(self, batch: TensorDictBase, metrics: dict[str, float]) -> None:
        iteration = self.progress.iteration
        self._judge(metrics)
        if "reward_raw" in batch:
            tokenizer = self.policy.tokenizer if self.runtime.is_main else None
            count = self.replies
            if count != "all":  # an equal share of each rank
                count = -(-int(count) // self.runtime.ranks)
            mine = transcripts(batch, iteration, count=count, kind="train", tokenizer=tokenizer)
            rows = [row for part in self.runtime.gather(mine) for row in part]
            self.observers.replies(rows, iteration, kind="train")
        if self.evaluate.due(iteration, self.num_iterations):
            last = iteration == self.num_iterations
            self._evaluate(metrics, kind="after" if last else "eval")
        else:
            self._write(metrics)

    def _evaluate(self, metrics: dict[str, float], *, kind: str) -> None:
        """Evaluate, log and show sample replies."""
        iteration, parts = self.progress.iteration, self._states()

        def tell(share: float, what: str = f"evaluating {self.evaluate.about}") -> None:
            self.runtime.at("evaluate", share)
            self.observers.evaluating(what, share, last=kind == "after")

        try:
            # A run that is trained is finished first.
            with nullcontext() if kind == "after" else self.runtime.stoppable():
                scores, records = self.evaluate(iteration, kind=kind, tell=tell)
        except Stopped:  # the iteration is done, only its evaluation is missing
            if iteration:
                self.progress.unevaluated = metrics
                self._write(metrics)
                self._save(parts)
            raise
        self.progress.unevaluated = None
        self._judge(scores)
        if iteration == self.num_iterations:  # as it may have come to be just now
            records = [{**record, "kind": (kind := "after")} for record in records]
        metrics = {**metrics, **scores, "progress/iteration": iteration}
        if scores:
            self.progress.objective = next(iter(scores.values()))
            self.runtime.write_status(held_out=len(self.evaluate.rows))
        self._write(metrics)
        if records:
            self.observers.replies(records, iteration, kind=kind)

    def _judge(self, metrics: dict[str, float]) -> None:
        """Let this iteration be the last one if the run has learnt enough."""
        if self.enough is None or self.enough.ended:
            return
        iteration = self.progress.iteration
        # Times differ by rank: rank 0 decides.
        self.enough.ended = self.runtime.gather(self.enough(metrics, iteration))[0]
        if self.enough.ended:
            self.num_iterations = iteration
            self.observers.say(f"enough at iteration {iteration}: {self.enough.ended}")
            self.runtime.write_status(ended=self.enough.ended)

    def _write(self, metrics: dict[str, float]) -> None:
        judged = metrics.get("reward/dropped_fraction") != 1  # else there is no reward to go by
        if "loss/total" in metrics and judged and not self.evaluate.plans:
            self.progress.objective = metrics.get("reward/mean", -metrics["loss/total"])
        self.runtime.write_status(iteration=self.progress.iteration)
        self.observers.log(metrics, self.progress.iteration)

    def _states(self) -> dict[str, Any]:
        """Return a copy of the state of each part that has one."""
        return deepcopy({name: part.state_dict() for name, part in self.parts.items()})

    def _save(self, parts: dict[str, Any]) -> None:
        """Save now, if this run keeps checkpoints, with an earlier state of the parts."""
        if self.checkpoints.every and self.progress.iteration:
            self.checkpoints.save(self.progress.iteration, self.state_dict() | {"parts": parts})

    def _finish(self) -> float:
        """Write the final model and the report; return the objective."""
        self.runtime.at("end")
        folder = self.runtime.folder
        check_agreement(self.policy.scorer, self.runtime, iteration=self.progress.iteration)
        part = folder / ".part-model"
        if self.runtime.is_main:
            remove(part)
        save_model(self.policy, part, here=self.runtime.is_main)
        if self.runtime.is_main:
            remove(folder / "model")
            part.rename(folder / "model")
        self.runtime.accelerator.wait_for_everyone()
        objective = float(self.progress.objective or 0.0)
        self._end("finished", objective=objective)
        return objective

    def _end(self, state: str, **status: Any) -> None:
        """Leave a run readable; one that did not finish says how to go on."""
        try:
            self.runtime.at("end")
            self.runtime.write_status(state=state, **status)
        finally:
            self.observers.end(state, saved=self.checkpoints.last)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs beside weights and optimiser."""
        return {
            **vars(self.progress),
            "update": self.update.state_dict(),
            "kl": self.leash.controller.state_dict(),
            "version": self.policy.version,
            "reference": self.retrieve_kl.sha256,  # a resumed run must have the same,
            "inputs": self.inputs,  # and the same rows, templates and code
            "parts": self._states(),
            **({"enough": self.enough.state_dict()} if self.enough else {}),
        }


class Clock:
    """Seconds of the phases of an iteration."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """End a phase."""
        now = time.perf_counter()
        self.laps[name], self.last = now - self.last, now

    def seconds(self) -> dict[str, float]:
        """Return time/<phase>_s and time/iteration_s."""
        out = {f"time/{name}_s": value for name, value in self.laps.items()}
        return out | {"time/iteration_s": time.perf_counter() - self.start}
