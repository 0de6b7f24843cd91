"""The names of keys. Torch-free."""

from functools import cache
from pathlib import Path

from conf.schema import keys

FOLDER = Path(__file__).parent


@cache
def all_keys() -> dict[str, str]:
    """Return every key, and those of sections, with the first part of conf/ that declares it."""
    out: dict[str, str] = {}
    for key, parts in keys().items():
        steps = key.split(".")
        for end in range(1, len(steps) + 1):
            out.setdefault(".".join(steps[:end]), next(iter(parts)))
    return out
