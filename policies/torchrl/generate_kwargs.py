"""Check the arguments of generation, and generate by transformers' `generate`.

The sampler implements the names in SAMPLER. Other fields of transformers' GenerationConfig and the
arguments in OBJECTS go to the model's `generate`, which samples with torch's generator. Training
refuses these options, and every option that narrows the sampling distribution.
"""

import copy
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from policies.limits import Limits
from policies.sampler import NO_FILTERS, Filters, Sampled

ALIASES = {
    "max_tokens": "max_new_tokens",
    "n": "num_return_sequences",
    "stop_sequences": "stop",
    "stop_strings": "stop",
}
FILTERS = tuple(asdict(NO_FILTERS))
SAMPLER = (*FILTERS, "temperature", "do_sample", "max_new_tokens", "max_prompt_tokens", "stop")
SAMPLER += ("max_rows",)
SAMPLER += ("num_return_sequences", "eos_token_id", "pad_token_id", "skip_special_tokens")
# Arguments of `generate` that are in no config.
PROCESSORS = ("logits_processor", "prefix_allowed_tokens_fn")
OBJECTS = (*PROCESSORS, "stopping_criteria", "assistant_model")
# option -> the only value at which each token has a log-prob and the response a visible end.
UNFOLLOWED = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "stop_strings": None,
    "max_time": None,
    "prompt_lookup_num_tokens": None,
    "stopping_criteria": None,
    "assistant_model": None,
}
# Fields of saved configs that change no response.
IDLE = ("bos_token_id", "output_scores", "return_dict_in_generate", "use_cache")
IDLE += ("transformers_version",)
# Defaults for fields that a config leaves open, in place of the model's own config.
NEUTRAL = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
}


@dataclass(frozen=True)
class GenerateKwargs(Limits):
    """The limits of a run, several samples of a prompt, and options of transformers' `generate`."""

    num_return_sequences: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)  # fields of a config for `generate`
    objects: dict[str, Any] = field(default_factory=dict)  # further arguments of `generate`

    @classmethod
    def read(cls, kwargs: dict[str, Any], *, log_probs: bool = True) -> "GenerateKwargs":
        """Return the checked arguments; a `generation_config` is replaced by its fields.

        `log_probs=False` allows options without log-probs.

        >>> GenerateKwargs.read({"do_sample": False, "max_tokens": 5}).temperature
        0.0
        """
        config = kwargs.get("generation_config")
        merged = {**(config.to_diff_dict() if config else {}), **kwargs, "generation_config": None}
        more = {ALIASES.get(k, k): v for k, v in merged.items() if v is not None}
        known = {k: more.pop(k) for k in SAMPLER if k in more}
        fields, objects = _for_generate(more, log_probs=log_probs)
        greedy = known.pop("do_sample", True) is False
        heat = known.pop("temperature", 0.0 if greedy else 1.0)
        if greedy and heat != 0:
            raise ValueError(f"temperature must be 0 with do_sample=False, got {heat}; drop one")
        stop, eos = known.pop("stop", ()), known.pop("eos_token_id", None)
        return cls(
            temperature=float(heat),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            eos_token_id=None if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            filters=Filters(**{k: known.pop(k) for k in FILTERS if k in known}),
            fields=fields,
            objects=objects,
            **known,
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        count = self.num_return_sequences
        if count is not None and count < 1:
            raise ValueError(f"expected n >= 1, got {count}")
        if self.hf_only and self.stop:
            raise ValueError(f"expected stop or {self.hf_only}, got both; use eos_token_id for it")

    @property
    def num_samples(self) -> int | None:
        """Return the number of responses per prompt; None is one, without a dimension for it."""
        count = self.num_return_sequences
        return None if count == 1 else count

    def unscored(self) -> list[str]:
        """Return the options that change samples but not scores, which have only a temperature."""
        return [*super().unscored(), *self.hf_only]

    @property
    def hf_only(self) -> list[str]:
        """Return the options that only transformers' `generate` supports."""
        return sorted({*self.fields, *self.objects})

    def config(self) -> GenerationConfig:
        """Return the config for transformers' `generate`."""
        more = self.narrowing() | self.fields
        if self.temperature == 0:
            return GenerationConfig(do_sample=False, **more)
        return GenerationConfig(do_sample=True, temperature=self.temperature, **more)


def _for_generate(more: dict[str, Any], *, log_probs: bool) -> tuple[dict, dict]:
    """Split arguments into fields of a config and objects for `generate`."""
    if lengths := [name for name in ("max_length", "min_length") if name in more]:
        raise ValueError(f"expected max_new_tokens or min_new_tokens in place of {lengths}")
    more = {
        name: value
        for name, value in more.items()
        if name not in IDLE and not (name in UNFOLLOWED and value == UNFOLLOWED[name])
    }
    if log_probs and (silent := [name for name in more if name in UNFOLLOWED]):
        raise ValueError(f"{silent} have no log-probs; say return_log_probs=False with them")
    config = GenerationConfig(do_sample=True)
    objects = config.update(**more)  # transformers checks its own fields
    if unknown := [name for name in objects if name not in OBJECTS]:
        near = get_close_matches(unknown[0], [*SAMPLER, *OBJECTS, *ALIASES, *vars(config)], 1)
        raise ValueError(f"generate_kwargs has an unknown {unknown[0]!r}; did you mean {near}?")
    return {name: value for name, value in more.items() if name not in objects}, objects


def follow(
    model: nn.Module,
    prompts: Tensor,
    attention: Tensor,
    config: Any,
    *,
    max_new_tokens: int,
    ends: Collection[int],
    pad_token_id: int,
    log_probs: bool = True,
    **objects: Any,
) -> Sampled:
    """Generate a response to each prompt [B, T], padded left, by transformers and its config.

    Log-probs come from the processed scores that a token was sampled from. `max_new_tokens` and
    the EOS ids `ends` replace the config's values. Raise ValueError for options without such
    log-probs unless `log_probs=False`. `objects` are more arguments of `generate`.
    """
    for name, only in UNFOLLOWED.items() if log_probs else ():
        value = getattr(config, name, None)
        if value is not None and value != only:
            raise ValueError(f"expected a generation_config without {name}, got {value!r}")
    config = copy.deepcopy(config)
    for name, value in NEUTRAL.items():
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    config.max_new_tokens, config.max_length = max_new_tokens, None
    config.eos_token_id, config.pad_token_id = sorted(ends) or None, pad_token_id
    config.return_dict_in_generate = config.output_scores = True
    out = model.generate(prompts, attention_mask=attention, generation_config=config, **objects)
    response = out.sequences[:, prompts.shape[1] :]  # [B, n]
    values = torch.zeros(response.shape, device=response.device)
    if log_probs:
        columns = [
            scores.float().log_softmax(-1).gather(-1, token[:, None]).squeeze(-1)
            for scores, token in zip(out.scores, response.unbind(-1), strict=True)
        ]
        values = torch.stack(columns, -1)
    played = until_end(response, ends)
    complete = torch.isin(response, response.new_tensor(sorted(ends))).any(-1)
    if not log_probs:  # rows that ended without an EOS token are padded
        filled = (response == pad_token_id).flip(-1).cumprod(-1).flip(-1).bool()
        played &= ~filled | complete[:, None]
    ids, values = response.masked_fill(~played, 0), values.masked_fill(~played, 0)
    return Sampled(ids, values, played.sum(-1), complete)


def config_temperature(config: Any) -> float:
    """Return the sampling temperature of a config; 1 for greedy or no config."""
    temperature = getattr(config, "temperature", None)
    return 1.0 if temperature is None or not config.do_sample else float(temperature)


def until_end(response: Tensor, ends: Collection[int]) -> Tensor:
    """Return the mask of response tokens [B, n] up to and including the first of `ends`.

    >>> until_end(torch.tensor([[7, 2, 2], [2, 7, 7]]), {2}).int().tolist()
    [[1, 1, 0], [1, 0, 0]]
    """
    stops = torch.isin(response, response.new_tensor(sorted(ends))).long()
    return stops.cumsum(-1) - stops == 0
