"""Print the findings of a preflight, and measure time and memory of its iterations."""

import ctypes
import time
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.text import Text
from tensordict import TensorDictBase

from policies.protocols import Policy
from trainer.runtime import peak_memory
from trainer.trainer import Trainer
from trainer.weight_sync import weight_sync


class Findings:
    """Print sections and collect problems; `quiet` on ranks other than 0."""

    def __init__(self, *, quiet: bool = False, untrained: bool = False) -> None:
        self.console = Console(highlight=False, quiet=quiet)
        self.untrained = untrained  # another experiment trains the model first
        self.problems: list[str] = []
        self.start = time.time() - psutil.Process().create_time()  # seconds of loading

    def section(self, title: str, *lines: str) -> None:
        """Print a title and the lines below it."""
        self.console.print(Text(title, style="bold"))
        for line in lines:
            self.say(line)

    def say(self, line: str | Text, *, style: str = "") -> None:
        """Print a line of a section."""
        self.console.print(Text("  ", style=style).append(line), soft_wrap=True)

    def problem(self, text: str, *, of_responses: bool = False) -> None:
        """Record a problem; responses of an untrained model only print a line."""
        if of_responses and self.untrained:
            self.say(f"of the untrained model: {text}")
        else:
            self.problems.append(text)
            self.say(f"problem: {text}", style="red")

    def finish(self) -> int:
        """Print and return the number of problems."""
        count = len(self.problems)
        text = "no problem found" if not count else f"{count} problem{'s' if count > 1 else ''}:"
        self.section(f"preflight: {text}", *[f"- {problem}" for problem in self.problems])
        return count


@dataclass(frozen=True)
class Phase:
    """Cost of a phase of an iteration: seconds, and bytes in use before it and at its peak."""

    seconds: float
    before: int
    peak: int


@dataclass(frozen=True)
class Iteration:
    """A measured iteration: its batch and its phases."""

    batch: TensorDictBase
    phases: dict[str, Phase]

    @property
    def seconds(self) -> float:
        """Return the seconds of all phases."""
        return sum(phase.seconds for phase in self.phases.values())


def profile(loop: Trainer, number: int) -> Iteration:
    """Run an iteration as training does, and measure its phases."""
    phases: dict[str, Phase] = {}
    phase = partial(measure, phases, loop.runtime.device)
    batch = phase("generate", lambda: loop.source(number))
    batch = phase("score", lambda: loop.advantage(loop.score(batch)))
    phase("update", lambda: loop.update(batch))
    if loop.generator is not loop.policy:
        phase("sync", lambda: weight_sync(loop.policy, loop.generator))
    return Iteration(batch, phases)


def profile_rest(loop: Trainer) -> dict[str, Phase]:
    """Evaluate one batch and gather the final model; measure both."""
    phases: dict[str, Phase] = {}
    phase = partial(measure, phases, loop.runtime.device)
    if loop.evaluate.plans:
        few = copy(loop.evaluate)
        few.beside = {}
        few.rows = few.rows[: few.prompts_per_batch * loop.runtime.ranks]
        phase("evaluation", lambda: few(0))
    phase("gathering the model", lambda: gather(loop.policy, fill=loop.runtime.is_main))
    return phases


def gather(policy: Policy, *, fill: bool) -> None:
    """Gather the full tensors of the final model, as rank 0 writes them."""
    with policy.scorer.placement.full_tensors(fill=fill):
        pass


def measure(
    phases: dict[str, Phase], device: torch.device, name: str, work: Callable[[], Any]
) -> Any:
    """Do the work of a phase; add its cost to `phases`."""
    before, start = restart_peak(device), time.perf_counter()
    out = work()
    phases[name] = Phase(time.perf_counter() - start, before, peak_memory(device))
    return out


def restart_peak(device: torch.device) -> int:
    """Reset `trainer.runtime.peak_memory` where supported; return the bytes in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    returns = ("malloc_trim", 0), ("MallocExtension_ReleaseFreeMemory",), ("mi_collect", 1)
    for name, *arguments in returns:  # freed memory: of glibc, tcmalloc, mimalloc
        with suppress(OSError, AttributeError):
            getattr(ctypes.CDLL(None), name)(*arguments)
    with suppress(OSError):  # Linux
        Path("/proc/self/clear_refs").write_text("5")
    return psutil.Process().memory_info().rss
