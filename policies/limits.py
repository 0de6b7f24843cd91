"""The limits of generation: lengths in tokens, temperature, filters, and what ends a response."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from policies.sampler import NO_FILTERS, Filters
from policies.scorer import POSITIONS


@dataclass(frozen=True)
class Limits:
    """Generation options: temperature 0 is greedy; lengths in tokens; stop texts end a response."""

    temperature: float = 1.0
    max_new_tokens: int = 64
    max_prompt_tokens: int | None = None
    max_rows: int | None = None  # rows sampled at a time
    stop: tuple[str, ...] = ()
    eos_token_id: tuple[int, ...] | None = None  # replaces the ids of model and template
    pad_token_id: int | None = None
    skip_special_tokens: bool = False  # leave them out of the texts
    filters: Filters = NO_FILTERS

    def __post_init__(self) -> None:
        least = self.filters.min_new_tokens
        for good, wanted, got in (
            (0 <= self.temperature < float("inf"), "temperature >= 0", self.temperature),
            (self.max_new_tokens >= 1, "max_new_tokens >= 1", self.max_new_tokens),
            (least <= self.max_new_tokens, "min_new_tokens <= max_new_tokens", least),
        ):
            if not good:
                raise ValueError(f"expected {wanted}, got {got}")

    def narrowing(self) -> dict[str, Any]:
        """Return the filters in use, by name."""
        chosen, neutral = asdict(self.filters), asdict(NO_FILTERS)
        return {k: v for k, v in chosen.items() if v != neutral[k]}

    def unscored(self) -> list[str]:
        """Return the options that change samples but not scores, which have only a temperature."""
        return [*self.narrowing()]

    def stop_finder(self, tokenizer: Any) -> Callable[[list[int]], bool] | None:
        """Return a function that says whether ids contain a stop text; None without stop texts."""
        if not self.stop:
            return None
        return lambda ids: any(text in tokenizer.decode(ids) for text in self.stop)

    def check_positions(self, most: int | None) -> None:
        """Raise ValueError if the longest prompt and response exceed the `most` positions."""
        total = (self.max_prompt_tokens or 1) + self.max_new_tokens
        if most is not None and total > most:
            raise ValueError(
                f"policy.max_prompt_tokens={self.max_prompt_tokens} + policy.max_new_tokens="
                f"{self.max_new_tokens} exceed the {most} positions of the model ({POSITIONS})"
            )

    def room(self, most: int | None) -> float:
        """Return the largest number of tokens of a prompt; `most`: the model's positions."""
        positions = torch.inf if most is None else most - self.max_new_tokens
        return min(self.max_prompt_tokens or torch.inf, positions)

    def check_lengths(self, attention: Tensor, most: int | None) -> None:
        """Raise ValueError if a prompt exceeds max_prompt_tokens, or with a response `most`.

        attention [B, T] is the mask of the prompts.
        """
        sizes = attention.sum(-1)  # [B]
        bounds = {"policy.max_prompt_tokens": self.max_prompt_tokens}
        if most is not None:
            name = f"positions of the model ({POSITIONS}) - policy.max_new_tokens"
            bounds[name] = most - self.max_new_tokens
        for name, bound in bounds.items():
            if bound is not None and (over := sizes > bound).any():
                i = int(over.int().argmax())
                raise ValueError(
                    f"prompt {i} has {sizes[i]} tokens, expected at most {name}={bound}"
                )
