"""What to say of a module that is not there: where it was looked for, and what to do."""

import os
import sys
from importlib import import_module
from pathlib import Path


def told(module: str) -> str:
    """Return where a module was looked for, and what to do."""
    said, (top, _, rest) = f"No module named {module!r}", module.partition(".")
    if rest:
        return f"{said}; {top} is {import_module(top).__path__[0]}"
    folders = [path or os.getcwd() for path in sys.path]
    own = [p for p in folders if "-packages" not in p and not p.startswith(sys.base_prefix)]
    said = f"{said}; looked in {', '.join(dict.fromkeys(own))}"
    if (Path.cwd() / f"{top}.py").exists():
        return f"{said}; it lies in {Path.cwd()}: write PYTHONPATH=. in front of the command"
    return f"{said}; put {top}.py there, or name its folder: PYTHONPATH=<folder>"
