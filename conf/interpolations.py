"""What ${...} of a configuration stand for: secrets of the environment, or more than memory holds.

A file of conf/ or of a run folder may be anybody's, and what it looks up may end at a server.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from omegaconf import Node, OmegaConf
from omegaconf.errors import InterpolationResolutionError
from omegaconf.grammar_visitor import GrammarVisitor
from omegaconf.resolvers.oc import env

from trainer.runs.redact import secrets_of

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


class _Environment:
    """The resolver oc.env: it knows what was looked up, and which secrets may be."""

    def __init__(self) -> None:
        self.named: set[str] | None = None  # on the command line; None: whatever is asked for
        self.seen: set[str] = set()

    def __call__(self, name: str, *default: Any) -> Any:
        if self.named is not None and name not in self.named and secrets_of({name: "a value"}):
            what = f"a file looks up ${name}, which is a secret"
            raise ValueError(f"{what}; leave it out there, and give it on the command line")
        self.seen.add(name)
        return env(name, *default)


_environment = _Environment()
OmegaConf.register_new_resolver("oc.env", _environment, replace=True)


@contextmanager
def secrets_named_in(words: Sequence[str]) -> Iterator[None]:
    """While this lasts, a secret of the environment is looked up only if a word names it.

    However a file writes it: quoted, or by way of another key. With allow_targets=true, which lets
    it run any code, all are.
    """
    before = _environment.named
    allowed = any(word.lstrip("+") == "allow_targets=true" for word in words)
    named = (re.findall(r"oc\.env:\s*[\"']?(\w+)", word) for word in words)
    _environment.named = None if allowed else {name for found in named for name in found}
    try:
        yield
    finally:
        _environment.named = before


@contextmanager
def looked_up() -> Iterator[set[str]]:
    """While this lasts, fill a set with the names of the variables that are looked up."""
    before, _environment.seen = _environment.seen, set()
    try:
        yield _environment.seen
    finally:
        _environment.seen = before | _environment.seen
