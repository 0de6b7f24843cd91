"""A device of glass: its tensors say that they are on an accelerator, their values lie on the CPU.

What crosses between the host and the device is booked with its line: copies, and reads of values,
which on a GPU wait for all work so far. Also a script, see `main`.
"""

import functools
import json
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from conf.compose import compose_checked, set_up
from conf.run import train
from support.runs import ROOT
from trainer.runtime import Runtime
from trainer.trainer import Trainer

DEVICE = torch.device("privateuseone", 0)  # called glass from `main` on
# Phases by the functions on the stack; the innermost counts.
PHASES = {
    "Rollouts.__call__": "rollout",
    "Trainer.score": "score",
    "Update.__call__": "update",
    "on_host": "metrics",
    "summarize": "metrics",
    "transcripts": "metrics",
    "Trainer._count": "metrics",
}
# Kernels whose output has a size, or that choose their work, by values on the device.
WAITS = {
    "nonzero",
    "masked_select",
    "masked_scatter_backward",
    "equal",
    "is_nonzero",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "repeat_interleave",
}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
WORDS = (
    "experiment=grpo_tiny",
    "policy.model=tiny",
    "policy.device=cpu",
    "policy.autocast=null",
    "policy.kernels=false",  # on a GPU there are others
    "policy.max_new_tokens=6",
    "trainer.num_iterations=1",
    "trainer.prompts_per_iteration=8",
    "trainer.micro_batch_tokens=400",
    "algorithm.group_size=4",
    "kl.estimator=k3",
    "eval.num_samples=0",
    "eval.greedy=false",
    "checkpoint.every=0",
    "optimizer._target_=torch.optim.SGD",
    "allow_targets=true",
    "tracker=none",
)
BOOKS: Counter[tuple[str, str, str]] = Counter()  # phase, what crossed, line


def book(what: str) -> None:
    """Book a crossing at the line of leash that made it; a backward pass has its own thread."""
    main = sys._current_frames()[threading.main_thread().ident or 0]
    for frame in (sys._getframe(1), main):
        phase, line = place(frame)
        if phase:
            BOOKS[phase, what, line] += 1
            return


def place(frame: FrameType | None) -> tuple[str, str]:
    """Return the phase of a frame, "" outside all, and the innermost line of leash."""
    phase = line = ""
    while frame is not None and not phase:
        path = Path(frame.f_code.co_filename)
        mine = path.is_relative_to(ROOT) and ".venv" not in path.parts and str(path) != __file__
        if mine and not line:
            line = f"{path.relative_to(ROOT)}:{frame.f_lineno}"
        phase = PHASES.get(frame.f_code.co_qualname, "")
        frame = frame.f_back
    return phase, line


class Glass(Tensor):
    """A tensor of the device, around its values on the CPU."""

    values: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: Tensor) -> "Glass":
        layout = {"strides": values.stride(), "storage_offset": values.storage_offset()}
        layout |= {"dtype": values.dtype, "device": DEVICE}
        self = Tensor._make_wrapper_subclass(cls, values.shape, **layout)
        self.values = values
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None) -> Any:
        return run(func, args, kwargs or {})

    def tolist(self) -> Any:
        book("wait tolist")
        return self.values.tolist()

    def new_tensor(self, data: Any, **options: Any) -> Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": DEVICE, **options})

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(torch.tensor(index) if isinstance(index, list) else index)

    def __format__(self, spec: str) -> str:
        return format(self.item() if self.ndim == 0 else repr(self), spec)

    def __repr__(self, **_: Any) -> str:
        return f"Glass({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict) -> Tensor:
        copy: Tensor = Glass(self.values.detach().clone())
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=self.requires_grad)
        memo[id(self)] = copy
        return copy


def is_glass(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


def run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the values, and book what a GPU would wait for or copy."""
    name, to = func._schema.name.split("::")[1], kwargs.get("device")
    inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Glass)]
    if not inputs and not is_glass(to):
        return func(*args, **kwargs)
    queued = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
    reads = name == "_local_scalar_dense"
    if name == "_to_copy" and to is not None:
        reads = bool(inputs) and not is_glass(to)
    if name == "copy_":
        reads = not isinstance(args[0], Glass)
    if (reads and not queued) or name in WAITS:
        book(f"wait {name}")
    elif reads:
        book("queued copy to the host")
    sent = (name == "_to_copy" and not inputs) or (name == "copy_" and len(inputs) == 1)
    if sent and not reads and args[0].numel():
        book("queued copy" if queued else "wait copy")
    for index in args[1] if name in INDEXED else ():
        if index is not None and (not isinstance(index, Glass) or index.dtype == torch.bool):
            book("wait index")
    owners = {id(x.values): x for x in inputs}

    def bare(x: Any) -> Any:
        return x.values if isinstance(x, Glass) else torch.device("cpu") if is_dev(x) else x

    def wrapped(x: Any) -> Any:
        if type(x) is not Tensor:
            return x
        return owners[id(x)] if id(x) in owners else Glass(x)

    def is_dev(x: Any) -> bool:
        return isinstance(x, torch.device) and is_glass(x)

    out = func(*tree_map(bare, args), **tree_map(bare, kwargs))
    return out if reads else tree_map(wrapped, out)


class Mode(TorchDispatchMode):
    """Make the new tensors that ask for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        return run(func, args, kwargs or {})


def crossing(make: Any) -> Any:
    """Return torch.tensor or torch.as_tensor, whose copies do not reach a mode."""

    @functools.wraps(make)
    def made(data: Any, *, dtype=None, device=None, **options: Any) -> Tensor:
        if isinstance(data, Glass):
            return data.to(device or data.device, dtype or data.dtype)
        out = make(data, dtype=dtype, device="cpu" if is_glass(device) else device, **options)
        return out.to(DEVICE) if is_glass(device) else out

    return made


def main(folder: str, *words: str) -> None:
    """Train an iteration on the device; print what crossed, as JSON."""
    backend_registration._setup_privateuseone_for_python_backend("glass")
    torch.glass.synchronize = lambda *_: book("wait synchronize")
    torch.glass.get_amp_supported_dtype = lambda: [torch.bfloat16]
    torch.tensor, torch.as_tensor = crossing(torch.tensor), crossing(torch.as_tensor)

    def load(self: Runtime, make: Any) -> Any:
        policy = make(device="cpu")
        policy.scorer.to(DEVICE)
        return policy

    Runtime.device = DEVICE
    Runtime.load = load
    Runtime.prepare = lambda self, policy, make, *_: (policy.scorer, make(policy.scorer))
    Trainer._finish = lambda self: 0.0  # a file cannot take weights of glass
    set_up()
    cfg = OmegaConf.create(compose_checked([*WORDS, *words, f"output_dir={folder}"]))
    with Mode():
        train(cfg, Path(folder))
    print(json.dumps([[*key, count] for key, count in BOOKS.most_common()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
