"""Weight sync: the generator gets the policy's new weights after each update, and proves it.

The policy itself samples by its own weights; an engine gets a copy, and both score fixed ids before
and after the transfer. It is an error if they then disagree; if the engine's scores did not change
although the policy's did (in half precision a step may be smaller than the tolerance); or if they
changed since the last transfer (the engine was restarted). Of LoRA the engine gets merged weights.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policies.protocols import Engine, Generator, Policy
from policies.scorer import placement_of
from policies.weights import weights_of

NOTICED = 0.01  # share of the tolerance by which the policy has moved when an engine must follow


@dataclass(frozen=True)
class Synced:
    """How far the generator's log-probs of the probe were from the policy's: nats, the largest.

    `held` are those of the policy [B, T] whose weights the engine is known to hold.
    """

    before: float = 0.0
    after: float = 0.0
    held: Tensor | None = None

    def metrics(self) -> dict[str, float]:
        """Return what a run logs: nothing where the policy itself samples."""
        if self.held is None:
            return {}
        return {"sync/probe": self.after, "sync/probe_before": self.before}


def weight_sync(policy: Policy, generator: Generator | None = None, **proof: Any) -> Synced:
    """Count a new version of the policy's weights, and hand them over; see `hand_over`."""
    policy.version += 1
    return hand_over(policy, generator, **proof)


def hand_over(policy: Policy, generator: Any = None, *, last: Synced | None = None) -> Synced:
    """Copy the policy's weights to an engine, which then scores fixed ids.

    RuntimeError unless it agrees with the policy on every token to its `tolerance` in nats, and has
    changed where the policy has since the hand-over `last`. An engine with `takes_trained` gets the
    adapter of LoRA alone.
    """
    if generator is None or generator is policy:
        return Synced()
    engine: Engine = generator
    limit, size = engine.tolerance, policy.model.get_input_embeddings().num_embeddings
    probe = torch.linspace(0, size - 1, 32).long().reshape(2, 16)  # from all over the vocabulary
    weights = weights_of(policy.scorer)
    with policy.scorer.placement.plain():
        if getattr(engine, "takes_trained", False):
            named = {name: weight.detach() for name, weight in weights.named().items()}
        else:
            named = weights.merged()
    expected, held = _log_probs(policy, probe), None if last is None else last.held
    old = _log_probs(engine, probe)
    _check_held(held, old, limit=2 * limit)
    engine.load_weights(named.items())
    new = _log_probs(engine, probe)
    held = held if torch.equal(old, new) else None
    _check_arrived(expected, old, new, held=held, limit=limit)
    engine.version = policy.version
    before, after = _distance(expected, old), _distance(expected, new)
    return Synced(before, after, expected if held is None else held)


def _check_held(held: Tensor | None, old: Tensor, *, limit: float) -> None:
    """Raise where an engine no longer scores as after the last hand-over."""
    if held is not None and not (gone := _distance(held, old)) <= limit:
        raise RuntimeError(
            f"the engine lost its weights: its log-probs moved by {gone:.3g} nats since the last "
            f"hand-over, expected {limit:g} at most; was it started again? Go on with resume="
        )


def _check_arrived(
    expected: Tensor, old: Tensor, new: Tensor, *, held: Tensor | None, limit: float
) -> None:
    """Raise where an engine does not score as the policy, or nothing has moved but the policy."""
    before, after, same = _distance(expected, old), _distance(expected, new), torch.equal(old, new)
    moved = 0.0 if held is None else _distance(expected, held)
    found = f"after a hand-over its log-probs are {after:.3g} nats from the policy's "
    found += f"({before:.3g} before), expected {limit:g} at most"
    if same and not max(moved / NOTICED, after) <= limit:
        raise RuntimeError(
            f"the engine is stale: {found}; they did not change, while the policy moved by "
            f"{moved:.3g}; start the engine again, or give policy.engine=transformers"
        )
    if not after <= limit:
        raise RuntimeError(
            f"the engine is not the policy: {found}; is it the same model? Give "
            "policy.vllm.dtype=float32, or a larger policy.vllm.tolerance"
        )


@torch.no_grad()
def _log_probs(policy: Policy | Engine, probe: Tensor) -> Tensor:
    ids = probe.to(policy.device)
    with placement_of(policy).forwards(1):
        return policy.scorer(ids, torch.ones_like(ids, dtype=torch.bool)).log_probs.cpu()


def _distance(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()
