"""The iterations that a preflight plays: those of a run, timed, with their memory measured."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from trainer.memory import Peak
from trainer.modes.preflight.findings import Findings
from trainer.modes.preflight.rows import Timed, timed_rewards
from trainer.runs.failures import MEMORY, headline
from trainer.trainer import Clock, Trainer

ENOUGH, MOST = 4.0, 6  # seconds of iterations that are timed, and their number
MEASURED = 1  # the iteration whose memory is told: the first that has the optimizer's moments


@dataclass(frozen=True)
class Iteration:
    """A real iteration that was played; `seconds` and peak memory (bytes) of each phase."""

    batch: TensorDictBase
    rewards: Timed
    seconds: dict[str, float]
    peaks: dict[str, int]

    @property
    def total(self) -> float:
        """Return the seconds of the whole."""
        return sum(self.seconds.values())


def play_one(loop: Trainer, number: int) -> Iteration:
    """Play an iteration as the run would, and measure it."""
    peaks, clock = {"loaded": Peak(loop.runtime.device).now()}, Clock()

    def phase(name: str, work: Callable[[], Any]) -> Any:
        peak = Peak(loop.runtime.device, trim=number == MEASURED)
        out = work()
        peaks[name] = peak.highest()
        clock.lap(name)
        return out

    with timed_rewards(loop.source.env.base_env.task) as rewards:
        batch = phase("generate", lambda: loop.source(number))
    scored = phase("score", lambda: loop.retrieve_kl(batch))
    ready = loop.advantage(scored)
    phase("update", lambda: loop.update(ready))
    return Iteration(ready, rewards, clock.laps, peaks)


def play(loop: Trainer, findings: Findings) -> list[Iteration]:
    """Play a cold iteration and a warm one, more of these while they are too short to time.

    What they fail at is a problem, on several ranks an error; none is returned then.
    """
    gc.freeze()  # as a run does
    findings.wait("playing iterations of the run, two or more")
    try:
        played = [play_one(loop, number) for number in (0, 1)]
        while len(played) < MOST and _seconds(loop, played) < ENOUGH:
            played.append(play_one(loop, len(played)))
        return played
    except (ValueError, OSError, RuntimeError) as error:
        ours = isinstance(error, (ValueError, OSError)) or MEMORY.search(str(error))
        if loop.runtime.ranks > 1 or not ours:
            raise
        findings.section("Iterations")
        findings.problem(headline(error))
        return []


def _seconds(loop: Trainer, played: list[Iteration]) -> float:
    """Return what the iterations took, the same on every rank: all play as many."""
    return loop.runtime.maxima({"s": sum(done.total for done in played)})["s"]
