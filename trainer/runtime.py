"""The run and its ranks: Accelerate, sums over ranks, the run folder, status and stop signals.

One Runtime a process. Only rank 0 writes; who starts a run keeps what an error said.
"""

import json
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from policies.cache import write_text
from trainer.early_stopping import Stopped, stop_reason

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers as wide as a weight, by bytes
# Settings of `accelerate launch` that would change the numbers, with the key of leash for each.
INSTEAD = {
    "mixed_precision": "policy.autocast=bfloat16",
    "gradient_accumulation_steps": "trainer.micro_batch_tokens",
    "use_fsdp": "launch=fsdp2",
    "use_deepspeed": "launch=fsdp2",
}


class Runtime:
    """Start the ranks of a run and keep its status.json true.

    Use it as a context manager: leaving it normally writes "finished", by `Stopped` "preempted",
    by an error "failed". A stop signal raises `Stopped` at `check_stop`, within `stoppable` blocks,
    and during the set-up.
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
        if self.ranks > 1:  # below torchrun rank 0 alone has chosen it
            self.folder = Path(self.gather(str(self.folder.absolute()))[0])
            os.environ["LEASH_FOLDER"] = str(self.folder)  # for what this process ends by
        self.seed = seed
        self.status: dict[str, Any] = {"state": "running", "reason": None, "objective": None}
        self.started = time.monotonic()
        self.stop_signal: int | None = None
        self.on_stop: Callable[[], None] = lambda: None  # called in the signal handler
        self.at_once = False  # whether a stop signal raises by itself, wherever the run is
        self.handlers: dict[signal.Signals, Any] = {}  # those that ours replace
        parent = os.environ.get("LEASH_PARENT")
        if parent is None and "TORCHELASTIC_RUN_ID" in os.environ:
            parent = os.getppid()
        self.parent = int(parent) if parent else None  # the launcher, which must outlive the run
        self._written = 0.0  # when status.json was written last
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

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over ranks of a tensor of equal shape on each."""
        if self.ranks == 1:
            return values  # where it is: float64 may be none of the device's
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
        torch.distributed.all_gather_object(out, value)
        return out

    def mine(self, size: int) -> slice:
        """Return this rank's slice of `size` items; sizes that do not divide are an error."""
        if size % self.ranks:
            raise ValueError(f"expected {size} to be divisible by {self.ranks} ranks")
        each = size // self.ranks
        return slice(self.rank * each, (self.rank + 1) * each)

    def check_stop(self) -> None:
        """Raise Stopped on all ranks together if one got a signal or the parent is gone."""
        reason = stop_reason(self.stop_signal) if self.stop_signal else None
        if reason is None and self.parent not in (None, os.getppid()):  # it was killed
            reason = "the process that started the run is gone"
        if reasons := [other for other in self.gather(reason) if other]:
            raise Stopped(reasons[0])

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
        """Say in status.json what the run does now, and which share of it is done."""
        if not self._written:  # nobody keeps a status here
            return
        if phase != self.status.get("phase"):
            self.write_status(phase=phase, phase_since=round(time.time(), 2), phase_share=share)
        elif time.monotonic() > self._written + 1:
            self.write_status(phase_share=share)

    def write_status(self, **changes: Any) -> None:
        """Update status.json atomically (rank 0)."""
        self._written = time.monotonic()
        self.status.update(changes, seconds=round(self._written - self.started, 2))
        if self.status["state"] == "finished":  # no phase any more
            self.status = {k: v for k, v in self.status.items() if not k.startswith("phase")}
        if self.is_main:
            write_text(self.folder / "status.json", json.dumps(self.status, indent=1))

    def __enter__(self) -> "Runtime":
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (signal.SIGINT, signal.SIGTERM):
            self.handlers[name] = signal.signal(name, self._on_signal)
        self.write_status()
        self.at_once = self.ranks == 1
        return self

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

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
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


def check_accelerate() -> None:
    """Raise ValueError for a setting of Accelerate that leash would not follow."""
    for name, instead in INSTEAD.items():
        value = os.environ.get(variable := f"ACCELERATE_{name.upper()}", "")
        if value.lower() not in {"", "no", "false", "1"}:
            raise ValueError(f"{variable}={value} does not reach leash; set {instead}")


@torch.no_grad()
def checksums(module: nn.Module) -> dict[str, int]:
    """Return the sum of the bits of each weight that is trained; any change of one bit shows."""
    every = module.named_parameters()
    trained = {n: p for n, p in every if p.requires_grad and not hasattr(p, "full_tensor")}
    sums = [
        p.detach().view(BITS[p.dtype.itemsize]).sum(dtype=torch.int64) for p in trained.values()
    ]
    return dict(zip(trained, torch.stack(sums).tolist() if sums else [], strict=True))


def check_agreement(module: nn.Module, runtime: Runtime, *, iteration: int) -> None:
    """Raise RuntimeError, on every rank, if a trained weight differs between two ranks."""
    first, *others = runtime.gather(checksums(module))
    for rank, other in enumerate(others, start=1):
        differ = [name for name in first if first[name] != other.get(name)]
        if differ:
            raise RuntimeError(
                f"the ranks have drifted apart: after iteration {iteration}, {len(differ)} of "
                f"{len(first)} trained weights of rank {rank} are not those of rank 0 (the first: "
                f"{differ[0]}); resume an older checkpoint with launch.num_processes=1"
            )


def peak(device: torch.device) -> int:
    """Return the most memory in use so far, bytes: torch's of a GPU, else what is resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):  # Linux; getrusage would count a parent process too
        if found := re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text()):
            return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
