"""Ranks hold the same weights (contract 7): a checksum over them says whether they still do.

Weights of which each rank has a part (launch=fsdp2) are nobody else's: there is none to compare.
"""

import torch
from torch import nn

from trainer.runtime import Runtime

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers as wide as a weight, by bytes


@torch.no_grad()
def checksums(module: nn.Module) -> dict[str, int]:
    """Return the sum of the bits of each weight that is trained; any change of one bit shows.

    >>> checksums(nn.Linear(1, 1, bias=False).bfloat16().requires_grad_(False))
    {}
    """
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
                f"{differ[0]}), so each trains a model of its own; go on from an older checkpoint "
                "with launch.num_processes=1, and report it"
            )
