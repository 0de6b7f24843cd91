"""Weight sync: the generator gets the policy's new weights after each update, and proves it.

The policy itself samples by its own weights. An engine gets a copy: trainer/hand_over.py.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from policies.roles import Generator, Policy


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
        both = {"sync/probe": self.after, "sync/probe_before": self.before}
        return {} if self.held is None else both


def weight_sync(policy: Policy, generator: Generator | None = None, **proof: Any) -> Synced:
    """Count a new version of the policy's weights, and hand them over; see `hand_over`."""
    policy.version += 1
    return hand_over(policy, generator, **proof)


def hand_over(policy: Policy, generator: Generator | None = None, **proof: Any) -> Synced:
    """Give a generator that has weights of its own the policy's; see `give` for `proof`."""
    if generator is None or generator is policy:
        return Synced()
    if later := getattr(generator, "later", None):  # it is at work (trainer/overlap.py)
        return later(policy)
    from trainer.hand_over import give  # few runs have one

    return give(policy, generator, **proof)
