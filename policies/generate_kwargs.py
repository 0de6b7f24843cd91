"""What a generating policy may be asked for, checked; an unknown or impossible wish is an error."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

NAMES = ("temperature", "max_new_tokens", "max_prompt_tokens", "do_sample", "stop")


@dataclass(frozen=True)
class GenerateKwargs:
    """How to generate: temperature 0 is greedy; lengths in tokens; stop texts end a reply."""

    temperature: float = 1.0
    max_new_tokens: int = 64
    max_prompt_tokens: int | None = None
    stop: tuple[str, ...] = ()

    @classmethod
    def read(cls, kwargs: dict[str, Any]) -> "GenerateKwargs":
        """Return the checked arguments; raises ValueError with the names and ranges expected.

        >>> GenerateKwargs.read({"do_sample": False}).temperature
        0.0
        """
        unknown = set(kwargs) - set(NAMES)
        if unknown:
            raise ValueError(
                f"generate_kwargs has {sorted(unknown)}, expected names among {sorted(NAMES)}; "
                "top-p, top-k and penalties are not offered because the training log-probs could "
                "not follow them"
            )
        made = cls(
            temperature=0.0
            if kwargs.get("do_sample") is False
            else float(kwargs.get("temperature", 1.0)),
            max_new_tokens=int(kwargs.get("max_new_tokens", 64)),
            max_prompt_tokens=kwargs.get("max_prompt_tokens"),
            stop=tuple(kwargs.get("stop") or ()),
        )
        if not made.temperature >= 0:
            raise ValueError(f"expected temperature >= 0, got {made.temperature}")
        if made.max_new_tokens < 1:
            raise ValueError(f"expected max_new_tokens >= 1, got {made.max_new_tokens}")
        if isinstance(kwargs.get("stop"), str) or not all(made.stop):
            raise ValueError(f"expected stop to be a list of texts, got {kwargs['stop']!r}")
        return made

    def found(self, tokenizer: Any) -> Callable[[list[int]], bool] | None:
        """Return what tells whether a reply holds a stop text; None if there are none."""
        if not self.stop:
            return None
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
            if limit is not None and len(row) > limit:
                raise ValueError(
                    f"prompt {i} of the batch has {len(row)} tokens, policy.max_prompt_tokens is "
                    f"{limit}; raise it, or drop the row: {tokenizer.decode(row[-40:].tolist())!r}"
                )
            if most is not None and len(row) + new > most:
                raise ValueError(
                    f"prompt {i} of the batch has {len(row)} tokens, with policy.max_new_tokens="
                    f"{new} more than the model's max_position_embeddings={most}; lower "
                    "policy.max_new_tokens, or drop the row (policy.max_prompt_tokens is the bound "
                    f"for it): {tokenizer.decode(row[-40:].tolist())!r}"
                )
