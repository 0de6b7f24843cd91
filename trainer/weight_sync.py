"""Weight sync: the generator gets the policy's new weights after each update, and proves it.

An adapter (LoRA) is merged into what the generator gets.
Left out on purpose: weights that are spread over ranks (FSDP, DeepSpeed).
"""

from collections.abc import Mapping
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


@dataclass(frozen=True)
class Offer:
    """What is handed over: weights, and how their policy scores the ids of `probe` [B, T].

    `trained` is what training moves of them, by name; without a copy both are the policy's own.
    """

    version: int
    named: Mapping[str, Tensor]
    trained: Mapping[str, Tensor]
    probe: Tensor
    expected: Tensor


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
    on every token to `tolerance` nats. One that is at work takes them later (trainer/overlap.py).
    """
    policy.version += 1
    if generator is None or generator is policy:
        return Synced(0.0, 0.0)
    if later := getattr(generator, "later", None):
        return later(policy)
    return take(generator, offer(policy, generator, probe=probe), tolerance=tolerance)


def offer(
    policy: Policy, engine: Engine, *, probe: Tensor | None = None, copy: bool = False
) -> Offer:
    """Return the policy's weights of now for an engine; a `copy` on the CPU stays as it is."""
    probe, weights = _probe(policy) if probe is None else probe, weights_of(policy.scorer)
    trained: dict[str, Tensor] = {name: p.detach() for name, p in weights.named().items()}
    whole = not getattr(engine, "takes_trained", False)
    named = weights.merged() if whole else trained
    if copy:
        copies: dict[int, Tensor] = {}  # a tensor of two names is copied once

        def kept(tensor: Tensor) -> Tensor:
            place = tensor.data_ptr()
            if place not in copies:
                copies[place] = tensor.detach().to("cpu", copy=True)
            return copies[place]

        trained = {name: kept(tensor) for name, tensor in trained.items()}
        named = {name: kept(tensor) for name, tensor in named.items()} if whole else trained
    return Offer(policy.version, named, trained, probe, _log_probs(policy, probe))


def take(engine: Engine, offered: Offer, *, tolerance: float = TOLERANCE) -> Synced:
    """Load what is offered into an engine; RuntimeError unless it scores the probe as expected."""
    before = _distance(offered.expected, _log_probs(engine, offered.probe))
    engine.load_weights(offered.named.items())
    after = _distance(offered.expected, _log_probs(engine, offered.probe))
    if not after <= tolerance:
        raise RuntimeError(
            "weight sync failed: expected the generator's log-probs to be the policy's to "
            f"{tolerance} nats, got {after:.3g} ({before:.3g} before); is it the same model, in a "
            "dtype as exact as that?"
        )
    engine.version = offered.version
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
