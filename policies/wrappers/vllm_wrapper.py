"""The policy on vLLM: the same arguments, keys and alignment as TransformersWrapper.

vLLM samples and scores (see vllm_engine.py); rendering, masks and containers are shared.
Log-probs only: whole distributions need TransformersWrapper.
"""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policies.lora import adapter_config
from policies.models import find_model, has_adapter, load_tokenizer
from policies.padding import unpad
from policies.roles import Policy
from policies.sampler import Sampled
from policies.wrappers.vllm_engine import VLLMEngine, load_engine, lora_options
from policies.wrappers.vllm_server import VLLMServer
from policies.wrappers.wrapper import LLMWrapperBase

# How far log-probs of the same weights may be apart, nats: of the probe's least likely token.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}


class vLLMWrapper(LLMWrapperBase):
    """Generate with or score by vLLM; in and out is one TensorDict.

    `model` is a vllm.LLM, or the folder or name of a model to start one on (float32; for more say
    `load_engine(name, dtype="bfloat16", ...)`); without a tokenizer the model's own is read.
    A `stream` [B] seeds each row.
    """

    def __init__(self, model: Any, *, tokenizer: Any = None, **settings: Any) -> None:
        if isinstance(model, str | Path):
            model = load_engine(model)
        engine = model if isinstance(model, VLLMEngine) else VLLMEngine(model)
        if tokenizer is None or isinstance(tokenizer, str | Path):
            tokenizer = load_tokenizer(find_model(str(tokenizer or engine.folder)))
        super().__init__(engine, tokenizer=tokenizer, **settings)
        if self.limits.foreign:
            raise ValueError(f"vLLM does not offer {self.limits.foreign}; drop them")
        filters = self.limits.narrowing()
        if "min_new_tokens" in filters:
            filters["min_tokens"] = filters.pop("min_new_tokens")
        self.params = engine.params(
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
        """Return the engine, which has the model's configs as a language model does."""
        return self.scorer

    @property
    def device(self) -> torch.device:
        """Return where ids go in and come out; the weights are where vLLM keeps them."""
        return self.scorer.device

    @property
    def tolerance(self) -> float:
        """Return how far its log-probs may be from those of the policy for the same weights."""
        return self.scorer.tolerance or TOLERANCE[self.scorer.dtype]

    @property
    def takes_trained(self) -> bool:
        """Return whether it loads what training moves, of LoRA the adapter alone."""
        return self.scorer.adapter is not None

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Take new weights, named as in the model's checkpoint; see `VLLMEngine.update_weights`."""
        self.scorer.update_weights(named)

    def _draw(self, prompts: Tensor, attention: Tensor, streams: Tensor) -> Sampled:
        rows = unpad(prompts.cpu(), attention.cpu())
        drawn = self.scorer.sample(rows, streams=streams, params=self.params)
        parts = (drawn.ids, drawn.log_probs, drawn.lengths, drawn.complete)
        return Sampled(*(part.to(prompts.device) for part in parts))

    def _logits(self, tokens: Tensor, attention: Tensor) -> Tensor:
        raise NotImplementedError("vLLM gives no distributions; use TransformersWrapper")


def vllm_beside(
    policy: Policy,
    *,
    share: Path,
    url: str | None = None,
    dtype: str | None = None,
    tolerance: float | None = None,
    **engine: Any,
) -> vLLMWrapper:
    """Return a generator with a copy of a policy's weights and all its words.

    It is in this process unless `url` names a vLLM server, which reads new weights from `share`.
    dtype: of the copy, by default that in which the policy computes. tolerance: nats, see
    `trainer.weight_sync`; by default that of the coarser of the two. `engine`: see `load_engine`.
    """
    computes = policy.scorer.autocast or next(policy.scorer.parameters()).dtype
    folder, dtype = policy.found.folder, dtype or str(computes).removeprefix("torch.")
    adapter = adapter_config(policy.model) if has_adapter(policy.model) else None
    if url is None:
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        if policy.device.type == "cuda" and several and torch.distributed.get_world_size() > 1:
            raise ValueError("several ranks on GPUs need policy.vllm.url: vLLM takes the first GPU")
        lora = lora_options(adapter, policy.model.config.architectures) if adapter else {}
        made = load_engine(folder, dtype=dtype, **lora, **engine)
        made.adapter = adapter if lora else None
    else:
        model = policy.model
        made = VLLMServer(url, model, folder=folder, share=share, dtype=dtype, adapter=adapter)
    if adapter is not None:
        made.about += f", the adapter {'merged' if made.adapter is None else 'alone'}"
    made.device = policy.device
    made.tolerance = tolerance or max(TOLERANCE[made.dtype], TOLERANCE[computes])
    shared = ("generate_kwargs", "chat_template_name", "chat_template", "pad_output")
    settings = {name: policy._settings[name] for name in shared}
    beside = vLLMWrapper(made, tokenizer=copy.deepcopy(policy.tokenizer), **settings)
    beside.copy_attributes(policy, same_weights=True)
    return beside
