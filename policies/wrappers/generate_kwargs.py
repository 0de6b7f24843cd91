"""What a generating policy may be asked for, checked; and replies by transformers' own `generate`.

The sampler follows the names in OWN. Any other field of transformers' GenerationConfig, and the
arguments in OBJECTS, are handed on to the model's own `generate`, which draws from torch's
generator; training refuses those, and what narrows the distribution that is sampled from.
"""

import copy
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from policies.sampler import NO_FILTERS, Filters, Sampled

ALIASES = {
    "max_tokens": "max_new_tokens",
    "n": "num_return_sequences",
    "stop_sequences": "stop",
    "stop_strings": "stop",
}
FILTERS = tuple(asdict(NO_FILTERS))
# Arguments of `generate` that are in no config.
PROCESSORS = ("logits_processor", "prefix_allowed_tokens_fn")
OBJECTS = (*PROCESSORS, "stopping_criteria", "assistant_model")
# What has no log-prob for each token, or ends a reply where no token shows it, but at this value.
UNFOLLOWED = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "stop_strings": None,
    "max_time": None,
    "prompt_lookup_num_tokens": None,
    "stopping_criteria": None,
    "assistant_model": None,
}
# Fields of a config that change no reply, as a saved one has them.
IDLE = ("bos_token_id", "output_scores", "return_dict_in_generate", "use_cache")
IDLE += ("transformers_version",)
# What a config leaves open is this, not what the model's own config says.
NEUTRAL = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
}


# What the sampler follows, and of which type; several are texts or ids.
OWN: dict[str, Any] = {
    "temperature": float,
    "max_new_tokens": int,
    "max_prompt_tokens": int,
    "num_return_sequences": int,
    "do_sample": bool,
    "stop": (list, tuple),
    "eos_token_id": (int, list, tuple, set, frozenset),
    "pad_token_id": int,
    "skip_special_tokens": bool,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "min_new_tokens": int,
    "repetition_penalty": float,
}


@dataclass(frozen=True)
class GenerateKwargs:
    """How to generate: temperature 0 is greedy; lengths in tokens; stop texts end a reply."""

    temperature: float = 1.0
    max_new_tokens: int = 64
    max_prompt_tokens: int | None = None
    stop: tuple[str, ...] = ()
    num_return_sequences: int | None = None
    eos_token_id: tuple[int, ...] | None = None  # instead of the model's and the template's
    pad_token_id: int | None = None
    skip_special_tokens: bool = False  # in the texts
    filters: Filters = NO_FILTERS
    fields: dict[str, Any] = field(default_factory=dict)  # of a config, for `generate`
    objects: dict[str, Any] = field(default_factory=dict)  # further arguments of `generate`

    @classmethod
    def read(cls, kwargs: dict[str, Any], *, log_probs: bool = True) -> "GenerateKwargs":
        """Return the checked arguments; ValueErrors say the names, types and ranges expected.

        A `generation_config` stands for its fields. Without `log_probs`, what has none is allowed.

        >>> GenerateKwargs.read({"do_sample": False, "max_tokens": 5}).temperature
        0.0
        """
        config = kwargs.get("generation_config")
        if config is not None:
            others = {k: v for k, v in kwargs.items() if k != "generation_config"}
            kwargs = {**config.to_diff_dict(), **others}
        wanted = {k: v for k, v in _renamed(kwargs).items() if v is not None}
        more = {k: wanted.pop(k) for k in list(wanted) if k not in OWN}
        fields, objects = _for_generate(more, log_probs=log_probs)
        greedy = wanted.pop("do_sample", True) is False
        if greedy and wanted.get("temperature", 0) != 0:
            raise ValueError(
                "When do_sample=False (greedy decoding), temperature must be 0, got "
                f"{wanted['temperature']}; drop one of them"
            )
        heat, eos = wanted.pop("temperature", 1.0), wanted.pop("eos_token_id", None)
        made = cls(
            temperature=0.0 if greedy else float(heat),
            max_new_tokens=wanted.pop("max_new_tokens", 64),
            stop=tuple(wanted.pop("stop", ())),
            eos_token_id=None if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            filters=Filters(**{k: wanted.pop(k) for k in FILTERS if k in wanted}),
            fields=fields,
            objects=objects,
            **wanted,
        )
        made._check()
        return made

    def _check(self) -> None:
        least, count = self.filters.min_new_tokens, self.num_return_sequences
        for good, wanted, got in (
            (0 <= self.temperature < float("inf"), "temperature >= 0", self.temperature),
            (self.max_new_tokens >= 1, "max_new_tokens >= 1", self.max_new_tokens),
            (count is None or count >= 1, "n >= 1", count),
            (least <= self.max_new_tokens, "min_new_tokens <= max_new_tokens", least),
        ):
            if not good:
                raise ValueError(f"expected {wanted}, got {got}")
        if self.foreign and self.stop:
            raise ValueError(f"expected stop or {self.foreign}, got both; use eos_token_id for it")

    @property
    def num_samples(self) -> int | None:
        """Return how many replies a prompt gets; None is one, without a dimension for it."""
        count = self.num_return_sequences
        return None if count == 1 else count

    def unscored(self) -> list[str]:
        """Return what only changes samples: scores follow the temperature alone."""
        return [*self._filters(), *self.foreign]

    @property
    def foreign(self) -> list[str]:
        """Return what only transformers' own `generate` does."""
        return sorted({*self.fields, *self.objects})

    def _filters(self) -> dict[str, Any]:
        chosen, neutral = asdict(self.filters), asdict(NO_FILTERS)
        return {k: v for k, v in chosen.items() if v != neutral[k]}

    def config(self) -> GenerationConfig:
        """Return what transformers' own generate is asked for."""
        more = self._filters() | self.fields
        if self.temperature == 0:
            return GenerationConfig(do_sample=False, **more)
        return GenerationConfig(do_sample=True, temperature=self.temperature, **more)

    def stop_finder(self, tokenizer: Any) -> Callable[[list[int]], bool] | None:
        """Return what tells whether a reply holds a stop text; None if there are none."""
        if not self.stop:
            return None
        if tokenizer is None:
            raise ValueError(f"expected a tokenizer to find stop={list(self.stop)}, got none")
        return lambda ids: any(text in tokenizer.decode(ids) for text in self.stop)

    def check_positions(self, most: int | None) -> None:
        """Raise where the longest prompt and reply together exceed the model's `most` positions."""
        total = (self.max_prompt_tokens or 1) + self.max_new_tokens
        if most is not None and total > most:
            raise ValueError(
                f"policy.max_prompt_tokens={self.max_prompt_tokens} and policy.max_new_tokens="
                f"{self.max_new_tokens} make up to {total} tokens, the model's "
                f"max_position_embeddings is {most}; lower one of them"
            )

    def check_lengths(
        self, prompts: Tensor, attention: Tensor, tokenizer: Any, most: int | None = None
    ) -> None:
        """Raise where a prompt [B, T] exceeds max_prompt_tokens, or with its reply `most`."""
        limit, room = self.max_prompt_tokens, None if most is None else most - self.max_new_tokens
        least = min((n for n in (limit, room) if n is not None), default=None)
        sizes = attention.sum(-1)  # [B]
        if least is None or not (over := sizes > least).any():
            return
        i = int(over.int().argmax())
        size, end = int(sizes[i]), prompts[i][attention[i]][-40:].tolist()
        bound = f"policy.max_prompt_tokens={limit}"
        if limit is None or size <= limit:
            bound = f"max_position_embeddings={most} - policy.max_new_tokens={self.max_new_tokens}"
        raise ValueError(
            f"prompt {i} of the batch has {size} tokens, expected at most {bound}; change the "
            f"bound or drop the row: {end if tokenizer is None else tokenizer.decode(end)!r}"
        )


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by the names used here; two names of one or a wrong type are refused."""
    out: dict[str, Any] = {}
    for name, value in kwargs.items():
        known = ALIASES.get(name, name)
        if known in out:
            both = sorted(k for k in kwargs if ALIASES.get(k, k) == known)
            raise ValueError(f"expected {' or '.join(both)}, got both; drop one")
        kind = (int, float) if OWN.get(known) is float else OWN.get(known, object)
        wrong = isinstance(value, bool) and kind not in (bool, object)
        if value is not None and (wrong or not isinstance(value, kind)):
            raise ValueError(f"expected {name} of type {OWN[known]}, got {value!r}")
        out[known] = value
    return out


def _for_generate(more: dict[str, Any], *, log_probs: bool) -> tuple[dict, dict]:
    """Return which arguments are fields of a config and which are objects for `generate`."""
    if lengths := [name for name in ("max_length", "min_length") if name in more]:
        raise ValueError(
            f"generate_kwargs has {lengths}: lengths count new tokens here, say max_new_tokens, "
            "min_new_tokens, max_prompt_tokens"
        )
    more = {
        name: value
        for name, value in more.items()
        if name not in IDLE and not (name in UNFOLLOWED and value == UNFOLLOWED[name])
    }
    if log_probs and (silent := [name for name in more if name in UNFOLLOWED]):
        raise ValueError(
            f"generate_kwargs has {silent}, whose replies have no log-probs that could be "
            "followed; say return_log_probs=False with it"
        )
    config = GenerationConfig(do_sample=True)
    objects = config.update(**more)  # transformers checks its own fields
    config.validate()
    for name in objects:
        if name not in OBJECTS:
            offered = [*OWN, *OBJECTS, *ALIASES, *vars(config)]
            near = get_close_matches(name, offered, 1)
            hint = f"did you mean {near[0]}?" if near else "see GenerationConfig of transformers"
            raise ValueError(f"generate_kwargs has an unknown {name!r}; {hint}")
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
    """Return a reply to each prompt [B, T], padded left, as a config of transformers asks for it.

    The log-prob of a token is that of the processed scores it was drawn from. `max_new_tokens` and
    the EOS ids `ends` replace those of the config. What has no such log-probs is a ValueError;
    without `log_probs`, which then read 0, it is not. `objects` are further arguments of
    `generate`.
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
    reply = out.sequences[:, prompts.shape[1] :]  # [B, n]
    values = torch.zeros(reply.shape, device=reply.device)
    if log_probs:
        told = [
            scores.float().log_softmax(-1).gather(-1, token[:, None]).squeeze(-1)
            for scores, token in zip(out.scores, reply.unbind(-1), strict=True)
        ]
        values = torch.stack(told, -1)
    played = until_end(reply, ends)
    complete = torch.isin(reply, _tensor(ends, reply)).any(-1)
    if not log_probs:  # rows that something else than a token has ended are filled up
        filled = (reply == pad_token_id).flip(-1).cumprod(-1).flip(-1).bool()
        played &= ~filled | complete[:, None]
    ids, values = reply.masked_fill(~played, 0), values.masked_fill(~played, 0)
    return Sampled(ids, values, played.sum(-1), complete)


def config_temperature(config: Any) -> float:
    """Return the temperature that a config samples at; greedy and no config count as 1."""
    asked = getattr(config, "temperature", None)
    return 1.0 if asked is None or not config.do_sample else float(asked)


def until_end(reply: Tensor, ends: Collection[int]) -> Tensor:
    """Return which tokens of replies [B, n] count: all up to the first of `ends`, itself included.

    >>> until_end(torch.tensor([[7, 2, 2], [2, 7, 7]]), {2}).int().tolist()
    [[1, 1, 0], [1, 0, 0]]
    """
    stops = torch.isin(reply, _tensor(ends, reply)).long()
    return stops.cumsum(-1) - stops == 0


def _tensor(ids: Collection[int], like: Tensor) -> Tensor:
    return torch.tensor(sorted(ids), dtype=like.dtype, device=like.device)
