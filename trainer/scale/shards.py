"""launch=fsdp2: shard policy, critic and reference over the ranks before making the optimizer."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from policies.models.sharding import Unsharded, shard, tie
from policies.protocols import Policy
from policies.scorer import Scorer
from trainer.runtime import TIMEOUT, Runtime


class ShardedRuntime(Runtime):
    """A Runtime whose ranks each hold a shard of every weight; a single rank holds all.

    `shards`: ranks that hold one copy of the weights, None for all. Adjacent ranks share a copy, so
    that with the GPUs of a node only gradients cross nodes.
    `offload`: shards stay on the CPU, and ranks on GPUs also communicate by CPU tensors.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        seed: int = 0,
        device: str | None = None,
        timeout: float = TIMEOUT,
        offload: bool = False,
        shards: int | None = None,
    ) -> None:
        if offload and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            cpu = device == "cpu" or not torch.cuda.is_available()
            _init_process_group(cpu=cpu)
        super().__init__(folder, seed=seed, device=device, timeout=timeout)
        self.offload = offload
        self.shards = self.ranks if shards is None else shards

    def load(self, make: Callable[..., Policy]) -> Policy:
        """Return the policy that `make` loads, on the CPU: no GPU holds all weights."""
        if self.ranks == 1:
            return super().load(make)
        policy = make(device="cpu")
        policy.scorer.placement = Unsharded(self.device)
        return policy

    def prepare(self, policy: Any, make: Callable[[Any], Any], *others: Any) -> Any:
        """Shard the policy and those of `others` with a scorer, then make the optimizer."""
        if self.ranks == 1:
            return super().prepare(policy, make)
        self.wait()
        mesh, main = make_mesh(self.device.type, self.ranks, self.shards), policy.scorer
        scorers = {id(part.scorer): part.scorer for part in others if hasattr(part, "scorer")}
        shard_all(main, list(scorers.values()), mesh, offload=self.offload)
        return main, make(main)


def make_mesh(device: str, ranks: int, shards: int | None = None) -> DeviceMesh:
    """Return the mesh of the shards, and of their copies if there are several (HSDP)."""
    copies = ranks // (shards or ranks)
    if copies == 1:
        return init_device_mesh(device, (ranks,))
    names = ("copies", "shards")
    return init_device_mesh(device, (copies, ranks // copies), mesh_dim_names=names)


def shard_all(
    main: Scorer, others: Sequence[Any], mesh: DeviceMesh, *, offload: bool = False
) -> None:
    """Shard a scorer, and those of `others` that are scorers of a model in this process."""
    shard(main, mesh, offload=offload)
    for scorer in others:
        if scorer is main or not isinstance(scorer, Scorer):
            continue
        if scorer.model is main.model:  # with another or no adapter
            tie(scorer, main)
        else:
            shard(scorer, mesh, offload=offload)


def _init_process_group(*, cpu: bool) -> None:
    """Join the ranks by gloo, for tensors on the CPU, and on GPUs also by NCCL."""
    if not torch.distributed.is_initialized():
        if not cpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        backend = "cpu:gloo" if cpu else "cpu:gloo,cuda:nccl"
        torch.distributed.init_process_group(backend)
