"""What goes together with weights that are spread over the ranks. Torch-free."""

from collections.abc import Iterator
from typing import Any


def findings(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield what does not."""
    shards, several = cfg["launch"]["strategy"] == "fsdp2", cfg["launch"]["num_processes"] > 1
    if cfg["launch"]["offload"] and not (shards and several):
        yield "launch.offload needs launch=fsdp2 and launch.num_processes >= 2; leave it out"
    if shards and several and cfg["trainer"]["overlap"]:
        told = "what samples ahead has a whole model of its own on every rank"
        yield f"trainer.overlap needs launch=ddp: {told}; leave it out, or set launch=ddp"
