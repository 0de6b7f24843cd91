"""Protocols of the generator, which samples, and of the policy, which learns.

One wrapper may implement both; an engine such as vLLM only samples.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor

from policies.limits import Limits
from policies.models.find import ModelFiles
from policies.scorer import Scorer


class Generator(Protocol):
    """Sample responses: a call writes tokens, masks, log-probs and histories into a TensorDict.

    `version` counts weight syncs. `get_new_version` returns a generator on the same weights with
    other settings, `at_temperature` with another temperature, `for_rollouts` with the settings of
    `trainer.collect`. Rollouts run in the context `sampling`.
    """

    version: int
    temperature: float
    max_new_tokens: int
    limits: Limits
    generate: bool
    tokenizer: Any
    renderer: Any
    stop_ids: frozenset[int]

    @property
    def device(self) -> torch.device: ...

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase: ...

    def get_new_version(self, **changes: Any) -> "Generator": ...

    def at_temperature(self, temperature: float) -> "Generator": ...

    def for_rollouts(self) -> "Generator": ...

    def sampling(self) -> AbstractContextManager[None]: ...


class EngineGenerator(Generator, Protocol):
    """Sample with a copy of the weights, which `load_weights` replaces; `scorer` scores with it.

    `load_weights` iterates over all weights on every rank, because with shards each step gathers
    one weight. `tolerance`: the largest allowed difference to the policy's log-probs, nats.
    """

    scorer: Any
    tolerance: float

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None: ...


class Policy(Generator, Protocol):
    """Learn: the optimiser updates the model inside `scorer`; the policy can sample too.

    `files` are the model files it was loaded from, `system_prompt` precedes each chat; a policy
    built by hand may have neither.
    """

    scorer: Scorer
    files: ModelFiles
    system_prompt: str | None

    @property
    def model(self) -> Any: ...
