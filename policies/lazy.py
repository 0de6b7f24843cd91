"""Packages whose names load on first use (PEP 562), so that importing one costs no torch.

Where each name is at home stands under `if TYPE_CHECKING:`, as imports that editors and type
checkers follow; at run time they are read from there.
"""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy(
    package: str, file: str, **others: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of the package whose `__init__.py` is `file`.

    `others`: names whose module imports this package, with that module.

    >>> import envs
    >>> getattr, names, _ = lazy("envs", envs.__file__)
    >>> getattr("ChatEnv").__module__, "ChatEnv" in names()
    ('envs.chat_env', True)
    """
    blocks = [node for node in ast.parse(Path(file).read_bytes()).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    home = {alias.asname or alias.name: node.module for node in imports for alias in node.names}
    home |= others
    names = sorted(home)

    def load(name: str) -> Any:
        if (module := home.get(name)) is None:
            raise AttributeError(f"{package} has no {name!r}; it has {', '.join(names)}")
        return getattr(import_module(module), name)

    return load, lambda: names, names
