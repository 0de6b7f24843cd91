"""Rewards: read from replies, and summed from several. Loads names on first use, without torch."""

from importlib import import_module
from typing import Any

_HOME = {
    "CountdownRewardParser": "parsers",
    "Function": "functions",
    "GSM8KRewardParser": "parsers",
    "InProcess": "workers",
    "Judge": "judge",
    "MATHRewardParser": "parsers",
    "RewardFunction": "functions",
    "RewardModel": "learnt",
    "RewardParser": "parsers",
    "Rewarded": "rewarded",
    "Workers": "workers",
    "same_mathematics": "answers",
    "solves_countdown": "answers",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"envs.rewards has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"envs.rewards.{_HOME[name]}"), name)
