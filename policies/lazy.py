"""Packages whose names load on first use (PEP 562), so that importing one costs no torch."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def loader(package: str, home: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package: `home` tells the module of each name.

    >>> loader("json", {"JSONDecoder": ".decoder"})("JSONDecoder").__module__
    'json.decoder'
    """

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"{package} has no {name!r}; it has {', '.join(sorted(home))}")
        return getattr(import_module(home[name], package), name)

    return load
