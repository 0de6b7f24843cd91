"""The run and its ranks: Accelerate, sums over ranks, the run folder, status and stop signals.

One Runtime a process. Only rank 0 writes; who starts a run keeps what an error said.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from policies.cache import write_text
from trainer.accelerate_settings import check_accelerate
from trainer.memory import peak
from trainer.stops import Stopped, stop_reason


class Runtime:
    """Start the ranks of a run and keep its status.json true.

    Use it as a context manager: leaving it normally writes "finished", by `Stopped` "preempted",
    by an error "failed". A stop signal raises `Stopped` at `check_stop` and
    within `stoppable` blocks, and before the first of them: a set-up holds nothing to save.
    """

    def __init__(self, folder: str | Path, *, seed: int = 0, device: str | None = None) -> None:
        gpu = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        kind = gpu.type if gpu else "cpu"  # or cuda, mps, xpu, npu
        if device not in (None, "cpu", kind):  # which of several, the environment says
            there = f", there is {kind}" if gpu else ""
            raise ValueError(f"no GPU for policy.device={device}{there}; set it to null or cpu")
        check_accelerate()
        cpu = device == "cpu" or gpu is None
        self.accelerator = Accelerator(cpu=cpu, mixed_precision="no")  # policy.autocast says it
        self.folder = Path(folder)
        self.seed = seed
        self.status: dict[str, Any] = {"state": "running", "reason": None, "objective": None}
        self.started = time.time()
        self.stop_signal: int | None = None
        self.on_stop: Callable[[], None] = lambda: None  # called in the signal handler
        self.at_once = False  # whether a stop signal raises by itself, wherever the run is
        self.handlers: dict[signal.Signals, Any] = {}  # those that ours replace
        parent = os.environ.get("LEASH_PARENT")
        if parent is None and "TORCHELASTIC_RUN_ID" in os.environ:
            parent = os.getppid()
        self.parent = int(parent) if parent else None  # the launcher, which must outlive the run
        words = os.environ.pop("LEASH_WORDS", None)  # no process that this one starts has it
        self._words = int(words) if words else None  # the launcher's pipe (trainer/runs/watch.py)
        self._told = 0.0  # when status.json was written last
        self.group: Any = None  # of the ranks; None = that of torch's default
        torch.manual_seed(seed)

    @property
    def rank(self) -> int:
        """Return the number of this process, 0 being the one that writes."""
        return self.accelerator.process_index

    @property
    def ranks(self) -> int:
        """Return the number of processes."""
        return self.accelerator.num_processes

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0."""
        return self.accelerator.is_main_process

    @property
    def device(self) -> torch.device:
        """Return this rank's device."""
        return self.accelerator.device

    def beside(self) -> "Runtime":
        """Return this run for a second thread, which meets those of the other ranks apart."""
        other = copy(self)
        if self.ranks > 1:
            other.group = torch.distributed.new_group(backend="gloo")
        return other

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over ranks of a tensor of equal shape on each."""
        if self.ranks == 1:
            return values  # where it is: float64 may be none of the device's
        if self.group is not None:
            torch.distributed.all_reduce(total := values.detach().cpu().clone(), group=self.group)
            return total.to(self.device)
        return self.accelerator.reduce(values.to(self.device), reduction="sum")

    def sums(self, values: dict[str, float]) -> dict[str, float]:
        """Return the sum over ranks of each value; all ranks give the same names."""
        names = sorted(values)
        total = self.sum(torch.tensor([float(values[n]) for n in names], dtype=torch.float64))
        return dict(zip(names, total.tolist(), strict=True))

    def maxima(self, values: dict[str, float]) -> dict[str, float]:
        """Return the maximum over ranks of each value; all ranks give the same names."""
        if self.ranks == 1 or not values:
            return values
        gathered = self.gather(values)
        return {name: max(part[name] for part in gathered) for name in values}

    def load(self, make: Callable[..., Any]) -> Any:
        """Return the policy that `make` loads, on this rank's device."""
        return make(device=str(self.device))

    def prepare(self, policy: Any, make: Callable, settings: dict[str, Any], *others: Any) -> Any:
        """Return the scorer as an update calls it, and its optimizer: make(scorer, **settings)."""
        return self.accelerator.prepare(policy.scorer, make(policy.scorer, **settings))

    def clip(self, weights: Iterable[Tensor], limit: float) -> float:
        """Scale the gradients of weights to a norm of at most `limit`; return what it was."""
        norm: Any = self.accelerator.clip_grad_norm_(weights, limit)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # of shards

    def gather(self, value: Any) -> list[Any]:
        """Return the list of every rank's picklable value."""
        if self.ranks == 1:
            return [value]
        out: list[Any] = [None] * self.ranks
        torch.distributed.all_gather_object(out, value, group=self.group)
        return out

    def mine(self, size: int) -> slice:
        """Return this rank's slice of `size` items; sizes that do not divide are an error."""
        if size % self.ranks:
            raise ValueError(f"expected {size} to be divisible by {self.ranks} ranks")
        each = size // self.ranks
        return slice(self.rank * each, (self.rank + 1) * each)

    def check_stop(self) -> None:
        """Raise Stopped on all ranks together if one got a signal or the parent is gone."""
        reason = stop_reason(self.stop_signal) if self.stop_signal else self._orphaned()
        if self.ranks > 1:
            self._say("wait")
        told = [other for other in self.gather(reason) if other]
        if self.ranks > 1:
            self._say("")  # on with what it was at
        if told:
            raise Stopped(told[0])

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Let a stop signal end the block at once: nothing in it has to be finished or undone.

        Several ranks can only stop together: at its start and wherever it calls `check_stop`.
        """
        self.at_once = self.ranks == 1
        try:
            self.check_stop()
            yield
        finally:
            self.at_once = False

    def at(self, phase: str, share: float | None = None) -> None:
        """Say what this rank does now, and which share of it is done: it has not died.

        Only this rank's: "wait" is for the others.
        """
        now = time.time()
        self._say(phase)
        if not self._told:  # nobody keeps a status here
            return
        if phase != self.status.get("phase"):
            self.write_status(phase=phase, phase_since=round(now, 2), phase_share=share)
        elif now > self._told + 1:
            self.write_status(phase_share=share)

    def _say(self, phase: str) -> None:
        if self._words is not None:
            with suppress(OSError):  # the launcher is gone, or busy
                os.write(self._words, f"{self.rank} {phase}\n".encode())

    def write_status(self, **changes: Any) -> None:
        """Update status.json atomically (rank 0)."""
        self._told = time.time()
        again, path = "seconds" in self.status, self.folder / "status.json"
        self.status.update(changes, seconds=round(time.time() - self.started, 2))
        if self.status["state"] == "finished":  # no phase any more
            self.status = {k: v for k, v in self.status.items() if not k.startswith("phase")}
        if self.is_main and again and not path.exists():
            gone = "was removed, or emptied, while its run went on; start the run anew"
            raise FileNotFoundError(f"{self.folder} {gone}")
        if self.is_main:
            write_text(path, json.dumps(self.status, indent=1))

    def peak_memory_gib(self) -> float:
        """Return the peak memory of this process so far: of the GPU if there is one, else RSS."""
        return peak(self.device) / 2**30

    def __enter__(self) -> "Runtime":
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (signal.SIGINT, signal.SIGTERM):
            self.handlers[name] = signal.signal(name, self._on_signal)
        self.write_status()
        self.at_once = self.ranks == 1
        return self

    def _orphaned(self) -> str | None:
        """Return why to stop if the process that started this run was killed."""
        gone = self.parent is not None and self.parent != os.getppid()
        return "the process that started the run is gone" if gone else None

    def _on_signal(self, number: int, _: Any) -> None:
        if self.stop_signal is not None:  # asked twice: go now
            if self.status["state"] == "running":
                with suppress(OSError):
                    self.write_status(state="preempted", reason=stop_reason(self.stop_signal))
            os._exit(128 + number)
        self.stop_signal = number
        self.on_stop()
        if self.at_once:
            raise Stopped(stop_reason(number))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.at_once = False
        if error is None:
            self.write_status(state="finished", reason=None)
        elif isinstance(error, Stopped):
            self.write_status(state="preempted", reason=str(error))
        else:
            with suppress(OSError):  # the disk may be what failed
                self.write_status(state="failed")
        for name, handler in self.handlers.items():  # last: a second signal finds the status told
            signal.signal(name, handler)
        return False
