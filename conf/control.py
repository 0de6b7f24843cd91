"""What steers a run on replies: kl.controller, and the parts that an algorithm takes as nodes.

Torch-free. Findings are as in conf/checks.py.
"""

from collections.abc import Iterator
from typing import Any

from trainer.kl_control import MAX_ERROR


def findings(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with kl.controller and algorithm.after_rollout."""
    algorithm = cfg["algorithm"]
    yield from _parts(algorithm)
    yield from _lengths(cfg)
    replies = cfg["trainer"]["prompts_per_iteration"] * algorithm["group_size"]
    yield from _steering(cfg["kl"], replies)


def _parts(algorithm: dict[str, Any]) -> Iterator[str]:
    verbs = algorithm["after_rollout"] or {}
    if not isinstance(verbs, dict) or not all(map(_is_node, verbs.values())):
        yield (
            "expected algorithm.after_rollout to be names with nodes, {drop: {_target_: "
            f"trainer.DropTruncated}}}}, or null, got {verbs!r}"
        )


def _lengths(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield the penalties of whole chats whose limit is that of a turn."""
    turns, limit = cfg["env"]["max_turns"], cfg["policy"]["max_new_tokens"]
    for name, node in (cfg["algorithm"]["after_rollout"] or {}).items():
        whole = isinstance(node, dict) and "OverlongPenalty" in node.get("_target_", "")
        if turns > 1 and whole and node.get("max_tokens") == limit:
            key = f"algorithm.after_rollout.{name}.max_tokens"
            yield f"{key} is of all {turns} turns, got that of one; give {key}={limit * turns}"


def _is_node(value: Any) -> bool:
    return isinstance(value, dict) and "_target_" in value


def _steering(kl: dict[str, Any], replies: int) -> Iterator[str]:
    kind = kl["controller"]
    for key, owner in (("target", "adaptive"), ("end", "linear")):
        if kl[key] is None and kind == owner:
            yield f"kl.controller={kind} needs kl.{key}, got none; give kl.{key}=..."
        if kl[key] is not None and kind != owner:
            yield f"kl.{key} is for kl.controller={owner}, got {kind}; leave kl.{key} out"
    if kind != "adaptive":
        return
    if kl["coeff"] == 0:
        yield "kl.controller=adaptive multiplies kl.coeff, which stays 0; start from kl.coeff=0.01"
    if not kl["measure"]:
        yield "kl.controller=adaptive follows the measured KL; set kl.measure=true"
    if kl["horizon"] <= MAX_ERROR * replies:
        yield (
            f"expected kl.horizon > {MAX_ERROR * replies:g}, a fifth of an iteration's {replies} "
            f"replies, got {kl['horizon']:g}: the coefficient would not stay positive"
        )
