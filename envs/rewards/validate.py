"""Check results of a task and its rewards; errors name file and line of the user's code."""

import copy
import math
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

from envs.tasks.task import Response, Reward, Row, Task, assistant, rewards_anything

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

    ValueError unless every response has a finite one. An error of the task's code gets a note with
    its file and line.
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
        if os.getpid() != process:  # a child that the reward forked would continue the run
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
    """Return a reward, or a number as a reward with success above 0; None for anything else.

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
    """Return file and line of the innermost user code, not leash's or a library's, or "".

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


def try_reward(task: Task) -> None:
    """Compute the reward of a response to a task's first row, before a model is loaded.

    The response is the row's answer, or empty if that is not a text. Judges and reward models are
    skipped; errors that on_error allows are warnings.
    """
    task = _without_paid(task)
    if not rewards_anything(task):
        return
    row = task.rows("train")[0]
    text = row["answer"] if isinstance(row.get("answer"), str) else ""
    try:
        with chdir(os.getcwd()):  # a reward may change the folder; relative paths are still needed
            compute_rewards(
                task, [row], [Response(text, True, [*row["messages"], assistant(text)])]
            )
    except Exception as error:
        error.add_note(f"tried on the first row with the response {text!r:.80}")
        raise


def _without_paid(part: Any) -> Any:
    """Return a task, and the tasks in it, without reward functions that are not `tried`."""
    if isinstance(part, dict):
        return {k: _without_paid(v) for k, v in part.items() if getattr(v, "tried", True)}
    if isinstance(part, Task):
        part = copy.copy(part)
        within = vars(part).keys() & {"task", "tasks", "functions"}  # of Rewarded and Mix
        vars(part).update({name: _without_paid(getattr(part, name)) for name in within})
    return part


def first_fault(
    make: Callable[[], Any], name: str, *, rows: str | None, rewards: bool
) -> str | None:
    """Build a task and read its rows; return the error in one line, or None.

    `rows`: the method that a source of demonstrations or preferences calls; `rewards`: whether the
    task must reward responses.
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
            remedy = "override reward(row, response) or give env.rewards"
            why = f"which GRPO, PPO and evaluations need; {remedy}"
            return f"{name} rewards nothing, {why}, or set eval.num_samples=0 eval.greedy=false"
    except Exception as error:  # a task is user code
        text = in_one_line(error)
        return text if text.startswith("env.") else f"{name}: {text}"
    return None


def _check_rows(rows: Any, name: str) -> None:
    if not len(rows):
        raise ValueError(f"expected at least one row of {name}, got none")
    if not isinstance(rows[0], dict) or not rows[0].get("messages"):
        raise ValueError(f'expected rows with "messages" of {name}, got {rows[0]!r:.80}')


def in_one_line(error: Exception) -> str:
    """Return an error as one line, with its location in the user's code."""
    text, place = " ".join(str(error).split()), error_location(error)
    if not isinstance(error, (ValueError, NotImplementedError, ImportError)):
        text = f"{type(error).__name__}: {text}"
    return f"{text} ({place})" if place else text
