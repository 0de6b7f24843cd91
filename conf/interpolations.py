"""What ${...} of a configuration stand for: a few lines of them are more than any memory holds."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import Node
from omegaconf.errors import InterpolationResolutionError
from omegaconf.grammar_visitor import GrammarVisitor

MOST = 1_000  # references; conf/ has some tens
LETTERS = 1_000  # of a text that count as one reference more


@contextmanager
def bounded() -> Iterator[None]:
    """While this lasts, no more than `MOST` references are followed; others are an error."""
    follow, left = GrammarVisitor.visitInterpolation, MOST

    def counted(self: GrammarVisitor, ctx: Any) -> Any:
        nonlocal left
        found = follow(self, ctx)
        text = found._value() if isinstance(found, Node) else found
        left -= 1 + (len(text) // LETTERS if isinstance(text, str) else 0)
        if left < 0:
            what = f"its references (${{name}}) stand for more than {MOST:,} values"
            raise InterpolationResolutionError(f"{what}; write out what is meant")
        return found

    GrammarVisitor.visitInterpolation = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        GrammarVisitor.visitInterpolation = follow  # type: ignore[method-assign]
