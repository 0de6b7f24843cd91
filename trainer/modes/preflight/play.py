"""What a preflight prints, and the iterations that it plays: timed, their memory measured."""

import ctypes
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.text import Text
from tensordict import TensorDictBase

from trainer.runs.failures import MEMORY, headline
from trainer.runtime import peak, status_bytes
from trainer.trainer import Trainer
from trainer.weight_sync import weight_sync


class Findings:
    """Print sections and collect problems; `quiet` on ranks other than 0."""

    def __init__(self, *, quiet: bool = False, untrained: bool = False) -> None:
        self.console = Console(highlight=False, quiet=quiet)
        self.untrained = untrained  # another experiment would train the model first
        self.problems: list[str] = []
        self.start = time.time() - psutil.Process().create_time()  # seconds to load everything

    def section(self, title: str, *lines: str) -> None:
        """Print a title and the lines below it."""
        self.console.print(Text(title, style="bold"))
        for line in lines:
            self.say(line)

    def say(self, line: str | Text, *, style: str = "") -> None:
        """Print a line of a section."""
        self.console.print(Text("  ", style=style).append(line), soft_wrap=True)

    def problem(self, text: str) -> None:
        """Note something to change before the run."""
        self.problems.append(text)
        self.say(f"problem: {text}", style="red")

    def judge(self, text: str) -> None:
        """Note a problem of what the model replies; it is none if it is yet to be trained."""
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


class Peak:
    """The highest use of memory from here on, bytes.

    Of a GPU what torch has allocated; else the resident memory of the process, whose high-water
    mark Linux can set back (elsewhere it is the highest since its start). `trim` gives back first
    what the allocator of the C library has kept of work that is done.
    """

    def __init__(self, device: torch.device, *, trim: bool = False) -> None:
        self.device = device
        if trim:
            with suppress(OSError, AttributeError):  # glibc has it
                ctypes.CDLL(None).malloc_trim(0)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")

    def now(self) -> int:
        """Return what is in use."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return status_bytes("VmRSS") or self.highest()

    def highest(self) -> int:
        """Return the peak."""
        return peak(self.device)


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
        for_users = isinstance(error, (ValueError, OSError)) or MEMORY.search(str(error))
        if loop.runtime.ranks > 1 or not for_users:
            raise
        findings.problem(headline(error))
        return []


def play_one(loop: Trainer, number: int) -> Iteration:
    """Play an iteration as the run would, and measure it."""
    phases: dict[str, Phase] = {}

    def phase(name: str, work: Callable[[], Any]) -> Any:
        memory = Peak(loop.runtime.device, trim=number == 1)
        before, start = memory.now(), time.perf_counter()
        out = work()
        phases[name] = Phase(time.perf_counter() - start, before, memory.highest())
        return out

    with timed_rewards(loop.source.env.base_env.task) as seconds:
        batch = phase("generate", lambda: loop.source(number))
    batch = phase("score", lambda: loop.advantage(loop.retrieve_kl(batch)))
    phase("update", lambda: loop.update(batch))
    if loop.generator is not loop.policy:
        phase("sync", lambda: weight_sync(loop.policy, loop.generator))
    return Iteration(batch, phases, sum(seconds))


@contextmanager
def timed_rewards(task: Any) -> Iterator[list[float]]:
    """Collect the seconds that a task's rewards take inside the block."""
    seconds, rewards = list[float](), task.rewards

    def timed(rows: Sequence[Any], replies: Sequence[Any]) -> Any:
        start = time.perf_counter()
        out = rewards(rows, replies)
        seconds.append(time.perf_counter() - start)
        return out

    task.rewards = timed  # on this object only
    try:
        yield seconds
    finally:
        del task.rewards
