"""What is wrong with the task that a configuration names, and with its data. Torch-free.

The parent makes the task as the worker will and looks at its rows, before a worker starts. A data
set of the hub is left to the worker.
"""

import inspect
import json
import re
import traceback
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from conf.build import data_arguments, make_task
from conf.targets import arguments_of, find_target, misfits, unknown_argument
from envs.data import is_file, load_table
from envs.rewards.rewarded import rewards_anything
from envs.tasks import Task

# What a source of batches asks of a task; rollouts ask for a reward.
ROWS = {"trainer.Demonstrations": "demonstrations", "trainer.PreferencePairs": "preferences"}


def findings(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the task of a resolved configuration and with its data files."""
    env = cfg["env"]
    name = env["task"].get("_target_")
    if name is None:
        yield "expected env.task._target_, e.g. envs.tasks.SortDigits; got none"
        return
    try:
        kind = find_target(name)
        given = data_arguments(env)
    except Exception as error:  # importing a user's module may raise anything
        yield f"env.task._target_={name}: {_in_one_line(error)}"
        return
    if inspect.isfunction(kind):
        yield (
            f"env.task._target_={name}: expected a task, which is a class (docs/own_task.md), got "
            "a function; a reward function goes under env.rewards, as env.rewards.mine.function"
        )
        return
    for key in ("dataset", "eval_dataset", "columns"):
        value = env[key]
        if isinstance(value, dict):
            value = {k: v for k, v in value.items() if v is not None}
        if value and key not in given:
            yield f"env.{key}={value}: {name} reads none; use env=gsm8k, env=chats or env=own"
    yield from misfits("env.task", env["task"], given)
    for reward, node in (env.get("rewards") or {}).items():
        yield from _reward(f"env.rewards.{reward}", node)
    named = list(_data_sets(env))
    local = [Path(name).expanduser() for name in named if is_file(name)]
    if len(local) == len(named):
        stamps = tuple(path.stat().st_mtime_ns for path in local if path.is_file())
        source = cfg["algorithm"]["source"].get("_target_", "")
        if fault := made_and_read(json.dumps(env), source, stamps):
            yield fault
        return
    for path in local:
        try:
            load_table(str(path))
        except ValueError as error:
            yield f"{name}: {error}"


def _data_sets(node: dict[str, Any]) -> Iterator[str]:
    """Yield the data sets of an env and of the tasks within its task."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _data_sets(value)
        elif key in ("dataset", "eval_dataset") and isinstance(value, str) and value:
            yield value


def _reward(where: str, node: Any) -> Iterator[str]:
    """Yield what is wrong with one of env.rewards."""
    if not isinstance(node, dict) or "_target_" not in node:
        yield f"{where}: expected _target_, e.g. envs.rewards.Function; got {node!r:.80}"
        return
    inner = node.get("function")
    if isinstance(inner, dict) and inner.get("_partial_") is not True:
        yield (
            f"{where}.function: expected _partial_: true beside its _target_, so that it is "
            "called with each (row, reply); got none"
        )
        return
    name = node["_target_"]
    try:
        find_target(name)
        if isinstance(inner, dict):
            find_target(name := inner["_target_"])
    except Exception as error:  # importing a user's module may raise anything
        yield f"{where}: {name}: {_in_one_line(error)}"
        return
    yield from misfits(where, node, {})


@lru_cache(maxsize=8)  # a sweep asks for each of its jobs
def made_and_read(env: str, source: str, stamps: tuple[int, ...]) -> str | None:
    """Return what making a task and reading its rows complains about; None if all is well.

    `stamps`: when its files were changed, as a part of the key of the cache.
    """
    node = json.loads(env)
    name = node["task"]["_target_"]
    try:
        task = make_task(node)
        if not isinstance(task, Task):
            return f"env.task._target_={name}: expected an envs.tasks.Task, got {type(task)}"
        for split in ("train", "eval"):
            _check_rows(task.rows(split), f"{name}, rows({split!r})")
        if source in ROWS:
            wanted = getattr(task, ROWS[source], list)
            _check_rows(wanted(), f"{name}, {ROWS[source]}()")
        elif source == "trainer.Rollouts" and not rewards_anything(task):
            remedy = "override reward(row, reply) or give env.rewards"
            return f"{name} rewards nothing, which GRPO and PPO need; {remedy}"
    except Exception as error:  # a task is anybody's code
        handed_on = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if handed_on and handed_on[1] in node["task"]:  # by **kwargs, to a base that lacks it
            known = sorted(arguments_of(find_target(name)))
            return unknown_argument(f"env.task.{handed_on[1]}", name, known)
        text = _in_one_line(error)
        return text if text.startswith("env.rewards.") else f"{name}: {text}"
    return None


def _check_rows(rows: Any, name: str) -> None:
    if not len(rows):
        raise ValueError(f"expected at least one row of {name}, got none")
    if not isinstance(rows[0], dict) or not rows[0].get("messages"):
        raise ValueError(f'expected rows with "messages" of {name}, got {rows[0]!r:.80}')


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if type(error) in (ValueError, NotImplementedError, ImportError, ModuleNotFoundError):
        return text
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({last.filename}, line {last.lineno})"
