"""Rewards read from replies. Names load on first use (PEP 562): importing this costs no torch."""

from importlib import import_module
from typing import Any

_HOME = {
    "CountdownRewardParser": "parsers",
    "GSM8KRewardParser": "parsers",
    "MATHRewardParser": "parsers",
    "RewardParser": "parsers",
    "same_mathematics": "answers",
    "solves_countdown": "answers",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"envs.rewards has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"envs.rewards.{_HOME[name]}"), name)
