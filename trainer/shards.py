"""launch=fsdp2: policy, critic and reference spread over the ranks before the optimizer is made."""

from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from policies.roles import Policy
from policies.scorer import Scorer
from policies.sharding import shard, share
from trainer.runtime import Runtime


def spread(runtime: Runtime, policy: Policy, others: Sequence[Any], *, offload: bool) -> None:
    """Spread the policy's weights over all ranks, and those of each other part that has a scorer.

    `offload`: the CPU keeps what a rank holds.
    """
    mesh = init_device_mesh(runtime.device.type, (runtime.ranks,))
    own = policy.scorer
    shard(own, mesh, offload=offload)
    found = {id(part.scorer): part.scorer for part in others if hasattr(part, "scorer")}
    for scorer in found.values():
        if scorer is own or not isinstance(scorer, Scorer):
            continue
        if scorer.model is own.model:  # with another adapter, or none
            share(scorer, own)
        else:
            shard(scorer, mesh, offload=offload)
    own.placement.about = _about(policy, offload)


def _about(policy: Policy, offload: bool) -> str:
    """Say what a rank holds, and what gathering it takes."""
    own = policy.scorer
    every = sum(p.numel() * p.element_size() for p in own.parameters())
    each = sum(map(own.placement.size, own.parameters()))
    half = own.placement.half
    whole = sum(p.numel() * (half or p.dtype).itemsize for p in policy.model.parameters())
    where = ", on the CPU" if offload else ""
    return (
        f"launch=fsdp2: a rank holds {each / 2**20:,.1f} of {every / 2**20:,.1f} MiB of weights"
        f"{where}, and of their gradients and moments; while the policy itself samples, each "
        f"gathers all of it, {whole / 2**20:,.1f} MiB (policy.engine=vllm samples apart)"
    )
