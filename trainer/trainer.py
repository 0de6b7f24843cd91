"""The training loop: functions of one TensorDict. trainer/batch.py lists its keys.

    batch = source(i)            rollouts (reset -> generate -> step until done) or demonstrations
    batch = retrieve_kl(batch)   reference log-probs and the per-token KL, once per trajectory
    batch = advantage(batch)     reward, minus the KL if kl.where=reward; group baseline or GAE
    metrics = update(batch)      epochs x minibatches x micro-batches; only this needs gradients
    weight_sync(policy, gen)     new weights for the generator, unless it is the policy
    retrieve_kl.refresh(i)       new weights for the reference, if configured
    leash.follow(metrics)        new KL coefficient, if configured

There is no replay buffer: a batch is at most `trainer.overlap` iterations old. To add a feature,
replace one of these functions (example: trainer/scale/overlap.py); add no branch to the loop.
"""

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase

from policies.protocols import Generator, Policy
from trainer.batch import (
    ADVANTAGE_WRITES,
    OF_ADVANTAGE,
    SOURCE_WRITES,
    BatchFunction,
    check_written,
)
from trainer.checkpoint import Checkpoints, remove, save_model
from trainer.evaluation import Evaluate
from trainer.kl.reference import NoReference, Reference
from trainer.metrics import on_host, summarize
from trainer.observer import Observer
from trainer.resuming import Progress, restore_run
from trainer.runtime import Runtime, check_agreement, peak_memory, recorder
from trainer.speed import Clock, count_tokens, speeds
from trainer.stopping import EarlyStopping, Stopped, sweep_metric
from trainer.transcripts import transcripts
from trainer.update import Update
from trainer.weight_sync import SyncResult, push_weights, weight_sync

if TYPE_CHECKING:
    from trainer.kl.teachers import Teachers


@dataclass
class Trainer:
    """Run the training loop.

    The loop trains `policy`; `generator`, the policy itself or an engine, samples the responses.
    """

    runtime: Runtime
    policy: Policy
    generator: Generator
    source: Callable[[int], TensorDictBase]
    retrieve_kl: Reference | NoReference
    advantage: BatchFunction
    update: Update
    evaluate: Evaluate
    checkpoints: Checkpoints
    num_iterations: int
    num_logged_responses: int | str = 16  # responses per iteration, or "all"
    profile: list[int] = field(default_factory=list)  # iterations that rank 0 traces
    observers: Observer = field(default_factory=Observer)
    progress: Progress = field(default_factory=Progress)
    last_sync: SyncResult = field(default_factory=SyncResult)
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)
    inputs: dict[str, str] = field(default_factory=dict)  # sha256 of each configured file
    parts: dict[str, Any] = field(default_factory=dict)  # stateful parts, by configuration key
    teacher: "Reference | Teachers | NoReference" = field(default_factory=NoReference)

    def run(self, *, resume: bool = False) -> float:
        """Train to the last iteration; return the sweep metric."""
        if resume:
            restore_run(self)
        self.last_sync = push_weights(self.policy, self.generator)  # an engine has other weights
        gc.freeze()  # garbage collection skips the objects of the set-up
        self.runtime.stops.on_stop = self.observers.stopping
        about = {"iteration": self.progress.iteration, "inputs": self.inputs}
        self.runtime.write_status(**about)  # a parent process sees that training has begun
        try:
            self.observers.begin()
            self._catch_up()
            while self.progress.iteration < self.num_iterations:
                self._iteration(self.progress.iteration)
            return self._finish()
        except BaseException as error:
            try:
                self._end("preempted" if isinstance(error, Stopped) else "failed")
            except Exception as second:  # raise the first error instead
                self.observers.say(f"another error followed: {type(second).__name__}: {second}")
            raise

    def _iteration(self, i: int) -> None:
        path = self.runtime.folder / "profile" / f"iteration_{i + 1}.json.gz"
        with recorder(path) if self.runtime.is_main and i + 1 in self.profile else nullcontext():
            clock = Clock()
            batch = self._batch(i, clock)
            self.runtime.set_phase("update")
            batch = self._advantage(batch)
            metrics = self.update(batch)
            clock.lap("update")
            sync = getattr(self.source, "sync", weight_sync)  # Overlap has a custom sync
            self.last_sync = sync(self.policy, self.generator, last=self.last_sync)
            self.retrieve_kl.refresh(i + 1)
            clock.lap("sync")
            batch = on_host(batch)
            metrics |= summarize(batch, self.runtime, rewarded=self.evaluate.task.rewarded)
            metrics |= {each.names.coeff: each.coeff for each in self.update.leash.each}
            metrics |= self.runtime.all_reduce_max(self.last_sync.metrics())
            self.update.leash.follow(metrics, responses=len(batch) * self.runtime.ranks)
            self._count(batch, metrics, clock)
        self._log(batch, metrics)
        done = self.progress.iteration
        self.checkpoints.maybe_save(done, self.state_dict(), last=done == self.num_iterations)

    def score(self, batch: TensorDictBase) -> TensorDictBase:
        """Add the KLs to a batch, and `ref_states` if the update needs them for an exact KL."""
        exact = self.update.leash.exact_leash
        for name, reference in ("ref", self.retrieve_kl), ("teacher", self.teacher):
            batch = reference(batch, keep_states=exact is not None and exact.name == name)
        return batch

    def _batch(self, i: int, clock: Clock) -> TensorDictBase:
        """Collect and score the batch; on a stop signal save the state before iteration `i`."""
        states = self._states()
        try:
            self.runtime.set_phase("collect")
            with self.runtime.stops.stoppable():
                batch = self.source(i)
                check_written(batch, SOURCE_WRITES, self.source)
                clock.lap("collect")
                self.runtime.stops.check()
                self.runtime.set_phase("score")
                batch = self.score(batch)
                clock.lap("score")
                self.runtime.stops.check()
        except Stopped:  # the resumed run repeats this iteration
            self._save(states)
            raise
        return batch

    def _advantage(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the batch with advantages; raise ValueError if a key is missing."""
        judged = ADVANTAGE_WRITES if "reward_raw" in batch else ()
        learnt = [key for key in OF_ADVANTAGE if key in self.update.objective.reads]
        batch = self.advantage(batch)
        check_written(batch, [*learnt, *judged], self.advantage)
        return batch

    def _catch_up(self) -> None:
        """Evaluate before training, or repeat the evaluation that a stop interrupted."""
        if self.progress.iteration == 0:
            self._evaluate({}, kind="before")
        elif self.progress.unevaluated is not None:
            self._evaluate(self.progress.unevaluated, kind="eval")

    def _count(self, batch: TensorDictBase, metrics: dict[str, float], clock: Clock) -> None:
        """Count the iteration in `progress`; add the progress, time and perf metrics."""
        counts = count_tokens(batch, share_prompts=self.policy.scorer.share_prompts)
        total = self.runtime.all_reduce_sum(counts)
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
        metrics |= speeds(
            total,
            metrics,
            update=self.update,
            skipped=metrics.get("optim/early_stopped", 0.0),
            scored="kl_penalty" in batch,
            device=self.runtime.device,
            ranks=self.runtime.ranks,
        )
        memory = {"perf/peak_memory_gib": peak_memory(self.runtime.device) / 2**30}
        metrics |= self.runtime.all_reduce_max(memory)

    def _log(self, batch: TensorDictBase, metrics: dict[str, float]) -> None:
        """Log the metrics and sample responses; stop early or evaluate if due."""
        iteration = self.progress.iteration
        self._stop_early(metrics)
        if "reward_raw" in batch:
            tokenizer = self.policy.tokenizer if self.runtime.is_main else None
            count = self.num_logged_responses
            if count != "all":  # each rank logs an equal share
                count = -(-int(count) // self.runtime.ranks)
            options = {"kind": "train", "rewarded": self.evaluate.task.rewarded}
            local = transcripts(batch, iteration, count=count, tokenizer=tokenizer, **options)
            rows = [row for part in self.runtime.gather(local) for row in part]
            self.observers.responses(rows, iteration, kind="train")
        if self.evaluate.due(iteration, self.num_iterations):
            last = iteration == self.num_iterations
            self._evaluate(metrics, kind="after" if last else "eval")
        else:
            self._write(metrics)

    def _evaluate(self, metrics: dict[str, float], *, kind: str) -> None:
        """Evaluate, log and show sample responses."""
        iteration, states = self.progress.iteration, self._states()

        def on_progress(fraction: float, label: str = f"evaluating {self.evaluate.about}") -> None:
            self.runtime.set_phase("evaluate", fraction)
            self.observers.evaluating(label, fraction, last=kind == "after")

        try:
            # The evaluation after training cannot be stopped.
            with nullcontext() if kind == "after" else self.runtime.stops.stoppable():
                scores, records = self.evaluate(iteration, kind=kind, on_progress=on_progress)
        except Stopped:  # a resume repeats only the evaluation of this iteration
            if iteration:
                self.progress.unevaluated = metrics
                self._write(metrics)
                self._save(states)
            raise
        self.progress.unevaluated = None
        self._stop_early(scores)
        if iteration == self.num_iterations:  # true if early stopping has just ended the run
            kind = "after"
            records = [{**record, "kind": kind} for record in records]
        metrics = {**metrics, **scores, "progress/iteration": iteration}
        if scores:
            self.progress.objective = sweep_metric(scores)
            self.runtime.write_status(held_out=len(self.evaluate.rows))
        self._write(metrics)
        if records:
            self.observers.responses(records, iteration, kind=kind)

    def _stop_early(self, metrics: dict[str, float]) -> None:
        """Make this iteration the last one if the early-stopping rule holds."""
        if self.early_stopping.ended:
            return
        iteration = self.progress.iteration
        # Time metrics differ between ranks, so rank 0 decides.
        self.early_stopping.ended = self.runtime.gather(self.early_stopping(metrics, iteration))[0]
        if self.early_stopping.ended:
            self.num_iterations = iteration
            self.observers.say(f"early stop at iteration {iteration}: {self.early_stopping.ended}")
            self.runtime.write_status(ended=self.early_stopping.ended)

    def _write(self, metrics: dict[str, float]) -> None:
        """Write status, metrics and, without evaluations, the sweep metric: reward or -loss."""
        any_valid = metrics.get("reward/dropped_fraction") != 1  # no reward if all are dropped
        if "loss/total" in metrics and any_valid and not self.evaluate.plans:
            self.progress.objective = metrics.get("reward/mean", -metrics["loss/total"])
        self.runtime.write_status(iteration=self.progress.iteration)
        self.observers.log(metrics, self.progress.iteration)

    def _states(self) -> dict[str, Any]:
        """Return a copy of the state of each stateful part."""
        return deepcopy({name: part.state_dict() for name, part in self.parts.items()})

    def _save(self, states: dict[str, Any]) -> None:
        """Save a checkpoint with these states of the parts, if checkpoint.on_stop."""
        if self.checkpoints.on_stop and self.progress.iteration:
            self.checkpoints.save(self.progress.iteration, self.state_dict() | {"parts": states})

    def _finish(self) -> float:
        """Write the final model and the report; return the sweep metric."""
        self.runtime.set_phase("end")
        folder = self.runtime.folder
        check_agreement(self.policy.scorer, self.runtime, iteration=self.progress.iteration)
        temporary = folder / ".part-model"
        if self.runtime.is_main:
            remove(temporary)
        save_model(self.policy, temporary, write=self.runtime.is_main)
        if self.runtime.is_main:
            remove(folder / "model")
            temporary.rename(folder / "model")
        self.runtime.wait()
        objective = float(self.progress.objective or 0.0)
        self._end("finished", objective=objective)
        return objective

    def _end(self, state: str, **status: Any) -> None:
        """Write the final status and end the observers."""
        try:
            self.runtime.set_phase("end")
            self.runtime.write_status(state=state, **status)
        finally:
            self.observers.end(state, saved=self.checkpoints.last)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, in addition to weights and optimiser."""
        return {
            **vars(self.progress),
            "update": self.update.state_dict(),
            **{each.names.loss: each.controller.state_dict() for each in self.update.leash.each},
            "version": self.policy.version,
            "reference": self.retrieve_kl.sha256,  # a resume refuses another reference
            "teacher": self.teacher.sha256,
            "inputs": self.inputs,  # a resume refuses other rows or templates, and notes other code
            "parts": self._states(),
            "early_stopping": self.early_stopping.state_dict(),
        }
