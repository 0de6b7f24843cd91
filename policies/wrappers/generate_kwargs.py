"""What a generating policy may be asked for: names, types and ranges, checked.

Names are those of transformers' GenerationConfig, with the common other names of some. Those that
the sampler does not follow itself are in more_kwargs.py: handed on to transformers' own `generate`,
without an effect, or refused.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from policies.filters import NO_FILTERS, Filters

if TYPE_CHECKING:
    from transformers import GenerationConfig

ALIASES = {
    "max_tokens": "max_new_tokens",
    "n": "num_return_sequences",
    "stop_sequences": "stop",
    "stop_strings": "stop",
}
FILTERS = tuple(asdict(NO_FILTERS))
CUTS = ("top_k", "top_p", "min_p")  # of them, those that scores are under as well


def is_int(value: Any) -> bool:
    """Return whether a value is a whole number, True and False not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_id(value: Any) -> bool:
    """Return whether a value may be a token id."""
    return is_int(value) and value >= 0


def is_list(value: Any, of: Callable[[Any], bool]) -> bool:
    """Return whether a value is a collection of what `of` says."""
    return isinstance(value, list | tuple | set | frozenset) and all(map(of, value))


WHOLE, NUMBER = ("an integer", is_int), ("a number", lambda v: is_int(v) or isinstance(v, float))
FLAG = ("True or False", lambda v: isinstance(v, bool))
IDS = ("a token id or a list of them", lambda v: is_id(v) or is_list(v, is_id))
# What the sampler follows: by name, what is expected and whether a value is that.
OWN: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": NUMBER,
    "max_new_tokens": WHOLE,
    "max_prompt_tokens": WHOLE,
    "num_return_sequences": WHOLE,
    "do_sample": FLAG,
    "stop": ("a list of texts", lambda v: is_list(v, lambda t: isinstance(t, str) and t)),
    "eos_token_id": IDS,
    "pad_token_id": ("a token id", is_id),
    "skip_special_tokens": FLAG,
    "top_k": WHOLE,
    "top_p": NUMBER,
    "min_p": NUMBER,
    "min_new_tokens": WHOLE,
    "repetition_penalty": NUMBER,
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
    handed_on: dict[str, Any] = field(default_factory=dict)
    computes: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)  # of no config: logits_processor, ...

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
        asked = {k: v for k, v in _renamed(kwargs).items() if v is not None}
        more: dict[str, Any] = {}
        if not asked.keys() <= OWN.keys():
            from policies.wrappers import more_kwargs

            rare = {k: asked.pop(k) for k in list(asked) if k not in OWN}
            more = more_kwargs.sort(rare, log_probs=log_probs)
        greedy = asked.pop("do_sample", True) is False
        if greedy and asked.get("temperature", 0) != 0:
            raise ValueError(
                "When do_sample=False (greedy decoding), temperature must be 0, got "
                f"{asked['temperature']}; drop one of them"
            )
        heat, eos = asked.pop("temperature", 1.0), asked.pop("eos_token_id", None)
        made = cls(
            temperature=0.0 if greedy else float(heat),
            max_new_tokens=asked.pop("max_new_tokens", 64),
            stop=tuple(asked.pop("stop", ())),
            eos_token_id=None if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            filters=Filters(**{k: asked.pop(k) for k in FILTERS if k in asked}),
            **asked,
            **more,
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
            raise ValueError(
                f"expected stop or {self.foreign}, got both: with these, only tokens "
                "(eos_token_id) can end a reply"
            )
        if self.handed_on:
            self.config()  # transformers' own checks, before anything is loaded or generated

    @property
    def num_samples(self) -> int | None:
        """Return how many replies a prompt gets; None is one, without a dimension for it."""
        count = self.num_return_sequences
        return None if count == 1 else count

    def unscored(self, scored: tuple[str, ...] = CUTS) -> list[str]:
        """Return what only changes samples: all but the temperature and what is `scored`."""
        return [name for name in (*self._filters(), *self.foreign) if name not in scored]

    @property
    def foreign(self) -> list[str]:
        """Return what only transformers' own `generate` does."""
        return sorted({*self.handed_on, *self.objects})

    @property
    def cuts(self) -> bool:
        """Return whether `cut` leaves anything out; greedy log-probs are the whole model's."""
        return self.temperature > 0 and self.filters.cuts

    def cut(self, logits: Tensor) -> Tensor:
        """Return tempered logits [..., V] with -inf at what is never sampled of them."""
        return self.filters.cut(logits) if self.cuts else logits

    def _filters(self) -> dict[str, Any]:
        chosen, neutral = asdict(self.filters), asdict(NO_FILTERS)
        return {k: v for k, v in chosen.items() if v != neutral[k]}

    def config(self) -> "GenerationConfig":
        """Return what transformers' own generate is asked for."""
        from transformers import GenerationConfig

        more = self._filters() | self.handed_on | self.computes
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
        end = end if tokenizer is None else tokenizer.decode(end)
        if limit is not None and size > limit:
            raise ValueError(
                f"prompt {i} of the batch has {size} tokens, policy.max_prompt_tokens is {limit}; "
                f"raise it, or drop the row: {end!r}"
            )
        raise ValueError(
            f"prompt {i} of the batch has {size} tokens, with policy.max_new_tokens="
            f"{self.max_new_tokens} more than the model's max_position_embeddings={most}; lower "
            "policy.max_new_tokens, or drop the row (policy.max_prompt_tokens is the bound for "
            f"it): {end!r}"
        )


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by the names used here; two names of one or a wrong type are refused."""
    out: dict[str, Any] = {}
    for name, value in kwargs.items():
        known = ALIASES.get(name, name)
        if known in out:
            both = sorted(k for k in kwargs if ALIASES.get(k, k) == known)
            raise ValueError(f"expected {' or '.join(both)}, got both; drop one")
        if known in OWN:
            check_type(name, value, OWN[known])
        out[known] = value
    return out


def check_type(name: str, value: Any, kind: tuple[str, Callable[[Any], bool]]) -> None:
    """Raise ValueError where a value is not of a kind; None is of each."""
    expected, good = kind
    if value is not None and not good(value):
        raise ValueError(f"expected {name} to be {expected}, got {value!r}")
