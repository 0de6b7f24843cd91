"""Weight sync: transfer the policy's weights to the engine after each update, and verify it.

An engine gets a copy of the weights, with LoRA the merged weights or, if it can, the adapter.
Both score fixed ids before and after the transfer. Raise RuntimeError if
- they disagree after the transfer;
- the engine's scores did not change although the policy's did (in half precision a step may be
  smaller than the tolerance);
- the engine's scores changed since the last transfer (the engine was restarted).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policies.load import weights_of
from policies.protocols import EngineGenerator, Generator, Policy
from policies.scorer import LOCAL

MIN_MOVE = 0.01  # the engine must change if the policy moves by more than this * tolerance


@dataclass(frozen=True)
class SyncResult:
    """Largest difference in nats between log-probs of generator and policy on the probe.

    `confirmed` [B, T]: log-probs of the policy at the last transfer that changed the engine's.
    """

    before: float = 0.0
    after: float = 0.0
    confirmed: Tensor | None = None

    def metrics(self) -> dict[str, float]:
        """Return the metrics; {} if the policy itself samples."""
        if self.confirmed is None:
            return {}
        return {"sync/probe": self.after, "sync/probe_before": self.before}


def weight_sync(policy: Policy, generator: Generator | None = None, **proof: Any) -> SyncResult:
    """Count a new version of the policy's weights and call `push_weights`."""
    policy.version += 1
    return push_weights(policy, generator, **proof)


def push_weights(
    policy: Policy, generator: Any = None, *, last: SyncResult | None = None
) -> SyncResult:
    """Copy the policy's weights to an engine and compare log-probs of fixed ids.

    Raise RuntimeError unless both agree on every token within the engine's `tolerance` in nats, and
    the engine changed with the policy since `last`. If the engine `takes_trained`, only LoRA
    adapters are sent. Each of the engine's `copies` of the weights (default 1) scores the probe.
    """
    if generator is None or generator is policy:
        return SyncResult()
    engine: EngineGenerator = generator
    limit, size = engine.tolerance, policy.model.get_input_embeddings().num_embeddings
    copies = getattr(engine, "copies", 1)
    probe = torch.linspace(0, size - 1, 32).long().reshape(2, 16)  # spread over the vocabulary
    probe = probe.repeat(copies, 1)  # [2 * copies, 16]
    expected, confirmed = _log_probs(policy, probe), None if last is None else last.confirmed
    old = _log_probs(engine, probe)
    _check_unchanged(confirmed, old, limit=2 * limit)
    weights, half = weights_of(policy.scorer), policy.scorer.placement.half
    engine.load_weights(weights.stream(trained=getattr(engine, "takes_trained", False), half=half))
    new = _log_probs(engine, probe)
    confirmed, seen = expected if confirmed is None else confirmed, []
    for each in zip(*(x.chunk(copies) for x in (expected, old, new, confirmed)), strict=True):
        _check_arrived(*each, limit=limit)
        seen.append(each[3] if torch.equal(each[1], each[2]) else each[0])
    engine.version = policy.version
    before, after = _distance(expected, old), _distance(expected, new)
    return SyncResult(before, after, torch.cat(seen))


def _check_unchanged(confirmed: Tensor | None, old: Tensor, *, limit: float) -> None:
    """Raise RuntimeError if an engine no longer scores as after the last transfer."""
    if confirmed is not None and not (gone := _distance(confirmed, old)) <= limit:
        raise RuntimeError(
            f"the engine lost its weights: its log-probs moved by {gone:.3g} nats since the last "
            f"transfer, expected {limit:g} at most; was it restarted? Continue with resume="
        )


def _check_arrived(
    expected: Tensor, old: Tensor, new: Tensor, confirmed: Tensor, *, limit: float
) -> None:
    """Raise RuntimeError if an engine does not score as the policy, or did not change with it."""
    before, after, same = _distance(expected, old), _distance(expected, new), torch.equal(old, new)
    moved = _distance(expected, confirmed)
    gap = f"after a transfer its log-probs are {after:.3g} nats from the policy's "
    gap += f"({before:.3g} before), expected {limit:g} at most"
    if same and not max(moved / MIN_MOVE, after) <= limit:
        raise RuntimeError(
            f"the engine is stale: {gap}; they did not change, while the policy moved by "
            f"{moved:.3g}; start the engine again, or give policy/engine=null"
        )
    if not after <= limit:
        raise RuntimeError(
            f"the engine is not the policy: {gap}; is it the same model? Give "
            "policy.engine.dtype=float32, or a larger policy.engine.tolerance"
        )


@torch.no_grad()
def _log_probs(policy: Policy | EngineGenerator, probe: Tensor) -> Tensor:
    ids = probe.to(policy.device)
    with getattr(policy.scorer, "placement", LOCAL).forwards(1):  # an engine has no placement
        return policy.scorer(ids, torch.ones_like(ids, dtype=torch.bool)).log_probs.cpu()


def _distance(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()
