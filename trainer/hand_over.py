"""Hand over: an engine gets the policy's weights, and a probe proves that they arrived.

Both sides score fixed ids, before and after. It is an error where they then disagree, or where the
engine's scores stay what they were, to the bit, though the policy's moved: in half precision a step
may be smaller than the tolerance; or where it scores otherwise than after the one before, as one
that was started again.
An adapter (LoRA) is merged into what the engine gets, weights that are spread over ranks are
gathered one by one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.placement import placement_of
from policies.roles import Engine, Policy
from policies.weights import weights_of
from trainer.weight_sync import Synced

NOTICED = 0.01  # share of the tolerance by which the policy has moved when an engine must follow


@dataclass(frozen=True)
class Offer:
    """Weights of a version, and the policy's log-probs of the ids of `probe` by them, [B, T].

    `named` is what an engine loads, `trained` what training moves of it.
    """

    version: int
    named: Mapping[str, Tensor]
    trained: Mapping[str, Tensor]
    probe: Tensor
    expected: Tensor


def give(
    policy: Policy,
    engine: Engine,
    *,
    probe: Tensor | None = None,
    tolerance: float | None = None,
    last: Synced | None = None,
) -> Synced:
    """Copy the policy's weights to an engine, which scores the ids of `probe` [B, T].

    RuntimeError unless it then agrees with the policy on every token to `tolerance` nats (None: the
    engine's own), and has changed where the policy has since the hand-over `last`.
    """
    return take(engine, offer(policy, engine, probe=probe), tolerance=tolerance, last=last)


def offer(
    policy: Policy, engine: Engine, *, probe: Tensor | None = None, copy: bool = False
) -> Offer:
    """Return the weights that the policy has now: they themselves, or a `copy` of them on the CPU.

    An engine with `takes_trained` gets of LoRA the adapter alone.
    """
    probe, weights = _probe(policy) if probe is None else probe, weights_of(policy.scorer)
    alone = getattr(engine, "takes_trained", False)
    with policy.scorer.placement.plain():
        trained: Mapping[str, Tensor] = {name: p.detach() for name, p in weights.named().items()}
        named: Mapping[str, Tensor] = trained if alone else weights.merged()
    if copy:
        every = [*trained.values(), *named.values()]  # of two names for one tensor, one copy
        copies = {id_of(w): w for w in every}
        copies = {key: w.detach().to("cpu", copy=True) for key, w in copies.items()}
        trained = {name: copies[id_of(w)] for name, w in trained.items()}
        named = {name: copies[id_of(w)] for name, w in named.items()}
    return Offer(policy.version, named, trained, probe, _log_probs(policy, probe))


def take(
    engine: Engine, offered: Offer, *, tolerance: float | None = None, last: Synced | None = None
) -> Synced:
    """Load what is offered into an engine, and compare; see `give`."""
    limit = engine.tolerance if tolerance is None else tolerance
    held = None if last is None else last.held
    old = _log_probs(engine, offered.probe)
    _check_held(held, old, limit=2 * limit)
    engine.load_weights(offered.named.items())
    new = _log_probs(engine, offered.probe)
    held = held if torch.equal(old, new) else None
    _check_arrived(offered.expected, old, new, held=held, limit=limit)
    engine.version = offered.version
    before, after = _distance(offered.expected, old), _distance(offered.expected, new)
    return Synced(before, after, offered.expected if held is None else held)


def _check_held(held: Tensor | None, old: Tensor, *, limit: float) -> None:
    """Raise where an engine no longer scores as after the last hand-over."""
    if held is not None and not (gone := _distance(held, old)) <= limit:
        raise RuntimeError(
            "the engine lost its weights: before a hand-over its log-probs of the probe are "
            f"{gone:.3g} nats from those of the last one, expected {limit:g} at most; was it "
            "started again, or does another run use it? Go on with resume=<run folder>"
        )


def _check_arrived(
    expected: Tensor, old: Tensor, new: Tensor, *, held: Tensor | None, limit: float
) -> None:
    """Raise where an engine does not score as the policy, or nothing has moved but the policy."""
    before, after, same = _distance(expected, old), _distance(expected, new), torch.equal(old, new)
    moved = 0.0 if held is None else _distance(expected, held)
    told = f"after a hand-over of weights its log-probs of the probe are {after:.3g} nats from the "
    told += f"policy's ({before:.3g} before), expected {limit:g} at most"
    if same and not max(moved / NOTICED, after) <= limit:
        raise RuntimeError(
            f"the engine is stale: {told}; they stayed as they were to the bit, while the policy "
            f"has moved by {moved:.3g} since; start the engine again, or give "
            "policy.engine=transformers"
        )
    if not after <= limit:
        raise RuntimeError(
            f"the engine is not the policy: {told}; is it the same model? Give "
            "policy.vllm.dtype=float32, or a larger policy.vllm.tolerance if its kernels round more"
        )


def _probe(policy: Policy) -> Tensor:
    """Return ids from all over the vocabulary, [2, 16]."""
    size = policy.model.get_input_embeddings().num_embeddings
    return torch.linspace(0, size - 1, 32).long().reshape(2, 16)


@torch.no_grad()
def _log_probs(policy: Policy | Engine, probe: Tensor) -> Tensor:
    ids = probe.to(policy.device)
    with placement_of(policy).forwards(1):
        return policy.scorer(ids, torch.ones_like(ids, dtype=torch.bool)).log_probs.cpu()


def id_of(weight: Tensor) -> tuple[int, torch.Size]:
    """Return what is the same for two names of one tensor."""
    return weight.data_ptr(), weight.shape


def _distance(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()
