"""What `eval.limit` does not go with: the limit is that of the policy as it starts."""

from collections.abc import Iterator
from typing import Any


def findings(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each; imported where there is one to be sampled."""
    kl, held_out = cfg["kl"], cfg["eval"]
    what = f"eval.limit={held_out['limit']}"
    if held_out["limit"] == 1:
        yield "expected eval.limit of at least 2 replies a row, got 1: one says nothing of the best"
    if not kl["measure"]:
        yield f"{what} needs the KL that was spent, got kl.measure=false; set kl.measure=true"
    if kl["reference"] is not None or kl["refresh_every"]:
        key = "kl.refresh_every" if kl["refresh_every"] else "kl.reference"
        later = "leave it out and run python -m trainer.reports <run folder> --limit afterwards"
        yield f"{what} samples the policy as it starts, which {key} makes no reference; {later}"
    if not held_out["num_samples"] or held_out["temperature"] != 1:
        got = f"eval.num_samples={held_out['num_samples']} eval.temperature"
        got += f"={held_out['temperature']:g}"
        yield f"{what} judges replies at temperature 1, got {got}; set eval.temperature=1"
