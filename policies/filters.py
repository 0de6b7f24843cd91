"""What narrows the distribution a token is drawn from, in the order of transformers.

Penalty, minimum length, (temperature,) top-k, top-p, min-p. Logits and masks are [n, V].
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Filters:
    """Which filters to use; the defaults change nothing."""

    top_k: int = 0  # the k likeliest tokens; 0 = all
    top_p: float = 1.0  # the likeliest tokens that hold this probability together
    min_p: float = 0.0  # tokens at least this probable, relative to the likeliest
    min_new_tokens: int = 0  # no token that ends the reply before
    repetition_penalty: float = 1.0  # logits of tokens seen in prompt or reply, divided by it

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range."""
        for name, good, wanted in (
            ("top_k", self.top_k >= 0, ">= 0 (0 = off)"),
            ("top_p", 0 <= self.top_p <= 1, "between 0 and 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("min_new_tokens", self.min_new_tokens >= 0, ">= 0"),
            ("repetition_penalty", self.repetition_penalty > 0, "> 0"),
        ):
            if not good:
                raise ValueError(f"expected {name} {wanted}, got {getattr(self, name)}")

    @property
    def cuts(self) -> bool:
        """Return whether `cut` leaves anything out."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)

    def process(self, logits: Tensor, *, seen: Tensor | None, step: int, ends: Tensor) -> Tensor:
        """Return logits with the penalty on `seen` tokens and, early on, without the `ends`."""
        if seen is not None:
            weaker = torch.where(
                logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty
            )
            logits = torch.where(seen, weaker, logits)
        if step < self.min_new_tokens:
            logits = logits.index_fill(-1, ends, -torch.inf)
        return logits

    def cut(self, logits: Tensor) -> Tensor:
        """Return tempered logits [..., V] with -inf at what top-k, top-p and min-p leave out.

        >>> Filters(top_p=0.7).cut(torch.tensor([[2.0, 1.0, 0.0]])).tolist()
        [[2.0, 1.0, -inf]]
        """
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p < 1:
            ranked, order = logits.sort(descending=True)
            probs = ranked.softmax(-1)
            over = probs.cumsum(-1) - probs >= self.top_p  # enough is kept without this one
            over[..., 0] = False
            logits = logits.masked_fill(over.scatter(-1, order, over), -torch.inf)
        if self.min_p > 0:
            probs = logits.softmax(-1)
            least = self.min_p * probs.amax(-1, keepdim=True)
            logits = logits.masked_fill(probs < least, -torch.inf)
        return logits


NO_FILTERS = Filters()
