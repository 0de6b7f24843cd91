"""vLLM in this process as sampler and scorer: ids in, ids and log-probs out.

A `VLLMEngine` takes the place of a policy's Scorer. Prompts and sequences are token ids; only stop
texts are text. The engine gets weights by reference. vllm_server.py is for engines in another
process or on another host.
"""

import os
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig

from policies.models.find import find_model
from policies.models.lora import write_adapter
from policies.optional_packages import EXTRAS
from policies.padding import predicted, unpad
from policies.sampler import Sampled
from policies.scorer import Scores

IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"  # vLLM's switch; 0 = in this process
PROMPT_TOKENS_PER_BATCH = 2**16  # prompt tokens per CPU batch; a longer prompt is one batch


@dataclass(frozen=True)
class EngineResponse:
    """vLLM's result for a row: sampled ids and their log-probs, or log-probs of the given ids."""

    ids: Sequence[int]
    log_probs: Sequence[float]
    ended: bool
    scores: Sequence[float]  # log-prob of every token but the first, if requested


class VLLMEngine(nn.Module):
    """Sample and score with a `vllm.LLM`.

    Log-probs belong to the sampling distribution, so the engine's `logprobs_mode` must be
    "processed_logprobs", unless temperature is 1 and there are no filters.
    """

    folder: str
    dtype: torch.dtype
    limit: int  # tokens of a context
    mode: str  # which log-probs it returns
    config: Any
    generation_config: Any
    adapter: Any = None  # peft's config of a LoRA; then new weights are only the adapter's
    lora: Any = None  # the adapter loaded in vLLM, under vLLM's name
    seeded: bool = True  # each row has a seed; False: vLLM draws for the rows of a batch at once

    def __init__(self, llm: Any) -> None:
        super().__init__()
        if not isinstance(llm, _vllm().LLM):
            raise ValueError(f"expected a vllm.LLM, a folder or a name, got {type(llm).__name__}")
        self.llm, about = llm, llm.llm_engine.model_config
        self._keep(
            folder=about.model,
            dtype=about.dtype,
            limit=about.max_model_len,
            mode=about.logprobs_mode,
            about=f"vLLM {_vllm().__version__} in this process",
            config=about.hf_config,
            generation_config=GenerationConfig(**about.try_get_generation_config()),
        )
        if self.mode not in ("raw_logprobs", "processed_logprobs"):
            raise ValueError(f"expected logprobs_mode='processed_logprobs', got {self.mode!r}")

    def _keep(self, *, about: str, **facts: Any) -> None:
        """Store facts about the engine's model as attributes."""
        for name, value in facts.items():
            setattr(self, name, value)
        self.about = f"{about}, {str(self.dtype).removeprefix('torch.')}"
        self.device = torch.device("cpu")  # device of input and output ids
        self.tolerance: float | None = None  # largest difference at a probe, nats; None = by dtype

    def params(self, *, temperature: float, **more: Any) -> partial[Any]:
        """Return a function from seed to vLLM's sampling parameters; `more` are further fields."""
        if 0 < temperature < 0.01:  # vLLM would raise it to 0.01
            raise ValueError(f"expected temperature 0, or 0.01 to 2 with vLLM, got {temperature}")
        plain = {"max_tokens", "stop", "stop_token_ids"}
        if self.mode == "raw_logprobs" and (temperature not in (0, 1) or set(more) - plain):
            raise ValueError("expected vllm.LLM(..., logprobs_mode='processed_logprobs')")
        make = partial(
            self._params,
            temperature=temperature,
            logprobs=0,  # only of the sampled token
            ignore_eos=True,  # stop_token_ids include it
            detokenize=bool(more.get("stop")),
            skip_special_tokens=False,  # a stop text may contain special tokens
            **more,
        )
        make(seed=0)
        return make

    def sample(
        self, prompts: Sequence[Tensor], *, streams: Tensor, params: partial[Any]
    ) -> Sampled:
        """Sample one response per prompt (1-D ids) on the CPU; a row's stream is its seed."""
        # 62 bits: vLLM reads -1 as "no seed".
        seeds = [stream & (2**62 - 1) for stream in streams.tolist()]
        sampling = [params(seed=seed if self.seeded else None) for seed in seeds]
        self._check_lengths(prompts, params.keywords["max_tokens"])
        if not self.seeded:
            torch.manual_seed(sum(seeds) % 2**62)  # read by vLLM in this process; ranks differ
        responses = self._run(prompts, sampling)
        return Sampled.of_rows(
            [torch.tensor(r.ids, dtype=torch.int64) for r in responses],
            [torch.tensor(r.log_probs, dtype=torch.float32) for r in responses],
            torch.tensor([r.ended for r in responses], dtype=torch.bool),
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
        """Return aligned log-probs [B, T] as `Scorer` does; `group_id` has no effect."""
        rows = unpad(tokens.cpu(), attention_mask.cpu())
        each = torch.as_tensor(temperature, dtype=torch.float32).reshape(-1).expand(len(rows))
        values = [torch.zeros(len(row)) for row in rows]
        for value in each.unique().tolist():
            # The first token has no prediction.
            chosen = [i for i, t in enumerate(each.tolist()) if t == value and len(rows[i]) > 1]
            with self._tempered(value):
                for i, scored in zip(chosen, self._scored([rows[i] for i in chosen]), strict=True):
                    values[i][1:] = scored
        mask = attention_mask.cpu()
        full = torch.zeros(mask.shape).masked_scatter(mask, torch.cat(values)).to(tokens.device)
        return Scores(full * predicted(attention_mask, keep))

    def update_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Load new weights, named as in the model's checkpoint, and clear the prefix cache.

        If `adapter` is set, the weights are the adapter's, named as in `policies.models.lora`.
        """
        if self.adapter is not None:
            self._take_adapter(dict(named))
        else:
            alone = self.llm.llm_engine.vllm_config.parallel_config.world_size == 1
            weights = iter(named) if alone else list(named)  # an iterator cannot be pickled
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept keys and values of the old weights: is it generating?")

    def _take_adapter(self, named: dict[str, Tensor]) -> None:
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        number = getattr(self.lora, "lora_int_id", 0) + 1  # a new name: vLLM may not reload one
        with TemporaryDirectory(prefix="leash-") as folder:
            write_adapter(named, self.adapter, Path(folder))
            lora = LoRARequest(f"policy-{number}", number, folder)
            self.llm.llm_engine.add_lora(lora)
        self.lora = lora

    def _scored(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the log-probs of every token but the first of each row."""
        self._check_lengths(rows, 1)
        params = self._params(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        done = self._run(rows, [params] * len(rows))
        return [torch.tensor(response.scores, dtype=torch.float32) for response in done]

    def _params(self, **fields: Any) -> Any:
        return _vllm().SamplingParams(flat_logprobs=True, **fields)  # vLLM checks the ranges

    def _run(self, rows: Sequence[Tensor], params: list[Any]) -> list[EngineResponse]:
        """Return vLLM's response for each row."""
        prompts = [{"prompt_token_ids": row.tolist()} for row in rows]
        how = {"use_tqdm": False, "lora_request": self.lora}
        done = self.llm.generate(prompts, params, **how) if prompts else []
        return [_response(d.outputs[0], d.prompt_logprobs) for d in done]

    @contextmanager
    def _tempered(self, temperature: float) -> Iterator[None]:
        """Scale all logits inside the block: vLLM has no temperature for log-probs of a prompt."""
        if temperature == 1:
            yield
            return
        self.llm.apply_model(partial(_scale, factor=1 / temperature))
        try:
            yield
        finally:
            self.llm.apply_model(partial(_scale, factor=temperature))

    def _check_lengths(self, rows: Sequence[Tensor], new: int) -> None:
        """Raise ValueError if a row and `new` further tokens exceed the engine's context."""
        longest = max(map(len, rows), default=0)
        if longest + new > self.limit:
            raise ValueError(f"{longest} + {new} tokens exceed vLLM's max_model_len={self.limit}")


def _response(done: Any, prompt_logprobs: Any) -> EngineResponse:
    log_probs, scores = (getattr(x, "logprobs", ()) for x in (done.logprobs, prompt_logprobs))
    return EngineResponse(done.token_ids, log_probs, done.finish_reason == "stop", scores)


def load_engine(
    model: str | Path, *, source: str = "auto", dtype: str = "float32", **engine: Any
) -> VLLMEngine:
    """Load an engine in this process from a folder, an embedded model or a hub id.

    `engine`: arguments of vllm.LLM; on a CPU nothing is compiled by default.
    """
    LLM, files = _vllm().LLM, find_model(str(model), source=source)
    settings = {
        "logprobs_mode": "processed_logprobs",
        "dtype": dtype,
        "use_tqdm_on_load": False,
        "enforce_eager": not torch.cuda.is_available(),
    }
    if not torch.cuda.is_available():  # a prompt in two parts would reset its generator
        config = AutoConfig.from_pretrained(files.folder).get_text_config()
        most = getattr(config, "max_position_embeddings", PROMPT_TOKENS_PER_BATCH)
        together = max(PROMPT_TOKENS_PER_BATCH, engine.get("max_model_len") or most)
        settings |= {"enable_chunked_prefill": False, "max_num_batched_tokens": together}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")  # errors are raised anyway
    before = os.environ.get(IN_PROCESS)
    states = random.getstate(), np.random.get_state()  # an engine in this process seeds all of them
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []  # this rank's
    os.environ[IN_PROCESS] = "0"
    try:
        with torch.random.fork_rng(gpus):
            loaded = VLLMEngine(LLM(str(files.folder), **{**settings, **engine}))
    finally:
        os.environ.pop(IN_PROCESS)
        os.environ.update({} if before is None else {IN_PROCESS: before})
        random.setstate(states[0])
        np.random.set_state(states[1])
    return loaded


def lora_options(adapter: Any, architectures: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of vllm.LLM that enable an adapter; {} if it is not supported."""
    from vllm.config.lora import MaxLoRARanks  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.models import ModelRegistry  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.models.interfaces import supports_lora  # pyright: ignore[reportMissingImports]

    known = [ModelRegistry.models[name] for name in architectures if name in ModelRegistry.models]
    rank = next((rank for rank in get_args(MaxLoRARanks) if rank >= adapter.r), None)
    if rank is None or not known or not supports_lora(known[0].load_model_cls()):
        return {}
    return {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}


def _scale(model: nn.Module, factor: float) -> None:
    """Multiply the scale of a vLLM model's logits."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor  # pyright: ignore[reportMissingImports]

    processors = [m for m in model.modules() if isinstance(m, LogitsProcessor)]
    if not processors:
        raise ValueError(f"{type(model).__name__} of vLLM scores at temperature 1 only")
    for module in processors:
        module.scale *= factor


def _vllm() -> Any:
    try:
        import vllm  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(f"{EXTRAS['vllm']} ({error})") from error
    return vllm
