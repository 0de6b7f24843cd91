"""launch=fsdp2: shard policy, critic and reference over the ranks before making the optimizer.

Each rank writes and reads its part of a checkpoint. All ranks wait while it is written, because a
write in the background (`async_save`) would need a copy of the shards on the host and a second
process group, and a stop or an error could come before its manifest is written.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from policies.load import weights_of
from policies.models.shard_files import names_in_scorer, write_shards
from policies.models.sharding import Unsharded, shard, tie
from policies.protocols import Policy
from policies.scorer import Scorer
from trainer.checkpoint import SHARDS, Checkpoints, moments_of
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
        """Shard the policy, and each of `others` that has a scorer; then make the optimizer."""
        if self.ranks == 1:
            return super().prepare(policy, make)
        self.wait()
        mesh, main = make_mesh(self.device.type, self.ranks, self.shards), policy.scorer
        scorers: list[Any] = []
        for part in others:
            scorer = getattr(part, "scorer", None)  # by name of several teachers
            scorers += scorer.values() if isinstance(scorer, dict) else [scorer]
        shard_all(main, [*dict.fromkeys(scorers)], mesh, offload=self.offload)
        return main, make(main)


class ShardedCheckpoints(Checkpoints):
    """Checkpoints of which each rank writes and hashes its part; a single rank writes all."""

    def write_tensors(self, part: Path) -> dict[str, Any]:
        """Write this rank's part of all tensors; return the hashes of all ranks."""
        if self.runtime.ranks == 1:
            return super().write_tensors(part)
        groups = tensors_of(self.policy.scorer, self.optimizer)
        groups |= {"critic": self.critic(), "reference": self.reference.state_dict()}
        named = {f"{g}/{name}": t.detach() for g in groups for name, t in groups[g].items()}
        self.runtime.wait()  # rank 0 has emptied the folder
        hashed = write_shards(named, part / SHARDS, rank=self.runtime.rank)
        return {name: entry for each in self.runtime.gather(hashed) for name, entry in each.items()}


def tensors_of(scorer: Scorer, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return a rank's weights and optimiser state by name; a master is the weight itself."""
    moments = moments_of(optimizer, scorer)
    weights = names_in_scorer(scorer, weights_of(scorer).tensors())
    alone = {name: w for name, w in weights.items() if f"{name}/master" not in moments}
    return {"weights": alone, "optimizer": moments}


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
    """Shard a scorer, and each of `others` that is a scorer of a model in this process."""
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
