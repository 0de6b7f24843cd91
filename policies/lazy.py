"""Load the names of a package on first use (PEP 562), so that its import does not import torch.

The imports under `if TYPE_CHECKING:` map each name to its module, for editors and type checkers
and at run time.
"""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of the package whose `__init__.py` is `file`.

    >>> import envs
    >>> getattr, names, _ = lazy("envs", envs.__file__)
    >>> getattr("ChatEnv").__module__, "ChatEnv" in names()
    ('envs.torchrl.chat_env', True)
    """
    blocks = [node for node in ast.parse(Path(file).read_bytes()).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    home = {alias.asname or alias.name: node.module for node in imports for alias in node.names}
    names = sorted(home)

    def load(name: str) -> Any:
        if (module := home.get(name)) is None:
            raise AttributeError(f"{package} has no {name!r}; it has {', '.join(names)}")
        return getattr(import_module(module), name)

    return load, lambda: names, names
