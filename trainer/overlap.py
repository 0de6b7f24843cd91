"""Overlap: the next batches are sampled while this one is learnt from, `ahead` of them at most.

Batch j is always sampled by the weights after max(0, j - ahead) iterations, never by the newest
there happen to be: results depend on no clock, and a resumed run has the same batches again. One
thread does what there is to do in the order it was asked for; with ahead = 1, from the left:

    play 0, play 1 | iteration 0 | take v1 | play 2 | iteration 1 | take v2 | play 3 ...

The loop asks for a batch, hands weights over and evaluates as ever: all of it goes through that
order, so an evaluation has the newest weights. The ratio is to the log-probs that sampled, or, with
trainer.ImportanceSampling, to those of the policy that learns, weighted by how far these are apart.
Left out on purpose: batches from several versions of the weights; dropping what is too old.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol
from weakref import finalize

import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict, TensorDictBase

from policies.roles import Engine, Policy
from policies.weights import weights_of
from trainer.hand_over import Offer, offer, take
from trainer.runtime import Runtime
from trainer.weight_sync import Synced

PATIENCE = 5.0  # seconds for the thread to end
FOLDER = "ahead"  # of a checkpoint: the weights that sampled what was not yet learnt from


class Plays(Protocol):
    """A source in two halves: what samples, and what the loop's own thread then does."""

    runtime: Runtime
    rows: Any
    env: Any

    def prompts(self, iteration: int) -> TensorDict: ...

    def sample(self, iteration: int) -> TensorDict: ...

    def finished(self, batch: TensorDictBase) -> TensorDictBase: ...


class Line:
    """A thread that does one thing after the other; after an error all that follows has it too.

    Unless the task is `alone`: then who waits for it is told, and nobody else.

    >>> line = Line()
    >>> first, second = line.put(lambda: 1), line.put(lambda: 2)
    >>> second.result(), first.done()
    (2, True)
    """

    def __init__(self) -> None:
        self.tasks: SimpleQueue[tuple[Future, Callable[[], Any], bool] | None] = SimpleQueue()
        # A thread has a GPU of its own choice: the loop's.
        gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
        self.thread = threading.Thread(target=_work, args=(self.tasks, gpu), daemon=True)
        self.thread.start()

    def put(self, task: Callable[[], Any], *, alone: bool = False) -> Future:
        """Do a task after those that there are."""
        done: Future = Future()
        self.tasks.put((done, task, alone))
        return done

    def settle(self) -> None:
        """Wait until all is done, well or not."""
        self.put(lambda: None).exception()


def _work(tasks: SimpleQueue, gpu: int | None) -> None:
    failed = None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    while (one := tasks.get()) is not None:
        done, task, alone = one
        try:
            if failed is not None:
                raise failed
            done.set_result(task())
        except BaseException as error:  # a reward may raise SystemExit
            failed = failed if alone else error
            done.set_exception(error)
        del one, done, task  # a batch is not held until the next


def _end(line: Line, close: Callable[[], Any] | None) -> None:
    """Do no more of what is in line; what is being sampled is not waited for."""
    with suppress(Empty):
        while True:
            line.tasks.get_nowait()
    line.tasks.put(None)
    if close is not None:
        close()
    line.thread.join(PATIENCE)


class Queued:
    """A generator whose calls stand in line with the others."""

    def __init__(self, engine: Any, line: Line) -> None:
        self.engine, self.line = engine, line

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """Generate, in the line's thread."""
        if threading.current_thread() is self.line.thread:
            return self.engine(td)
        return self.line.put(partial(self.engine, td)).result()

    def get_new_version(self, **changes: Any) -> "Queued":
        """Return the same weights, and place in line, with other settings."""
        return Queued(self.engine.get_new_version(**changes), self.line)

    def settle(self) -> None:
        """Wait until nothing is played: env and task are used by one thread at a time."""
        self.line.settle()


class AheadGenerator(Queued):
    """A generator with weights of its own that takes new ones in line, and keeps the last ones.

    `kept` are those that sample batches up to `ahead` iterations ahead, by their version.
    """

    def __init__(self, engine: Engine, policy: Policy, *, ahead: int) -> None:
        super().__init__(engine, Line())
        self.policy, self.most = policy, ahead
        self.kept: dict[int, Offer] = {}
        self.taken: dict[int, Future] = {}  # by version, with the proof as their result
        self.synced = Synced()  # the proof of the last ones, in the thread of the line
        self.holds: int | None = None  # the version at this end of the line
        self.learnt = -1  # the version that sampled the batch learnt from last
        self.close = finalize(self, _end, self.line, getattr(engine, "close", None))

    def around(self, source: Plays, runtime: Runtime, settings: Mapping[str, Any]) -> "Overlap":
        """Return a source that this one plays ahead, of a run with these settings of `trainer`.

        ValueError where several ranks share one server: they would meet in two threads.
        """
        if runtime.ranks > 1 and getattr(self.engine.scorer, "shared", False):
            raise ValueError(
                f"trainer.overlap expects an engine a rank, got {runtime.ranks} ranks and one "
                "policy.vllm.url; leave the url out, or give launch.num_processes=1"
            )
        return Overlap(source, self, runtime, num_iterations=settings["num_iterations"])

    def later(self, policy: Policy) -> Synced:
        """Offer the policy's weights of now; return the proof of those of the batch just learnt."""
        proof = self.taken.get(self.learnt)
        self.keep(policy.version)
        self.turn_to(policy.version)
        return Synced() if proof is None else proof.result()

    def keep(self, version: int) -> None:
        """Keep a copy of the policy's weights as this version, and forget the oldest."""
        if version not in self.kept:
            self.kept[version] = offer(self.policy, self.engine, copy=True)
        oldest = version - self.most
        self.kept = {v: kept for v, kept in self.kept.items() if v >= oldest}
        self.taken = {v: done for v, done in self.taken.items() if v >= oldest}

    def turn_to(self, version: int) -> None:
        """Let what comes next in line be sampled by this version."""
        if version != self.holds:
            self.taken[version] = self.line.put(partial(self._take, self.kept[version]))
            self.holds = version

    def _take(self, offered: Offer) -> Synced:
        self.synced = take(self.engine, offered, last=self.synced)
        return self.synced

    def save(self, folder: Path) -> None:
        """Write the weights that batches on their way were sampled by into a checkpoint."""
        for version, kept in self.kept.items():
            if version != self.policy.version:  # that is the checkpoint itself
                (folder / FOLDER).mkdir(exist_ok=True)
                save_file(
                    dict(kept.trained), folder / FOLDER / f"version_{version:06d}.safetensors"
                )

    @torch.no_grad()
    def restore(self, folder: Path, version: int) -> str:
        """Read what `save` wrote at a version; return what to tell people if there is less."""
        mine = weights_of(self.policy.scorer).named()
        now = {name: weight.detach().clone() for name, weight in mine.items()}
        before, self.policy.version = self.policy.version, version
        wanted = range(max(0, version - self.most), version)
        for old in wanted:
            path = folder / FOLDER / f"version_{old:06d}.safetensors"
            if path.is_file():
                self._put(load_file(path))
                self.policy.version = old
                self.kept[old] = offer(self.policy, self.engine, copy=True)
        self._put(now)
        self.policy.version = before
        lost = len({*wanted} - self.kept.keys())
        what = f"the next {lost} batches" if lost > 1 else "the next batch"
        return f"{what} by its weights, it holds no older ones (trainer.overlap)" if lost else ""

    def _put(self, named: dict[str, torch.Tensor]) -> None:
        for name, weight in weights_of(self.policy.scorer).named().items():
            weight.copy_(named[name])


class Overlap:
    """Play what `source` plays, up to `ahead` iterations ahead of the one that is asked for.

    Its `sample` is called in the thread of the generator's line, its `finished` in the loop's. Logs
    policy/staleness and time/sample_s; of `num_iterations` nothing is played beyond the last.
    """

    def __init__(
        self, source: Plays, ahead: AheadGenerator, runtime: Runtime, *, num_iterations: int
    ) -> None:
        halves = ("sample", "finished", "prompts")
        if lacks := [name for name in halves if not hasattr(source, name)]:
            raise ValueError(
                f"trainer.overlap expects a source with {' and '.join(lacks)}, as trainer.Rollouts "
                f"has, got a {type(source).__name__}; leave it out"
            )
        self.source, self.ahead, self.total = source, ahead, num_iterations
        # What fails in a batch ahead is told when that one is asked for: what comes before it is
        # evaluated and saved. Other ranks would wait for it in their lines.
        self.alone = runtime.ranks == 1
        source.runtime = runtime.beside()  # its thread meets the other ranks' apart from the loop
        self.env, self.prompts = source.env, source.prompts
        self.plays: dict[int, Future] = {}

    @property
    def rows(self) -> Any:
        """Return the rows that are played; those that do not fit are taken out."""
        return self.source.rows

    @rows.setter
    def rows(self, rows: Any) -> None:
        self.source.rows = rows

    def __call__(self, iteration: int) -> TensorDictBase:
        """Return this rank's trajectories of the iteration, [B, T]."""
        ahead, newest = self.ahead, self.ahead.policy.version
        ahead.keep(newest)
        for number in range(iteration, min(iteration + ahead.most + 1, self.total)):
            if number not in self.plays:
                version = newest - iteration + max(0, number - ahead.most)
                ahead.turn_to(version if version in ahead.kept else newest)
                self.plays[number] = ahead.line.put(partial(self._play, number), alone=self.alone)
        batch, seconds = self.plays.pop(iteration).result()
        versions, shape = batch.get("policy_version"), batch.get("loss_mask").shape
        ahead.learnt = int(versions[0])
        behind = (newest - versions).float().unsqueeze(-1).expand(shape).clone()  # [B, T]
        batch.set(("logged", "policy/staleness"), behind)
        batch.set(("logged", "time/sample_s"), torch.full_like(behind[:, 0], seconds))
        return self.source.finished(batch)

    def _play(self, iteration: int) -> tuple[TensorDict, float]:
        start = time.perf_counter()
        batch = self.source.sample(iteration)
        return batch, time.perf_counter() - start


def make_ahead(policy: Any, generator: Any, *, ahead: int) -> AheadGenerator:
    """Return a generator that samples `ahead` iterations ahead.

    It needs weights of its own: those of a second process where the policy itself would sample.
    """
    if generator is not policy:
        return AheadGenerator(generator, policy, ahead=ahead)
    from policies.beside import process_beside  # another engine needs none

    return AheadGenerator(process_beside(policy), policy, ahead=ahead)
