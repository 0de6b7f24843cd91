"""Who samples and who learns: two roles, which one wrapper may play both.

Protocols: an engine that samples (vLLM) is no kind of model that learns.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor

from policies.models import FoundModel
from policies.scorer import Scorer
from policies.wrappers.generate_kwargs import GenerateKwargs


class Generator(Protocol):
    """Sample replies: a call writes tokens, masks, log-probs and histories into a TensorDict.

    `version` counts the weights that it has had, `get_new_version` returns the same weights with
    other settings: those of LLMWrapperBase.
    """

    version: int
    temperature: float
    max_new_tokens: int
    generate_kwargs: dict[str, Any]
    limits: GenerateKwargs
    generate: bool
    input_mode: str
    num_samples: int | None
    tokenizer: Any
    renderer: Any
    stop_ids: frozenset[int]

    @property
    def device(self) -> torch.device: ...

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase: ...

    def get_new_version(self, **changes: Any) -> "Generator": ...


class Engine(Generator, Protocol):
    """Sample with a copy of the weights, which `load_weights` replaces; `scorer` probes it.

    `tolerance` is how far its log-probs may be from the policy's for the same weights, nats.
    """

    scorer: Any
    tolerance: float

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None: ...


class Policy(Generator, Protocol):
    """Learn: the scorer around the model is what the optimiser moves; it can sample too.

    `found` says where its weights came from, `system_prompt` what stands before each chat; a
    policy that was made by hand may have neither.
    """

    scorer: Scorer
    found: FoundModel
    system_prompt: str | None

    @property
    def model(self) -> Any: ...
