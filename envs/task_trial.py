"""Whether a task works, before a worker starts: it is made, and its rows are looked at."""

from collections.abc import Callable
from typing import Any

from envs.tasks.task import Task, rewards_anything


def complaint(make: Callable[[], Any], name: str, *, rows: str | None, rewards: bool) -> str | None:
    """Return in one line what making a task and reading its rows complains about, or None.

    `rows`: the method that a source of demonstrations or preferences asks; `rewards`: whether it
    must reward replies.
    """
    try:
        task = make()
        if not isinstance(task, Task):
            return f"env.task._target_={name}: expected an envs.tasks.Task, got {type(task)}"
        for split in ("train", "eval"):
            _check_rows(task.rows(split), f"{name}, rows({split!r})")
        if rows:
            _check_rows(getattr(task, rows, list)(), f"{name}, {rows}()")
        if rewards and not rewards_anything(task):
            remedy = "override reward(row, reply) or give env.rewards"
            return f"{name} rewards nothing, which GRPO and PPO need; {remedy}"
    except Exception as error:  # a task is anybody's code
        text = in_one_line(error)
        return text if text.startswith("env.") else f"{name}: {text}"
    return None


def _check_rows(rows: Any, name: str) -> None:
    if not len(rows):
        raise ValueError(f"expected at least one row of {name}, got none")
    if not isinstance(rows[0], dict) or not rows[0].get("messages"):
        raise ValueError(f'expected rows with "messages" of {name}, got {rows[0]!r:.80}')


def in_one_line(error: Exception) -> str:
    """Return an error of anybody's code as a line, with its place unless it is told to users."""
    text = " ".join(str(error).split())
    told = (ValueError, NotImplementedError, ImportError, ModuleNotFoundError)
    if type(error) in told or type(error).__name__ == "Malformed":  # of a data file, a ValueError
        return text
    from envs.places import place_of

    return f"{type(error).__name__}: {text} ({place_of(error)})"
