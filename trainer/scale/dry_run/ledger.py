"""Run code of a rank only by shapes: fake tensors, a fake process group, and a ledger of bytes."""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed._tools.fake_collectives  # c10d's operators on fake tensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from policies import token_distribution
from policies.models.fast import products

COLLECTIVES = {"allgather": "all-gather", "reducescatter": "reduce-scatter"}
COLLECTIVES |= {"allreduce": "all-reduce"}


class Ledger(TorchDispatchMode):
    """Count the bytes of live storages on the device and on the host, and bytes of collectives.

    All fake tensors are on the CPU, which stands for the device. A copy that names a device stands
    for a copy to the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.host = 0  # bytes
        self.calls: Counter[str] = Counter()  # collective -> number of calls
        self.bytes: Counter[str] = Counter()  # collective -> bytes of its full tensors
        self.sizes: dict[int, int] = {}  # live storage on the device -> bytes

    def restart(self) -> None:
        """Forget the peak and the collectives."""
        self.peak, self.host = self.now, 0
        self.calls.clear()
        self.bytes.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator and book its results."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func.__name__, args)
        to_host = func is torch.ops.aten._to_copy.default and "device" in kwargs
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and to_host:
                self.host += tensor.nbytes
            elif isinstance(tensor, Tensor):
                self._add(tensor)
        return out

    def _note(self, name: str, args: Any) -> None:
        plain = name.replace("_", "")
        kind = next((kind for word, kind in COLLECTIVES.items() if word in plain), None)
        sizes = [x.nbytes for x in tree_leaves(args) if isinstance(x, Tensor)]
        if kind and sizes:
            self.calls[kind] += 1
            self.bytes[kind] += max(sizes)

    def _add(self, tensor: Tensor) -> None:
        mine: Any = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = mine.untyped_storage()
        if id(storage) not in self.sizes:
            weakref.finalize(storage, self._set, id(storage), None)
            self._set(id(storage), storage.nbytes())

    def _set(self, key: int, size: int | None) -> None:
        """Set the bytes of a storage; None: it is gone."""
        self.now += (size or 0) - self.sizes.pop(key, 0)
        if size is not None:
            self.sizes[key] = size
        self.peak = max(self.peak, self.now)

    @contextmanager
    def resizes(self) -> Iterator[None]:
        """Book the storages that FSDP frees and allocates again in place."""
        resize = torch.UntypedStorage.resize_

        def booked(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            if id(storage) in self.sizes:
                self._set(id(storage), size)
            return out

        with patch.object(torch.UntypedStorage, "resize_", booked):
            yield


@contextmanager
def rank_of(ranks: int) -> Iterator[None]:
    """Run the block as rank 0 of `ranks` fake ranks."""
    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def by_shapes() -> Iterator[Ledger]:
    """Run the block with tensors that have shapes and no values, in slices as on a GPU."""
    slices = patch.object(token_distribution, "SLICE", token_distribution.SLICE * 64)
    products_of_torch = patch.object(products, "ONEDNN_IS_FASTER", False)
    # nn.Module.to would exchange fake parameters, which fails where something refers to them.
    moves = patch.object(torch.utils, "swap_tensors", _take_data)
    ledger = Ledger()
    with slices, products_of_torch, moves, ledger.resizes(), FakeTensorMode(), ledger:
        yield ledger


def _take_data(old: Tensor, new: Tensor) -> None:
    old.data = new.data
