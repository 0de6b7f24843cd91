"""Compute the rewards of responses; on an error find the line of the user's code."""

import math
import os
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envs.tasks.task import Response, Reward, Row, Task

ROOT = Path(__file__).parents[2]
LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
NOT_USERS = (
    "<frozen",
    "<string>",  # methods that dataclasses generate
    *(f"{ROOT / part}/" for part in ("conf", "envs", "policies", "trainer")),
    *LIBRARIES,
)


def compute_rewards(task: Task, rows: Sequence[Row], responses: Sequence[Response]) -> list[Reward]:
    """Compute a task's rewards of responses; a plain number becomes a `Reward` without parts.

    Raise ValueError unless every response has a finite reward. An error of the task's code gets a
    note with its file and line.
    """
    process = os.getpid()
    try:
        values = task.rewards(rows, responses)
    except Exception as error:
        if place := error_location(error):
            where = f"in the reward of {type(task).__name__}, {place}"
            error.add_note(f"{where}{columns_hint(error, rows)}")
        raise
    finally:
        if os.getpid() != process:  # else a child that the reward forked would continue the run
            error = sys.exc_info()[1]
            os._exit(int(bool(getattr(error, "code", error))))
    name = type(task).__name__
    count = len(values) if hasattr(values, "__len__") else f"{values!r:.80}"
    if count != len(responses):
        raise ValueError(
            f"expected {len(responses)} rewards of {name}, one a response, got {count}"
        )
    rewards = []
    for value, response in zip(values, responses, strict=True):
        if (reward := as_reward(value)) is None:
            raise ValueError(
                f"expected a finite number or an envs.tasks.Reward of {name}, got {value!r:.80} "
                f"({type(value).__name__}) for the response {response.text!r:.80}; return "
                "Reward(total=1.0, parts={}, success=True), or a number; an async function goes "
                "under env.rewards"
            )
        rewards.append(reward)
    return rewards


def as_reward(value: Any) -> Reward | None:
    """Return a `Reward`, or for a number a reward with success if it is above 0, else None.

    >>> as_reward(0.5)
    Reward(total=0.5, parts={}, success=True, errors=0, dropped=False)
    """
    number = value.total if isinstance(value, Reward) else value
    if isinstance(number, str) or not hasattr(number, "__float__") or getattr(number, "ndim", 0):
        return None
    if not math.isfinite(number := float(number)):  # it would make every advantage NaN
        return None
    return value if isinstance(value, Reward) else Reward(number, {}, number > 0)


def error_location(error: BaseException) -> str:
    """Return file and line of the innermost frame in the user's code, or "".

    >>> try:
    ...     {}["a"]
    ... except KeyError as error:
    ...     error_location(error).endswith("line 2")
    True
    """
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(NOT_USERS)]
    return f"{users[-1].filename}, line {users[-1].lineno}" if users else ""


def columns_hint(error: Exception, rows: Sequence[Row]) -> str:
    """Return a hint for a key that a row lacks but its data's columns may have."""
    key, cells = (error.args or (None,))[0], rows[0].get("columns") if rows else None
    if not isinstance(error, KeyError) or not cells or key in rows[0]:
        return ""
    return f'; the cells of the data are in row["columns"]: {", ".join(map(str, cells))}'
