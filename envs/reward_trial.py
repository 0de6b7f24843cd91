"""Whether the reward of a task works: it is asked once, before a model is loaded."""

import copy
import random

import numpy as np
import torch

from envs.earned import rewards_of
from envs.rewards import Rewarded
from envs.tasks.task import Reply, Task, assistant, rewards_anything


def try_reward(task: Task) -> None:
    """Ask a task once what a reply to its first row earns, before a model is loaded.

    The reply is the row's answer, or empty where that is no text. Judges and reward models are not
    asked, what on_error forgives is a warning. Random numbers of Python, NumPy and torch go on as
    if nothing had been asked.
    """
    task = _without_judges(task)
    if not rewards_anything(task):
        return
    row = task.rows("train")[0]
    said = row["answer"] if isinstance(row.get("answer"), str) else ""
    state, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            rewards_of(task, [row], [Reply(said, True, [*row["messages"], assistant(said)])])
    except Exception as error:
        error.add_note(f"tried on the first row with the reply {said!r:.80}")
        raise
    finally:
        random.setstate(state)
        np.random.set_state(of_numpy)


def _without_judges(task: Task) -> Task:
    """Return a task like this one that asks no judge and no reward model, nor do its parts.

    It may hold others in `task` or `tasks`, as Rewarded and Mix do.
    """
    inner, parts = (getattr(task, name, None) for name in ("task", "tasks"))
    functions = task.functions if isinstance(task, Rewarded) else {}
    if isinstance(inner, Task) or isinstance(parts, dict):
        task = copy.copy(task)
    if isinstance(task, Rewarded):
        task.functions = {name: each for name, each in functions.items() if each.tried}
    if isinstance(inner, Task):
        vars(task)["task"] = _without_judges(inner)
    if isinstance(parts, dict):
        each = {k: _without_judges(v) if isinstance(v, Task) else v for k, v in parts.items()}
        vars(task)["tasks"] = each
    return task
