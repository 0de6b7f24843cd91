"""Reward functions that Python code gives to `trainer.train`: they live as long as its process."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

from envs.rewards.functions import Function, Refused, RewardFunction, Score
from envs.rewards.trl_function import TRLFunction
from envs.tasks.task import Reply, Row

HELD: dict[str, RewardFunction] = {}  # by the name that a configuration has


class Given(RewardFunction):
    """The function `name` that this process holds; in another one it ends the run.

    >>> hold("short", lambda row, reply: len(reply.text) < 9)
    >>> Given("short").scores([{}], [Reply("yes", True, [])])
    [1.0]
    """

    remedy = "give trainer.train an envs.rewards.Function(..., on_error='zero') or 'drop_group'"

    def __init__(self, name: str) -> None:
        self.name, self.held = name, HELD.get(name)
        super().__init__(**({"weight": self.held.weight} if self.held else {}))
        if self.held:
            self.on_error = self.held.on_error

    def scores(self, rows: Sequence[Row], replies: Sequence[Reply]) -> list[Score]:
        """Return what the function gives."""
        if self.held is None:
            gone = f"{self.name} was given to trainer.train by Python code that has ended"
            return [Refused(f"{gone}; put it into a file and name that: docs/own_task.md")] * len(
                rows
            )
        return self.held.scores(rows, replies)


def hold(name: str, function: Callable[..., Any] | RewardFunction) -> None:
    """Keep a function of (row, reply), or of TRL's (prompts, completions, ...), for `Given`."""
    if not isinstance(function, RewardFunction):
        if not callable(function):
            raise ValueError(f"expected {name} to be a function of (row, reply), got {function!r}")
        function = (TRLFunction if is_of_trl(function) else Function)(function)
    HELD[name] = function


def is_of_trl(function: Callable[..., Any]) -> bool:
    """Tell whether a function takes what TRL gives its own."""
    try:
        return bool({"prompts", "completions"} & set(signature(function).parameters))
    except ValueError:  # some functions in C have no signature
        return False
