"""What a task's reward gives: one `Reward` a reply, or an error that says whose fault it is."""

import math
from collections.abc import Sequence
from typing import Any

from envs.tasks.task import Reply, Reward, Row, Task


def rewards_of(task: Task, rows: Sequence[Row], replies: Sequence[Reply]) -> list[Reward]:
    """Return what a task gives each reply; a plain number is a `Reward` without parts.

    ValueError unless there is a finite one for each reply. An error of the task's own code is noted
    with its file and line.
    """
    try:
        given = task.rewards(rows, replies)
    except BaseException as error:
        from envs.places import noted  # here and below: most rewards have no error

        raise noted(error, task, rows)  # noqa: B904
    rewards = [as_reward(each) for each in given] if hasattr(given, "__len__") else []
    if len(rewards) != len(rows) or None in rewards:
        from envs.places import no_rewards

        raise ValueError(no_rewards(task, given, rewards, replies))
    return rewards  # type: ignore[return-value]


def as_reward(value: Any) -> Reward | None:
    """Return a reward, or a number as one that counts as a success above 0; None if it is neither.

    >>> as_reward(0.5)
    Reward(total=0.5, parts={}, success=True, errors=0, dropped=False)
    """
    number = value.total if isinstance(value, Reward) else value
    if isinstance(number, str) or not hasattr(number, "__float__") or getattr(number, "ndim", 0):
        return None
    if not math.isfinite(number := float(number)):  # one would make every advantage NaN
        return None
    return value if isinstance(value, Reward) else Reward(number, {}, number > 0)
