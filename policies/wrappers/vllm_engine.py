"""vLLM behind the borders of the sampler and the scorer: ids in, ids and log-probs out.

A `VLLMEngine` stands where TransformersWrapper has its Scorer. Prompts and sequences cross as token
ids; text only ends a reply (stop texts). This is the one file that imports vllm.
Left out on purpose: engines in another process or on another host; weights reach this one by
reference.
"""

import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from policies.models import find_model
from policies.optional_packages import EXTRAS
from policies.padding import predicted, unpad
from policies.sampler import Sampled
from policies.scorer import Scores

IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"  # vLLM's switch; 0 = no process of its own
TOGETHER = 2**16  # tokens of prompts that a CPU computes at a time: no prompt may be longer


class VLLMEngine(nn.Module):
    """Sample and score with a `vllm.LLM`.

    Log-probs are those of the distribution sampled from, so the engine's `logprobs_mode` must be
    "processed_logprobs" unless that is the model's own: temperature 1, nothing cut off.
    """

    def __init__(self, llm: Any) -> None:
        super().__init__()
        self.device = torch.device("cpu")  # of the ids that go in and come out
        self.tolerance: float | None = None  # of a probe, nats; None = by dtype
        if not isinstance(llm, _vllm().LLM):
            raise ValueError(f"expected a vllm.LLM, a folder or a name, got {type(llm).__name__}")
        about = llm.llm_engine.model_config
        self.llm, self.limit, self.mode = llm, about.max_model_len, about.logprobs_mode
        if self.mode not in ("raw_logprobs", "processed_logprobs"):
            raise ValueError(
                f"expected an engine that returns log-probs, got logprobs_mode={self.mode!r}; use "
                "vllm.LLM(..., logprobs_mode='processed_logprobs')"
            )
        self.folder, self.dtype = about.model, about.dtype
        self.config = about.hf_config
        self.generation_config = GenerationConfig(**about.try_get_generation_config())
        _check_head(about)

    def params(self, *, temperature: float, **more: Any) -> Callable[..., Any]:
        """Return what makes the vllm.SamplingParams of a seed.

        `more` are other fields of it. Raises ValueError where vLLM cannot do as asked.
        """
        if 0 < temperature < 0.01:
            raise ValueError(f"expected temperature 0, or 0.01 to 2 with vLLM, got {temperature}")
        plain = {"max_tokens", "stop", "stop_token_ids"}
        if self.mode == "raw_logprobs" and (temperature not in (0, 1) or set(more) - plain):
            raise ValueError(
                "expected log-probs of the distribution sampled from, this engine returns the "
                "model's own; use vllm.LLM(..., logprobs_mode='processed_logprobs'), or "
                "temperature 1 and nothing cut off"
            )
        make = partial(
            _vllm().SamplingParams,
            temperature=temperature,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            ignore_eos=True,  # stop_token_ids say it all
            detokenize=bool(more.get("stop")),
            skip_special_tokens=False,  # a stop text may hold some
            **more,
        )
        try:
            make(seed=0)  # vLLM checks the ranges
        except _vllm().exceptions.VLLMValidationError as error:
            raise ValueError(f"vLLM cannot generate so: {error}") from error
        return make

    def sample(
        self, prompts: Sequence[Tensor], *, streams: Tensor, params: Callable[..., Any]
    ) -> Sampled:
        """Sample one reply per prompt (1-D ids), on the CPU.

        Each row's seed is a function of its stream.
        """
        # 62 bits: vLLM reads -1 as "no seed".
        made = [params(seed=stream & (2**62 - 1)) for stream in streams.tolist()]
        self._check_lengths(prompts, made[0].max_tokens if made else 0)
        replies = [done.outputs[0] for done in self._run(prompts, made)]
        return Sampled.of_rows(
            [torch.tensor(r.token_ids, dtype=torch.int64) for r in replies],
            [torch.tensor(r.logprobs.logprobs, dtype=torch.float32) for r in replies],
            torch.tensor([r.finish_reason == "stop" for r in replies], dtype=torch.bool),
        )

    def forward(
        self,
        tokens: Tensor,
        attention_mask: Tensor,
        keep: Tensor | None = None,
        *,
        temperature: Tensor | float = 1.0,
        group_id: Tensor | None = None,
    ) -> Scores:
        """Return aligned log-probs [B, T] as `Scorer` does; `group_id` changes nothing here."""
        rows = unpad(tokens.cpu(), attention_mask.cpu())
        each = torch.as_tensor(temperature, dtype=torch.float32).reshape(-1).expand(len(rows))
        values = [torch.zeros(len(row)) for row in rows]
        for value in each.unique().tolist():
            # A first token has nothing to be predicted from.
            chosen = [i for i, t in enumerate(each.tolist()) if t == value and len(rows[i]) > 1]
            with self._tempered(value):
                for i, scored in zip(chosen, self._scored([rows[i] for i in chosen]), strict=True):
                    values[i][1:] = scored
        mask = attention_mask.cpu()
        full = torch.zeros(mask.shape).masked_scatter(mask, torch.cat(values)).to(tokens.device)
        return Scores(full * predicted(attention_mask, keep))

    def update_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Take new weights, named as in the model's checkpoint; forget what the old ones cached."""
        from vllm.v1.engine.core_client import InprocClient  # pyright: ignore[reportMissingImports]

        if not isinstance(self.llm.llm_engine.engine_core, InprocClient):
            raise ValueError(
                f"expected a vLLM engine in this process; set {IN_PROCESS}=0 before it is made, or "
                "use policies.wrappers.vllm_engine.load_engine"
            )
        weights = {"weights_iterator": list(named)}
        self.llm.collective_rpc("reload_weights", kwargs=weights)
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept keys and values of the old weights: is it generating?")

    def _scored(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the log-probs of every token but the first of each row."""
        self._check_lengths(rows, 1)
        params = _vllm().SamplingParams(
            max_tokens=1, temperature=0, prompt_logprobs=0, flat_logprobs=True, detokenize=False
        )
        done = self._run(rows, [params] * len(rows))
        return [torch.tensor(d.prompt_logprobs.logprobs, dtype=torch.float32) for d in done]

    def _run(self, rows: Sequence[Tensor], params: list[Any]) -> list[Any]:
        prompts = [{"prompt_token_ids": row.tolist()} for row in rows]
        return self.llm.generate(prompts, params, use_tqdm=False) if prompts else []

    @contextmanager
    def _tempered(self, temperature: float) -> Iterator[None]:
        """Divide all logits for a while; vLLM has no temperature for the log-probs of a prompt."""
        if temperature == 1:
            yield
            return
        self.llm.apply_model(partial(_scale, factor=1 / temperature))
        try:
            yield
        finally:
            self.llm.apply_model(partial(_scale, factor=temperature))

    def _check_lengths(self, rows: Sequence[Tensor], new: int) -> None:
        """Raise where a row and `new` tokens after it are more than the engine's context."""
        longest = max(map(len, rows), default=0)
        if longest + new > self.limit:
            raise ValueError(
                f"expected at most {self.limit} tokens (vLLM's max_model_len), got a row of "
                f"{longest} with {new} to come; shorten it, or raise max_model_len"
            )


def load_engine(
    model: str | Path, *, source: str = "auto", dtype: str = "float32", **engine: Any
) -> VLLMEngine:
    """Return an engine in this process on a folder, an embedded model or a hub id.

    `engine` are arguments of vllm.LLM. On a CPU nothing is compiled unless asked for (it takes
    minutes), and the size of an attention head must be one that vLLM has kernels for: 32, 64, 80,
    ...; another one is a ValueError. The process's random state stays as it is.
    """
    LLM, found = _vllm().LLM, find_model(str(model), source=source)
    settings = {
        "logprobs_mode": "processed_logprobs",
        "dtype": dtype,
        "use_tqdm_on_load": False,
        "enforce_eager": not torch.cuda.is_available(),
    }
    if not torch.cuda.is_available():  # a prompt in two parts would set back its generator
        settings |= {"enable_chunked_prefill": False, "max_num_batched_tokens": TOGETHER}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")  # what fails is raised
    before = os.environ.get(IN_PROCESS)
    states = random.getstate(), np.random.get_state()  # an engine in this process seeds them all
    os.environ[IN_PROCESS] = "0"
    try:
        with torch.random.fork_rng():
            made = VLLMEngine(LLM(str(found.folder), **{**settings, **engine}))
    finally:
        os.environ.pop(IN_PROCESS)
        os.environ.update({} if before is None else {IN_PROCESS: before})
        random.setstate(states[0])
        np.random.set_state(states[1])
    return made


def _check_head(about: Any) -> None:
    """Raise where vLLM's CPU kernels lack the model's size of an attention head."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    if not current_platform.is_cpu():
        return
    from vllm.v1.attention.backends import cpu_attn  # pyright: ignore[reportMissingImports]

    sizes = cpu_attn.CPUAttentionBackend.get_supported_head_sizes()
    if about.get_head_size() not in sizes:
        raise ValueError(
            f"expected an attention head of {sizes} on a CPU with vLLM, {about.model} has "
            f"{about.get_head_size()}; generate with TransformersWrapper"
        )


def _scale(model: nn.Module, factor: float) -> None:
    """Multiply the scale that a vLLM model's logits get."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor  # pyright: ignore[reportMissingImports]

    found = [m for m in model.modules() if isinstance(m, LogitsProcessor)]
    if not found:
        raise ValueError(
            f"{type(model).__name__} of vLLM has no logits processor, so it scores at temperature "
            "1 only; score with TransformersWrapper"
        )
    for module in found:
        module.scale *= factor


def _vllm() -> Any:
    try:
        import vllm  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(f"{EXTRAS['vllm']} ({error})") from error
    return vllm
