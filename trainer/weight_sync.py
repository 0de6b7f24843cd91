"""Weight sync: the generator gets the policy's new weights after each update, and proves it.

An adapter (LoRA) is merged into what the generator gets.
Left out on purpose: weights that are spread over ranks (FSDP, DeepSpeed).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.roles import Engine, Generator, Policy
from policies.weights import weights_of

TOLERANCE = 1e-3  # nats a token, of two float32 engines; bfloat16 needs about 0.1


@dataclass(frozen=True)
class Synced:
    """How far the generator's log-probs of the probe were from the policy's: nats, the largest."""

    before: float
    after: float


def weight_sync(
    policy: Policy,
    generator: Generator | None = None,
    *,
    probe: Tensor | None = None,
    tolerance: float = TOLERANCE,
) -> Synced:
    """Count a new version; copy the weights to a generator that has its own.

    Without a `generator` the policy generates by its own weights. Another one (vLLMWrapper) scores
    the ids of `probe` [B, T] before and after; RuntimeError unless it then agrees with the policy
    on every token to `tolerance` nats.
    """
    policy.version += 1
    if generator is None or generator is policy:
        return Synced(0.0, 0.0)
    probe = _probe(policy) if probe is None else probe
    expected = _log_probs(policy, probe)
    before = _distance(expected, _log_probs(generator, probe))
    generator.load_weights(weights_of(policy.scorer).merged().items())
    after = _distance(expected, _log_probs(generator, probe))
    if not after <= tolerance:
        raise RuntimeError(
            "weight sync failed: expected the generator's log-probs to be the policy's to "
            f"{tolerance} nats, got {after:.3g} ({before:.3g} before); is it the same model, in a "
            "dtype as exact as that?"
        )
    generator.version = policy.version
    return Synced(before, after)


def _probe(policy: Policy) -> Tensor:
    """Return ids from all over the vocabulary, [2, 16]."""
    size = policy.model.get_input_embeddings().num_embeddings
    return torch.linspace(0, size - 1, 32).long().reshape(2, 16)


@torch.no_grad()
def _log_probs(policy: Policy | Engine, probe: Tensor) -> Tensor:
    ids = probe.to(policy.device)
    return policy.scorer(ids, torch.ones_like(ids, dtype=torch.bool)).log_probs.cpu()


def _distance(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()
