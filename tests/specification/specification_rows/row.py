"""Rows of the specification: statements of its pages, with the code that tries each.

A group is a generator: it yields a statement, then tries it on the real class, then yields the
next. What differs from its page is in differs.py: there is how far it works, and who says so.
"""

import ast
import importlib.util
import inspect
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]
Group = Callable[[], Iterator[str]]
# What a group may need that not every machine has, and how it is told.
NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "ray": (lambda: importlib.util.find_spec("ray") is not None, "needs Ray (make test-ray)"),
    "vllm": (lambda: importlib.util.find_spec("vllm") is not None, "needs vLLM (make test-vllm)"),
    "gpu": (torch.cuda.is_available, "needs a CUDA device"),
    "runs": (lambda: True, ""),
}


@dataclass(frozen=True)
class Row:
    """A statement of a page and the group that tries it; `needs` is a key of NEEDS."""

    page: str
    number: int
    name: str
    group: Group
    needs: str = ""

    @property
    def id(self) -> str:
        return f"{self.page}.{self.number:02d}"

    @property
    def where(self) -> str:
        return f"{Path(inspect.getfile(self.group)).name}::{self.group.__name__}"

    @property
    def lacks(self) -> str:
        """Say what this machine has not; "" if the row can be tried."""
        there, told = NEEDS.get(self.needs, (lambda: True, ""))
        return "" if there() else told

    def run(self) -> None:
        """Raise what trying the row raised."""
        error = outcomes(self.group)[self.name]
        if error is not None:
            raise error


class Page:
    """The rows of a page, in the order in which they are written."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.found: list[Row] = []

    def rows(self, *, needs: str = "") -> Callable[[Group], Group]:
        """Add the rows of a group."""

        def add(group: Group) -> Group:
            for name in statements(group):
                self.found.append(Row(self.name, len(self.found) + 1, name, group, needs))
            return group

        return add


def statements(group: Group) -> list[str]:
    """Return what a group yields, without running it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(group)))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Yield)]
    found.sort(key=lambda node: node.lineno)
    return [ast.literal_eval(node.value) for node in found if node.value is not None]


@cache
def outcomes(group: Group) -> dict[str, BaseException | None]:
    """Return what trying each row of a group raised; each has the same seed."""
    names = statements(group)
    found: dict[str, BaseException | None] = dict.fromkeys(names, AssertionError("not reached"))
    now, steps = "", group()
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated classes and torch's prototypes
        try:
            for name in [*names, ""]:
                torch.manual_seed(0)
                now, last = next(steps, ""), now
                assert now == name
                found[last] = None
        except (Exception, pytest.fail.Exception) as error:
            found[now or names[0]] = error
    return found


def is_documented(document: str, words: str) -> bool:
    """Return whether a document has the words; its line breaks do not count."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return bool(words) and " ".join(words.split()) in " ".join(text.split())


def defaults(what: Any, text: str, **more: Any) -> None:
    """Check that the arguments of a signature, and more, are there in this order by default."""
    call: Any = ast.parse(f"f({text})", mode="eval").body
    wanted = {name.id: inspect.Parameter.empty for name in call.args}
    wanted |= {part.arg: ast.literal_eval(part.value) for part in call.keywords} | more
    has = inspect.signature(what).parameters
    assert [(n, has[n].default) for n in has if n in wanted] == list(wanted.items())


def warned(call: Callable[[], Any], word: str) -> Any:
    """Return what a call gives; check that it warns with a word."""
    with pytest.warns(match=word):
        return call()


def raises(kind: Any, *words: str) -> Any:
    """Check that an error of a kind, or one of several, comes with words in it."""
    return pytest.raises(kind, match="(?s)" + "".join(f"(?=.*{re.escape(w)})" for w in words))


def refused(kind: Any, words: str | tuple[str, ...], call: Any, *args: Any, **kwargs: Any) -> None:
    """Check that a call raises an error of a kind with words in it."""
    with raises(kind, *([words] if isinstance(words, str) else words)):
        call(*args, **kwargs)


def close(a: Any, b: Any, atol: float = 1e-5) -> None:
    """Check that two tensors or lists of them hold the same numbers."""
    if isinstance(a, list):
        for x, y in zip(a, b, strict=True):
            close(x, y, atol)
    else:
        a, b = (torch.as_tensor(x).detach().double() for x in (a, b))
        torch.testing.assert_close(a, b, atol=atol, rtol=0)
