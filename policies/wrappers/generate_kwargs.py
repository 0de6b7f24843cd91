"""What a generating policy may be asked for, checked; an unknown or impossible wish is an error.

Names are those of transformers' GenerationConfig, with the common other names of some. The sampler
fulfils most wishes; those that only transformers' own `generate` can are handed on to it. The names
and what is refused: policies/wrappers/wishes.py.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from policies.filters import NO_FILTERS, Filters
from policies.wrappers.wishes import COMPUTES, FILTERS, HANDED_ON, OWN, refuse, renamed


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

    @classmethod
    def read(cls, kwargs: dict[str, Any]) -> "GenerateKwargs":
        """Return the checked arguments; ValueErrors say the names, types and ranges expected.

        >>> GenerateKwargs.read({"do_sample": False, "max_tokens": 5}).temperature
        0.0
        """
        asked = {k: v for k, v in renamed(kwargs).items() if v is not None}
        greedy = asked.pop("do_sample", True) is False
        if greedy and asked.get("temperature", 0) != 0:
            raise ValueError(
                "When do_sample=False (greedy decoding), temperature must be 0, got "
                f"{asked['temperature']}; drop one of them"
            )
        eos = asked.pop("eos_token_id", None)
        made = cls(
            temperature=0.0 if greedy else float(asked.pop("temperature", 1.0)),
            max_new_tokens=asked.pop("max_new_tokens", 64),
            stop=tuple(asked.pop("stop", ())),
            eos_token_id=None if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            filters=Filters(**{k: asked.pop(k) for k in FILTERS if k in asked}),
            **{k: asked.pop(k) for k in OWN if k in asked},
            handed_on={k: asked.pop(k) for k in HANDED_ON if k in asked},
            computes={k: asked.pop(k) for k in COMPUTES if k in asked},
        )
        refuse(asked)
        made._check()
        return made

    def _check(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"expected temperature >= 0, got {self.temperature}")
        if self.max_new_tokens < 1:
            raise ValueError(f"expected max_new_tokens >= 1, got {self.max_new_tokens}")
        if self.num_return_sequences is not None and self.num_return_sequences < 1:
            raise ValueError(f"expected n >= 1, got {self.num_return_sequences}")
        if self.filters.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"expected min_new_tokens <= max_new_tokens, got {self.filters.min_new_tokens} and "
                f"{self.max_new_tokens}"
            )
        if self.handed_on and self.stop:
            raise ValueError(
                f"expected stop or {sorted(self.handed_on)}, got both: with these, only tokens "
                "(eos_token_id) can end a reply"
            )
        if self.handed_on:
            self.config()  # transformers' own checks, before anything is loaded or generated

    @property
    def num_samples(self) -> int | None:
        """Return how many replies a prompt gets; None is one, without a dimension for it."""
        count = self.num_return_sequences
        return None if count == 1 else count

    @property
    def narrowed(self) -> list[str]:
        """Return what makes the log-probs others than those of the model at the temperature."""
        return [*self._filters(), *self.handed_on]

    def _filters(self) -> dict[str, Any]:
        chosen, neutral = asdict(self.filters), asdict(NO_FILTERS)
        return {k: v for k, v in chosen.items() if v != neutral[k]}

    def config(self) -> GenerationConfig:
        """Return the wishes for transformers' own generate."""
        wishes = self._filters() | self.handed_on | self.computes
        if self.temperature == 0:
            return GenerationConfig(do_sample=False, **wishes)
        return GenerationConfig(do_sample=True, temperature=self.temperature, **wishes)

    def found(self, tokenizer: Any) -> Callable[[list[int]], bool] | None:
        """Return what tells whether a reply holds a stop text; None if there are none."""
        if not self.stop:
            return None
        if tokenizer is None:
            raise ValueError(f"expected a tokenizer to find stop={list(self.stop)}, got none")
        return lambda ids: any(text in tokenizer.decode(ids) for text in self.stop)

    def check_positions(self, most: int | None) -> None:
        """Raise where the longest prompt and reply together exceed the model's `most` positions."""
        asked = f"policy.max_new_tokens={self.max_new_tokens}"
        if self.max_prompt_tokens is not None:
            asked = f"policy.max_prompt_tokens={self.max_prompt_tokens} and {asked}"
        total = (self.max_prompt_tokens or 1) + self.max_new_tokens
        if most is not None and total > most:
            raise ValueError(
                f"{asked} make up to {total} tokens, the model's max_position_embeddings is "
                f"{most}; lower policy.max_prompt_tokens or policy.max_new_tokens"
            )

    def check_lengths(self, prompts: list[Tensor], tokenizer: Any, most: int | None = None) -> None:
        """Raise where a prompt exceeds max_prompt_tokens, or with its reply `most` positions."""
        limit, new = self.max_prompt_tokens, self.max_new_tokens
        for i, row in enumerate(prompts):
            over = limit is not None and len(row) > limit
            if not over and (most is None or len(row) + new <= most):
                continue
            end = row[-40:].tolist() if tokenizer is None else tokenizer.decode(row[-40:].tolist())
            if over:
                raise ValueError(
                    f"prompt {i} of the batch has {len(row)} tokens, policy.max_prompt_tokens is "
                    f"{limit}; raise it, or drop the row: {end!r}"
                )
            raise ValueError(
                f"prompt {i} of the batch has {len(row)} tokens, with policy.max_new_tokens={new} "
                f"more than the model's max_position_embeddings={most}; lower "
                "policy.max_new_tokens, or drop the row (policy.max_prompt_tokens is the bound "
                f"for it): {end!r}"
            )
