"""Who samples and who learns: two roles, which one wrapper may play both.

Protocols: an engine that samples (vLLM) is no kind of model that learns.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor

from policies.scorer import Scorer


class Generator(Protocol):
    """Sample replies: a call writes tokens, masks, log-probs and histories into a TensorDict.

    `version` counts the weights that it has had, `get_new_version` returns the same weights with
    other settings.
    """

    version: int
    temperature: float
    max_new_tokens: int
    generate_kwargs: dict[str, Any]
    tokenizer: Any
    renderer: Any
    stop_ids: frozenset[int]

    @property
    def device(self) -> torch.device: ...

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase: ...

    def get_new_version(self, **changes: Any) -> "Generator": ...


class Engine(Generator, Protocol):
    """Sample with a copy of the weights, which `load_weights` replaces; `scorer` probes it."""

    scorer: Any

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None: ...


class Policy(Generator, Protocol):
    """Learn: the scorer around the model is what the optimiser moves; it can sample too."""

    scorer: Scorer

    @property
    def model(self) -> Any: ...
