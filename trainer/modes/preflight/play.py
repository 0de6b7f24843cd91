"""The iterations that a preflight plays: those of a run, timed, with their memory measured."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from trainer.modes.preflight.findings import Findings
from trainer.modes.preflight.memory import Peak
from trainer.runs.failures import MEMORY, headline
from trainer.trainer import Trainer


@dataclass(frozen=True)
class Phase:
    """What a phase of an iteration took: seconds, and bytes in use before it and at its peak."""

    seconds: float
    before: int
    peak: int


@dataclass(frozen=True)
class Iteration:
    """An iteration that was played: its batch, its phases, the seconds of the task's rewards."""

    batch: TensorDictBase
    phases: dict[str, Phase]
    rewards: float

    @property
    def seconds(self) -> float:
        """Return the seconds of the whole."""
        return sum(phase.seconds for phase in self.phases.values())


def play(loop: Trainer, findings: Findings) -> list[Iteration]:
    """Play a cold iteration and a warm one, which has the optimizer's moments from its start.

    What they fail at is a problem, on several ranks an error; none is returned then.
    """
    gc.freeze()  # as a run does
    findings.section("Playing two iterations of the run ...")
    try:
        return [play_one(loop, 0), play_one(loop, 1)]
    except (ValueError, OSError, RuntimeError) as error:
        told = isinstance(error, (ValueError, OSError)) or MEMORY.search(str(error))
        if loop.runtime.ranks > 1 or not told:
            raise
        findings.problem(headline(error))
        return []


def play_one(loop: Trainer, number: int) -> Iteration:
    """Play an iteration as the run would, and measure it."""
    phases: dict[str, Phase] = {}

    def phase(name: str, work: Callable[[], Any]) -> Any:
        peak = Peak(loop.runtime.device, trim=number == 1)
        before, start = peak.now(), time.perf_counter()
        out = work()
        phases[name] = Phase(time.perf_counter() - start, before, peak.highest())
        return out

    with timed_rewards(loop.source.env.base_env.task) as seconds:
        batch = phase("generate", lambda: loop.source(number))
    batch = phase("score", lambda: loop.advantage(loop.retrieve_kl(batch)))
    phase("update", lambda: loop.update(batch))
    return Iteration(batch, phases, sum(seconds))


@contextmanager
def timed_rewards(task: Any) -> Iterator[list[float]]:
    """Collect the seconds that a task's rewards take inside the block."""
    took, rewards = [], task.rewards

    def timed(rows: Sequence[Any], replies: Sequence[Any]) -> Any:
        start = time.perf_counter()
        out = rewards(rows, replies)
        took.append(time.perf_counter() - start)
        return out

    task.rewards = timed  # on this object only
    try:
        yield took
    finally:
        del task.rewards
