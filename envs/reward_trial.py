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
    asked (but those of a mixture's parts), what on_error forgives is a warning. Random numbers of
    Python, NumPy and torch go on as if nothing had been asked.
    """
    if isinstance(task, Rewarded):
        functions, task = task.functions, copy.copy(task)
        task.functions = {name: each for name, each in functions.items() if each.tried}
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
