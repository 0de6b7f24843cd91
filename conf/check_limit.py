"""What `eval.limit` does not go with: the limit is that of the policy as it starts."""

from collections.abc import Iterator
from typing import Any

from conf.check import is_silent


def filtered(policy: dict[str, Any]) -> bool:
    """Return whether a KL is over the tokens that were left to draw from alone."""
    return bool(policy["top_k"] or policy["top_p"] < 1 or policy["min_p"])


def findings(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each; imported where there is one to be sampled."""
    kl, held_out = cfg["kl"], cfg["eval"]
    if is_silent(cfg):
        yield "eval.limit is of replies, and this algorithm samples none; leave eval.limit out"
        return
    what = f"eval.limit={held_out['limit']}"
    if held_out["limit"] == 1:
        yield "expected eval.limit of at least 2 replies a row, got 1: one says nothing of the best"
    if not kl["measure"]:
        yield f"{what} needs the KL that was spent, got kl.measure=false; set kl.measure=true"
    if kl["refresh_every"]:
        yield f"{what} is of one reference, which kl.refresh_every moves; leave one of them out"
    elif kl["reference"] is not None:
        later = "leave it out and run python -m trainer.reports <run folder> --limit afterwards"
        yield f"{what} samples the policy as it starts, kl.reference names another; {later}"
    if filtered(cfg["policy"]):
        yield f"{what} needs the KL of whole distributions; leave policy.top_k, top_p, min_p out"
    if not held_out["num_samples"]:
        yield f"{what} judges sampled replies, got eval.num_samples=0; set eval.num_samples=8"
    if held_out["temperature"] != 1:
        got = f"eval.temperature={held_out['temperature']:g}"
        yield f"{what} judges replies at temperature 1, got {got}; set eval.temperature=1"
