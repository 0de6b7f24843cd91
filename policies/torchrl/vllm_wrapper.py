"""TorchRL's wrapper of vLLM, with the arguments, keys and alignment of TransformersWrapper.

Log-probs only: whole distributions need TransformersWrapper.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from policies.engines.vllm_engine import VLLMEngine, load_engine
from policies.engines.vllm_policy import VLLMPolicy
from policies.models.find import find_model, load_tokenizer
from policies.torchrl.wrapper import LLMWrapperBase


class vLLMWrapper(LLMWrapperBase, VLLMPolicy):
    """Generate with or score by vLLM; input and output are one TensorDict.

    `model` is a vllm.LLM, or the folder or name of a model to start one on (float32; for others
    `load_engine(name, dtype="bfloat16", ...)`). The default tokenizer is the model's.
    A `stream` [B] seeds each row.
    """

    def __init__(self, model: Any, *, tokenizer: Any = None, **settings: Any) -> None:
        if isinstance(model, str | Path):
            model = load_engine(model)
        engine = model if isinstance(model, VLLMEngine) else VLLMEngine(model)
        if tokenizer is None or isinstance(tokenizer, str | Path):
            tokenizer = load_tokenizer(find_model(str(tokenizer or engine.folder)))
        super().__init__(engine, tokenizer=tokenizer, **settings)
        if self.limits.hf_only:
            raise ValueError(f"vLLM does not offer {self.limits.hf_only}; drop them")

    def _logits(self, tokens: Tensor, attention: Tensor) -> Tensor:
        raise NotImplementedError("vLLM gives no distributions; use TransformersWrapper")
