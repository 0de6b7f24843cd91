"""What a preflight prints, and the iterations that it plays: timed, their memory measured."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
from rich.console import Console
from rich.padding import Padding
from rich.text import Text
from tensordict import TensorDictBase

from trainer.modes.preflight.footprint import Peak
from trainer.runs.failures import MEMORY, headline
from trainer.trainer import Trainer
from trainer.weight_sync import weight_sync


class Findings:
    """Print sections and collect problems; `quiet` on ranks other than 0."""

    def __init__(self, *, quiet: bool = False, untrained: bool = False) -> None:
        self.console = Console(highlight=False, quiet=quiet)
        self.untrained = untrained  # another experiment would train the model first
        self.problems: list[str] = []
        self.start = time.time() - psutil.Process().create_time()  # seconds to load everything

    def section(self, title: str, *lines: str | Text) -> None:
        """Print a title and the lines below it."""
        self.console.print(Text(title, style="bold"))
        for line in lines:
            self.say(line)

    def say(self, line: str | Text, *, style: str = "") -> None:
        """Print a line of a section."""
        if self.console.is_terminal:  # wrapped at words
            line = Text(line, style=style) if isinstance(line, str) else line
            self.console.print(Padding(line, (0, 0, 0, 2)))
        else:
            self.console.print(Text("  ", style=style).append(line), soft_wrap=True)

    def problem(self, text: str) -> None:
        """Note something to change before the run; what was noted before counts once."""
        if text not in self.problems:
            self.problems.append(text)
        self.say(f"problem: {text}", style="red")

    def judge(self, text: str) -> None:
        """Note a problem of what the model says; it is none if the model is yet to be trained."""
        if self.untrained:
            self.say(f"of the untrained model: {text}")
        else:
            self.problem(text)

    def finish(self) -> int:
        """Print and return how many problems there are."""
        count = len(self.problems)
        text = "no problem found" if not count else f"{count} problem{'s' if count > 1 else ''}:"
        self.section(f"preflight: {text}", *[f"- {problem}" for problem in self.problems])
        return count


@dataclass(frozen=True)
class Phase:
    """What a phase of an iteration took: seconds, and bytes in use before it and at its peak."""

    seconds: float
    before: int
    peak: int


@dataclass(frozen=True)
class Iteration:
    """An iteration that was played: its batch, its phases, the seconds of the task's rewards.

    `chats` are those that the task has judged, the reply last.
    """

    batch: TensorDictBase
    phases: dict[str, Phase]
    rewards: float
    chats: list[list[dict[str, Any]]]

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

    with watched_rewards(loop.source.env.base_env.task) as (seconds, chats):
        batch = phase("generate", lambda: loop.source(number))
    batch = phase("score", lambda: loop.advantage(loop.retrieve_kl(batch)))
    phase("update", lambda: loop.update(batch))
    if loop.generator is not loop.policy:
        phase("sync", lambda: weight_sync(loop.policy, loop.generator))
    return Iteration(batch, phases, sum(seconds), chats)


@contextmanager
def watched_rewards(task: Any) -> Iterator[tuple[list[float], list[Any]]]:
    """Collect the seconds that a task's rewards take inside the block, and the chats judged."""
    took, chats, rewards = [], [], task.rewards

    def watched(rows: Sequence[Any], replies: Sequence[Any]) -> Any:
        start = time.perf_counter()
        out = rewards(rows, replies)
        took.append(time.perf_counter() - start)
        chats.extend(reply.messages for reply in replies)
        return out

    task.rewards = watched  # on this object only
    try:
        yield took, chats
    finally:
        del task.rewards
