"""Engines without vLLM: a policy's copy with weights of its own, and some with a fault."""

import copy

from policies.scorer import Scorer
from policies.transformers_policy import TransformersPolicy


class Copy(TransformersPolicy):
    """Sample by a copy of a policy's weights, which `load_weights` brings up to date."""

    tolerance = 1e-6

    def load_weights(self, named) -> None:
        self.model.load_state_dict(dict(named))


class Stale(Copy):
    """Takes no weights after the first ones."""

    taken = 0

    def load_weights(self, named) -> None:
        self.taken += 1
        if self.taken == 1:
            super().load_weights(named)


class Wrong(Copy):
    """Takes other weights than it is given."""

    def load_weights(self, named) -> None:
        super().load_weights((name, value * 1.1) for name, value in named)


def beside(policy: TransformersPolicy, kind: type[Copy] = Copy) -> Copy:
    """Return an engine with the weights that a policy has now."""
    network = copy.deepcopy(policy.model).requires_grad_(False).eval()
    same = {name: getattr(policy, name) for name in ("tokenizer", "renderer", "limits")}
    engine = kind(Scorer(network), **same)
    engine.system_prompt = getattr(policy, "system_prompt", None)
    return engine
