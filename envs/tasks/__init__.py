"""What chats are about: rows, rewards and what comes after a reply. Torch-free, loaded on use."""

from importlib import import_module
from typing import Any

_HOME = {
    "Arithmetic": "arithmetic",
    "Calculator": "calculator",
    "Chats": "dataset",
    "Countdown": "countdown",
    "DatasetTask": "dataset",
    "Facts": "facts",
    "Guess": "guess",
    "LearntReward": "learnt_reward",
    "MathProblems": "math_problems",
    "MathWords": "math_words",
    "Mix": "mix",
    "Preferences": "preferences",
    "ReasoningGym": "reasoning_gym",
    "Reply": "task",
    "Reviews": "reviews",
    "Reward": "task",
    "Row": "task",
    "SortDigits": "sort_digits",
    "Task": "task",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"envs.tasks has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"envs.tasks.{_HOME[name]}"), name)
