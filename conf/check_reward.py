"""What is wrong with a reward that a configuration names. Torch-free."""

import inspect
from collections.abc import Iterator
from typing import Any

from envs.rewards.given import is_of_trl
from trainer.runs.targets import find_target


def bare_function(where: str, node: dict[str, Any]) -> Iterator[str]:
    """Yield that a reward names a function where what calls it goes, with the override to type."""
    try:
        function = find_target(name := node["_target_"])
        asked = inspect.signature(function).parameters.values()
    except Exception:  # importing a user's module may raise anything: it is told below
        return
    needs = [p.name for p in asked if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if not inspect.isfunction(function) or len(needs) < 2 or {*needs} & {*node}:
        return
    kind = "TRLFunction" if is_of_trl(function) else "Function"
    write = f"{where}={{_target_: envs.rewards.{kind}, function: {{_target_: {name}, "
    what = f"{where}._target_={name} is a function of ({', '.join(needs)}), which is to be called"
    yield f"{what}; write '{write}_partial_: true}}}}'"
