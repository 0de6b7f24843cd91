"""The policy on vLLM, which samples and scores (see vllm_engine.py).

ChatPolicy has the rendering, the masks and the containers.
"""

import copy
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policies.chat_policy import ChatPolicy
from policies.chats.renderer import Renderer
from policies.engines.vllm_engine import VLLMEngine, load_engine, lora_options
from policies.engines.vllm_server import VLLMServer
from policies.models.find import has_adapter
from policies.models.lora import adapter_config
from policies.padding import unpad
from policies.protocols import Policy
from policies.sampler import Sampled

# Largest allowed difference of log-probs for the same weights, nats, at the probe's rarest token.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}


class VLLMPolicy(ChatPolicy):
    """Generate with or score by a VLLMEngine or VLLMServer; see ChatPolicy."""

    def __init__(self, model: Any, **settings: Any) -> None:
        super().__init__(model, **settings)
        filters = self.limits.narrowing()
        if "min_new_tokens" in filters:
            filters["min_tokens"] = filters.pop("min_new_tokens")
        self.params = self.scorer.params(
            temperature=self.temperature,
            max_tokens=self.max_new_tokens,
            stop=list(self.limits.stop),
            stop_token_ids=sorted(self.stop_ids),
            **filters,
        )

    def _set_model(self, model: VLLMEngine) -> None:
        self.scorer = model

    @property
    def model(self) -> VLLMEngine:
        """Return the engine, which has the model's configs like a language model."""
        return self.scorer

    @property
    def device(self) -> torch.device:
        """Return the device of input and output ids; vLLM chooses the device of the weights."""
        return self.scorer.device

    @property
    def tolerance(self) -> float:
        """Return the largest allowed difference of log-probs to the policy's, nats."""
        return self.scorer.tolerance or TOLERANCE[self.scorer.dtype]

    @property
    def takes_trained(self) -> bool:
        """Return whether it loads only the trained weights, with LoRA the adapter."""
        return self.scorer.adapter is not None

    @property
    def copies(self) -> int:
        """Return the number of servers, each with all weights; 1 for an engine in this process."""
        return len(getattr(self.scorer, "servers", ())) or 1

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Load new weights, named as in the model's checkpoint; see `VLLMEngine.update_weights`."""
        self.scorer.update_weights(named)

    def _draw(self, prompts: Tensor, attention: Tensor, streams: Tensor) -> Sampled:
        rows = unpad(prompts.cpu(), attention.cpu())
        sampled = self.scorer.sample(rows, streams=streams, params=self.params)
        parts = (sampled.ids, sampled.log_probs, sampled.lengths, sampled.complete)
        return Sampled(*(part.to(prompts.device) for part in parts))


def _longest(policy: Policy) -> int | None:
    """Return the largest number of tokens of prompt and response in any turn; None = no limit."""
    prompt, new = policy.limits.max_prompt_tokens, policy.limits.max_new_tokens
    return prompt and max(32, prompt + new)  # `trainer.weight_sync` scores 16


def _of_this_rank(engine: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of vllm.LLM for an engine on the device of this rank."""
    ranks = torch.distributed
    if not ranks.is_available() or not ranks.is_initialized() or ranks.get_world_size() == 1:
        return {}
    if engine.get("tensor_parallel_size", 1) > 1:
        raise ValueError(
            "expected policy.engine.tensor_parallel_size=1: each rank has an engine of its own, "
            f"got {engine['tensor_parallel_size']}; use a server, policy.engine.url="
        )
    return {"distributed_executor_backend": "external_launcher"}


def make_vllm_generator(
    policy: Policy,
    *,
    folder: Path,
    url: str | Sequence[str] | None = None,
    dtype: str | None = None,
    tolerance: float | None = None,
    seeded: bool = True,
    **engine: Any,
) -> VLLMPolicy:
    """Return a vLLM generator with a copy of a policy's weights and its settings.

    It is in this process, on the rank's device, unless `url` names vLLM servers, which divide the
    responses and all read new weights from `folder`.
    dtype: dtype of the copy, by default the policy's compute dtype. tolerance: nats, see
    `trainer.weight_sync`; by default TOLERANCE of the coarser dtype. seeded: give each row a seed.
    `engine`: see `load_engine`.
    """
    urls = [url] if isinstance(url, str) else url or []
    if not all(re.fullmatch(r"https?://\S+", each) for each in urls):
        raise ValueError(f"expected policy.engine.url to be http://<host>:<port>, got {url}")
    if dtype not in (None, "float32", "bfloat16", "float16"):
        names = "null, float32, bfloat16 or float16"
        raise ValueError(f"expected policy.engine.dtype to be {names}, got {dtype}")
    computes = policy.scorer.autocast or next(policy.scorer.parameters()).dtype
    weights, dtype = policy.files.folder, dtype or str(computes).removeprefix("torch.")
    adapter = adapter_config(policy.model) if has_adapter(policy.model) else None
    alone = None if adapter is None or adapter.target_parameters else adapter  # experts: merged
    if not urls:
        engine |= _of_this_rank(engine)
        lora = lora_options(alone, policy.model.config.architectures) if alone else {}
        engine["max_model_len"] = engine.get("max_model_len") or _longest(policy)
        loaded = load_engine(weights, dtype=dtype, **lora, **engine)
        loaded.adapter = alone if lora else None
    else:
        where = {"folder": weights, "exchange": folder}
        loaded = VLLMServer(urls, policy.model, **where, dtype=dtype, adapter=alone)
    if adapter is not None:
        loaded.about += f", the adapter {'merged' if loaded.adapter is None else 'alone'}"
    loaded.device, loaded.seeded = policy.device, seeded
    loaded.tolerance = tolerance or max(TOLERANCE[loaded.dtype], TOLERANCE[computes])
    tokenizer = copy.deepcopy(policy.tokenizer)
    renderer = Renderer(tokenizer, policy.renderer.template)
    generator = VLLMPolicy(loaded, tokenizer=tokenizer, renderer=renderer, limits=policy.limits)
    generator.copy_attributes(policy, same_weights=True)
    return generator
