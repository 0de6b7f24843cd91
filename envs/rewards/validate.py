"""Check a task and its rewards before a model is loaded."""

import copy
import os
from collections.abc import Callable
from contextlib import chdir
from typing import Any

from envs.rewards.compute import compute_rewards, error_location
from envs.tasks.task import Response, Task, assistant, rewards_anything


def try_reward(task: Task) -> None:
    """Compute the reward of a response to a task's first row, before a model is loaded.

    The response is the row's answer, or empty if the answer is not a text. Judges and reward models
    are skipped; errors that on_error allows are warnings.
    """
    task = _only_tried(task)
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


def _only_tried(part: Any) -> Any:
    """Return a copy of a task, and of tasks in it, without the functions that are not `tried`."""
    if isinstance(part, dict):
        return {k: _only_tried(v) for k, v in part.items() if getattr(v, "tried", True)}
    if isinstance(part, Task):
        part = copy.copy(part)
        within = vars(part).keys() & {"task", "tasks", "functions"}  # fields of Rewarded and Mix
        vars(part).update({name: _only_tried(getattr(part, name)) for name in within})
    return part


def check_task(make: Callable[[], Any], name: str, *, rows: str | None, rewards: bool) -> Task:
    """Build a task and read its rows; raise ValueError with the first fault, in one line.

    `rows`: the method that a source of demonstrations or preferences calls; `rewards`: whether the
    task must reward responses.
    """
    try:
        task = make()
        if not isinstance(task, Task):
            raise ValueError(
                f"env.task._target_={name}: expected an envs.tasks.Task, got {type(task)}"
            )
        for split in ("train", "eval"):
            _check_rows(task.rows(split), f"{name}, rows({split!r})")
        if rows:
            _check_rows(getattr(task, rows, list)(), f"{name}, {rows}()")
        if rewards and not rewards_anything(task):
            remedy = "override reward(row, response), give env.rewards, or set eval.num_samples=0"
            why = "expected rewards, which GRPO, PPO and evaluations need, got none"
            raise ValueError(f"{why}; {remedy} eval.greedy=false")
        return task
    except Exception as error:  # a task is user code
        text = in_one_line(error)
        raise ValueError(text if text.startswith("env.") else f"{name}: {text}") from error


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
