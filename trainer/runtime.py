"""Ranks of a run: Accelerate, reductions, the run folder and status.json.

One Runtime per process. Only rank 0 writes; the launcher stores error messages.
"""

import json
import os
import re
import resource
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import Tensor, nn

from policies.files import write_text
from trainer.stopping import Stopped, StopSignals

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers by bytes per weight
TIMEOUT = 7200.0  # seconds for a rank that works alone
# Settings of `accelerate launch` that would change results -> the key of leash for each.
INSTEAD = {
    "mixed_precision": "policy.autocast=bfloat16",
    "gradient_accumulation_steps": "trainer.micro_batch_tokens",
    "use_fsdp": "launch=fsdp2",
    "use_deepspeed": "launch=fsdp2",
}


class Runtime:
    """Start the ranks of a run and keep its status.json current.

    A context manager: a normal exit writes "finished", `Stopped` "preempted", another error
    "failed". `stops` handles the stop signals. `timeout`: seconds that a rank waits for another
    that works alone, in `wait` and in collectives of Python values. Collectives of tensors have
    torch's time-outs (NCCL ten minutes, gloo thirty), so that the run ends when a node dies.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        seed: int = 0,
        device: str | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        gpu = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        kind = gpu.type if gpu else "cpu"  # cuda, mps, xpu, npu or cpu
        if device not in (None, "cpu", kind):  # environment variables choose among several GPUs
            other = f", there is {kind}" if gpu else ""
            raise ValueError(f"no GPU for policy.device={device}{other}; set it to null or cpu")
        check_accelerate()
        cpu = device == "cpu" or gpu is None
        if kind == "cuda" and not cpu:
            check_gpus(torch.cuda.device_count())
        handlers = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]  # no copy
        # policy.autocast sets the precision
        self.accelerator = Accelerator(cpu=cpu, mixed_precision="no", kwargs_handlers=handlers)
        self.folder, self.timeout = Path(folder), timedelta(seconds=timeout)
        if self.ranks > 1:  # under torchrun only rank 0 has chosen the folder
            self.group = torch.distributed.new_group(backend="gloo", timeout=self.timeout)
            self.folder = Path(self.gather(str(self.folder.absolute()))[0])
            os.environ["LEASH_FOLDER"] = str(self.folder)  # read by the handler of a crash
        self.seed = seed
        self.status: dict[str, Any] = {"state": "running", "reason": None, "objective": None}
        self.started = time.monotonic()
        self.stops = StopSignals(self.ranks, self.all_reduce_max, at_second=self._write_preempted)
        self._written = 0.0  # time of the last write of status.json
        torch.manual_seed(seed)

    @property
    def rank(self) -> int:
        """Return the number of this process; rank 0 writes."""
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

    def all_reduce(self, values: Tensor) -> Tensor:
        """Return the sum over ranks of a tensor of equal shape on each."""
        if self.ranks == 1:
            return values  # not on the device, which may lack float64
        return self.accelerator.reduce(values.to(self.device), reduction="sum")

    def all_reduce_sum(self, values: dict[str, float]) -> dict[str, float]:
        """Return the sum over ranks of each value; names are equal on all ranks."""
        return self._reduce(values, torch.distributed.ReduceOp.SUM)

    def all_reduce_max(self, values: dict[str, float]) -> dict[str, float]:
        """Return the maximum over ranks of each value; names are equal on all ranks."""
        return self._reduce(values, torch.distributed.ReduceOp.MAX)

    def _reduce(self, values: dict[str, float], operation: Any) -> dict[str, float]:
        names = sorted(values)
        numbers = torch.tensor([float(values[name]) for name in names], dtype=torch.float64)  # [N]
        if self.ranks > 1 and names:
            torch.distributed.all_reduce(numbers, operation, group=self.group)
        return dict(zip(names, numbers.tolist(), strict=True))

    def load(self, make: Callable[..., Any]) -> Any:
        """Return the policy that `make` loads, on this rank's device."""
        return make(device=str(self.device))

    def prepare(self, policy: Any, make: Callable[[Any], Any], *others: Any) -> Any:
        """Return the wrapped scorer for the update, and its optimizer, make(scorer)."""
        self.wait()  # one rank may need longer to load or download
        for weight in policy.scorer.parameters():
            if weight.requires_grad and self.device.type == "cpu":
                weight.data = weight.data.clone()  # a mapped file would be copied page by page
        return self.accelerator.prepare(policy.scorer, make(policy.scorer))

    def clip(self, weights: Iterable[Tensor], limit: float) -> float:
        """Clip the gradients to a norm of at most `limit`; return the norm before."""
        norm: Any = self.accelerator.clip_grad_norm_(weights, limit)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # sharded or not

    def gather(self, value: Any) -> list[Any]:
        """Return the list of every rank's picklable value."""
        if self.ranks == 1:
            return [value]
        out: list[Any] = [None] * self.ranks
        torch.distributed.all_gather_object(out, value, group=self.group)
        return out

    def wait(self) -> None:
        """Wait for all ranks; after the time-out raise RuntimeError with the missing ranks."""
        if self.ranks > 1:
            how = {"timeout": self.timeout, "wait_all_ranks": True}
            torch.distributed.monitored_barrier(self.group, **how)

    def merge_rows(self, by_row: dict[int, Any]) -> dict[int, Any]:
        """Return the rows of all ranks in order."""
        return dict(sorted(item for part in self.gather(by_row) for item in part.items()))

    def local_slice(self, size: int) -> slice:
        """Return this rank's slice of `size` items; raise ValueError if ranks do not divide it."""
        if size % self.ranks:
            raise ValueError(f"expected {size} to be divisible by {self.ranks} ranks")
        each = size // self.ranks
        return slice(self.rank * each, (self.rank + 1) * each)

    def set_phase(self, phase: str, fraction: float | None = None) -> None:
        """Write the current phase and the fraction done to status.json."""
        if not self._written:  # not entered: there is no status.json
            return
        if phase != self.status.get("phase"):
            self.write_status(
                phase=phase, phase_since=round(time.time(), 2), phase_fraction=fraction
            )
        elif time.monotonic() > self._written + 1:
            self.write_status(phase_fraction=fraction)

    def write_status(self, **changes: Any) -> None:
        """Update status.json atomically (rank 0)."""
        self._written = time.monotonic()
        self.status.update(changes, seconds=round(self._written - self.started, 2))
        if self.status["state"] == "finished":  # a finished run has no phase
            self.status = {k: v for k, v in self.status.items() if not k.startswith("phase")}
        if self.is_main:
            write_text(self.folder / "status.json", json.dumps(self.status, indent=1))

    def __enter__(self) -> "Runtime":
        self.folder.mkdir(parents=True, exist_ok=True)
        self.stops.install()
        self.write_status()
        self.stops.immediately = self.ranks == 1
        return self

    def _write_preempted(self, reason: str) -> None:
        """Write the status of a run that a second signal kills."""
        if self.status["state"] == "running":
            with suppress(OSError):
                self.write_status(state="preempted", reason=reason)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.stops.immediately = False
        if error is None:
            self.write_status(state="finished", reason=None)
        elif isinstance(error, Stopped):
            self.write_status(state="preempted", reason=str(error))
        else:
            with suppress(OSError):  # the disk may be full
                self.write_status(state="failed")
        self.stops.restore()  # last: after the status is written


def check_gpus(count: int) -> None:
    """Raise ValueError for more ranks on this machine than its `count` GPUs."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if ranks > count and not torch.distributed.is_initialized():
        raise ValueError(
            f"expected a GPU for each of {ranks} ranks, this machine shows {count} "
            f"(CUDA_VISIBLE_DEVICES); set launch.num_processes={count}"
        )


def check_accelerate() -> None:
    """Raise ValueError for a setting of Accelerate that leash ignores."""
    for name, instead in INSTEAD.items():
        value = os.environ.get(variable := f"ACCELERATE_{name.upper()}", "")
        if value.lower() not in {"", "no", "false", "1"}:
            raise ValueError(f"{variable}={value} does not reach leash; set {instead}")


@torch.no_grad()
def checksums(module: nn.Module) -> dict[str, int]:
    """Return the sum of the bits of each trained weight, to detect a change of one bit."""
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


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: torch's on a GPU, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):  # Linux; getrusage would count a parent process too
        if match := re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text()):
            return int(match[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def recorder(path: Path) -> torch.profiler.profile:
    """Return a context that writes the trace of torch's profiler, on CPU and GPU, of its block."""
    path.parent.mkdir(exist_ok=True)
    return torch.profiler.profile(on_trace_ready=lambda done: done.export_chrome_trace(str(path)))
