"""vLLM behind the borders of the sampler and the scorer: ids in, ids and log-probs out.

A `VLLMEngine` stands where TransformersWrapper has its Scorer. Prompts and sequences cross as token
ids; text only ends a reply (stop texts). This is the file that imports vllm; weights reach this
engine by reference. One in another process or on another host: vllm_server.py.
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

from policies.lora import write_adapter
from policies.models import find_model
from policies.optional_packages import EXTRAS
from policies.padding import predicted, unpad
from policies.sampler import Sampled
from policies.scorer import Scores

IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"  # vLLM's switch; 0 = no process of its own
TOGETHER = 2**16  # tokens of prompts that a CPU computes at a time, of a longer one all


@dataclass(frozen=True)
class Reply:
    """What vLLM returns for a row: ids and log-probs sampled, or the log-probs of the row."""

    ids: Sequence[int]
    log_probs: Sequence[float]
    ended: bool
    scores: Sequence[float]  # of every token but the first, if they were asked for


class VLLMEngine(nn.Module):
    """Sample and score with a `vllm.LLM`.

    Log-probs are those of the distribution sampled from, so the engine's `logprobs_mode` must be
    "processed_logprobs" unless that is the model's own: temperature 1, nothing cut off.
    """

    folder: str
    dtype: torch.dtype
    limit: int  # tokens of a context
    mode: str  # which log-probs it returns
    config: Any
    generation_config: Any
    adapter: Any = None  # peft's config of a LoRA, of which alone new weights then are
    lora: Any = None  # the adapter that vLLM has, by its own name for it

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
        """Keep what is known of the engine's model as attributes."""
        for name, value in facts.items():
            setattr(self, name, value)
        self.about = f"{about}, {str(self.dtype).removeprefix('torch.')}"
        self.device = torch.device("cpu")  # of the ids that go in and come out
        self.tolerance: float | None = None  # of a probe, nats; None = by dtype

    def params(self, *, temperature: float, **more: Any) -> partial[Any]:
        """Return what makes vLLM's sampling parameters of a seed; `more` are other fields of it."""
        if 0 < temperature < 0.01:  # vLLM would raise it to that
            raise ValueError(f"expected temperature 0, or 0.01 to 2 with vLLM, got {temperature}")
        plain = {"max_tokens", "stop", "stop_token_ids"}
        if self.mode == "raw_logprobs" and (temperature not in (0, 1) or set(more) - plain):
            raise ValueError("expected vllm.LLM(..., logprobs_mode='processed_logprobs')")
        make = partial(
            self._asked,
            temperature=temperature,
            logprobs=0,  # of the sampled token alone
            ignore_eos=True,  # stop_token_ids say it all
            detokenize=bool(more.get("stop")),
            skip_special_tokens=False,  # a stop text may hold some
            **more,
        )
        make(seed=0)
        return make

    def sample(
        self, prompts: Sequence[Tensor], *, streams: Tensor, params: partial[Any]
    ) -> Sampled:
        """Sample one reply per prompt (1-D ids) on the CPU; a row's stream gives its seed."""
        # 62 bits: vLLM reads -1 as "no seed".
        made = [params(seed=stream & (2**62 - 1)) for stream in streams.tolist()]
        self._check_lengths(prompts, params.keywords["max_tokens"])
        replies = self._run(prompts, made)
        return Sampled.of_rows(
            [torch.tensor(r.ids, dtype=torch.int64) for r in replies],
            [torch.tensor(r.log_probs, dtype=torch.float32) for r in replies],
            torch.tensor([r.ended for r in replies], dtype=torch.bool),
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
        """Take new weights, named as in the model's checkpoint; forget what the old ones cached.

        With `adapter` they are those of the adapter, named as in `policies.lora`.
        """
        if self.adapter is not None:
            self._take_adapter(dict(named))
        else:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(named)})
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept keys and values of the old weights: is it generating?")

    def _take_adapter(self, named: dict[str, Tensor]) -> None:
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        number = getattr(self.lora, "lora_int_id", 0) + 1  # a new name: it may change none in place
        with TemporaryDirectory(prefix="leash-") as folder:
            write_adapter(named, self.adapter, Path(folder))
            lora = LoRARequest(f"policy-{number}", number, folder)
            self.llm.llm_engine.add_lora(lora)
        self.lora = lora

    def _scored(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the log-probs of every token but the first of each row."""
        self._check_lengths(rows, 1)
        params = self._asked(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        done = self._run(rows, [params] * len(rows))
        return [torch.tensor(reply.scores, dtype=torch.float32) for reply in done]

    # What vLLM is asked, and how.

    def _asked(self, **fields: Any) -> Any:
        return _vllm().SamplingParams(flat_logprobs=True, **fields)  # it checks the ranges

    def _run(self, rows: Sequence[Tensor], params: list[Any]) -> list[Reply]:
        """Return what vLLM makes of each row."""
        prompts = [{"prompt_token_ids": row.tolist()} for row in rows]
        how = {"use_tqdm": False, "lora_request": self.lora}
        done = self.llm.generate(prompts, params, **how) if prompts else []
        return [_reply(d.outputs[0], d.prompt_logprobs) for d in done]

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
            raise ValueError(f"{longest} + {new} tokens exceed vLLM's max_model_len={self.limit}")


def _reply(done: Any, prompt_logprobs: Any) -> Reply:
    log_probs, scores = (getattr(x, "logprobs", ()) for x in (done.logprobs, prompt_logprobs))
    return Reply(done.token_ids, log_probs, done.finish_reason == "stop", scores)


def load_engine(
    model: str | Path, *, source: str = "auto", dtype: str = "float32", **engine: Any
) -> VLLMEngine:
    """Return an engine in this process on a folder, an embedded model or a hub id.

    `engine` are arguments of vllm.LLM; on a CPU nothing is compiled unless they say so.
    """
    LLM, found = _vllm().LLM, find_model(str(model), source=source)
    settings = {
        "logprobs_mode": "processed_logprobs",
        "dtype": dtype,
        "use_tqdm_on_load": False,
        "enforce_eager": not torch.cuda.is_available(),
    }
    if not torch.cuda.is_available():  # a prompt in two parts would set back its generator
        config = AutoConfig.from_pretrained(found.folder).get_text_config()
        most = getattr(config, "max_position_embeddings", TOGETHER)
        together = max(TOGETHER, engine.get("max_model_len") or most)
        settings |= {"enable_chunked_prefill": False, "max_num_batched_tokens": together}
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


def lora_options(adapter: Any, architectures: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of vllm.LLM with which it takes an adapter; none if it cannot."""
    from vllm.config.lora import MaxLoRARanks  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.models import ModelRegistry  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.models.interfaces import supports_lora  # pyright: ignore[reportMissingImports]

    known = [ModelRegistry.models[name] for name in architectures if name in ModelRegistry.models]
    rank = next((rank for rank in get_args(MaxLoRARanks) if rank >= adapter.r), None)
    if rank is None or not known or not supports_lora(known[0].load_model_cls()):
        return {}
    return {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}


def _scale(model: nn.Module, factor: float) -> None:
    """Multiply the scale that a vLLM model's logits get."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor  # pyright: ignore[reportMissingImports]

    found = [m for m in model.modules() if isinstance(m, LogitsProcessor)]
    if not found:
        raise ValueError(f"{type(model).__name__} of vLLM scores at temperature 1 only")
    for module in found:
        module.scale *= factor


def _vllm() -> Any:
    try:
        import vllm  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(f"{EXTRAS['vllm']} ({error})") from error
    return vllm
