"""launch=fsdp2: policy, critic and reference spread over the ranks before the optimizer is made."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from policies.protocols import Policy
from policies.scorer import Scorer
from policies.sharding import Unsharded, shard, share
from trainer.runtime import Runtime


class ShardedRuntime(Runtime):
    """A Runtime of which each rank holds a part of every weight; one alone holds all of it.

    `offload`: the CPU keeps that part, and ranks on GPUs also meet by tensors on the CPU.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        seed: int = 0,
        device: str | None = None,
        offload: bool = False,
    ) -> None:
        if offload and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            _join_on_both(cpu=device == "cpu" or not torch.cuda.is_available())
        super().__init__(folder, seed=seed, device=device)
        self.offload = offload

    def load(self, make: Callable[..., Policy]) -> Policy:
        """Return the policy that `make` loads, on the CPU: no GPU ever holds all of it."""
        if self.ranks == 1:
            return super().load(make)
        policy = make(device="cpu")
        policy.scorer.placement = Unsharded(self.device)
        return policy

    def prepare(self, policy: Any, make: Callable, settings: dict[str, Any], *others: Any) -> Any:
        """Spread the policy and those of `others` that have a scorer, then make the optimizer."""
        if self.ranks == 1:
            return super().prepare(policy, make, settings)
        mesh, own = init_device_mesh(self.device.type, (self.ranks,)), policy.scorer
        shard(own, mesh, offload=self.offload)
        found = {id(part.scorer): part.scorer for part in others if hasattr(part, "scorer")}
        for scorer in found.values():
            if scorer is own or not isinstance(scorer, Scorer):
                continue
            if scorer.model is own.model:  # with another adapter, or none
                share(scorer, own)
            else:
                shard(scorer, mesh, offload=self.offload)
        return own, make(own, **settings)


def _join_on_both(*, cpu: bool) -> None:
    """Join the ranks by gloo, and on GPUs by NCCL too: what is kept on the CPU is reduced there."""
    if not torch.distributed.is_initialized():
        if not cpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        torch.distributed.init_process_group("cpu:gloo" if cpu else "cpu:gloo,cuda:nccl")
