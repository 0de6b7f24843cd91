"""What is wrong with the task that a configuration names, and with its data. Torch-free.

The parent makes the task as the worker will and looks at its rows, before a worker starts. A data
set of the hub is left to the worker.
"""

import inspect
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from conf.build import data_arguments, make_task
from envs.task_trial import complaint, in_one_line
from trainer.runs.nodes import argument_faults, is_node
from trainer.runs.targets import find_target

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
        yield f"env.task._target_={name}: {in_one_line(error)}"
        return
    if inspect.isfunction(kind):
        yield (
            f"env.task._target_={name}: expected a task, which is a class (docs/own_task.md), got "
            "a function; a reward function goes under env.rewards, as env.rewards.mine.function"
        )
        return
    columns = {key: value for key, value in env["columns"].items() if value is not None}
    for key, value in {**env, "columns": columns}.items():
        if key in ("dataset", "eval_dataset", "columns") and value and key not in given:
            yield f"env.{key}={value}: {name} reads none; use env=gsm8k, env=chats or env=own"
    yield from _node("env.task", env["task"])
    for reward, node in (env.get("rewards") or {}).items():
        yield from _node(f"env.rewards.{reward}", node)
    yield from _data(env, cfg["algorithm"]["source"].get("_target_", ""))


def _data(env: dict[str, Any], source: str) -> Iterator[str]:
    """Yield what is wrong with the rows of a task; with a data set of the hub, with other files."""
    files: list[Path] = []
    if named := list(_data_sets(env)):
        from envs.data import is_file, load_table

        files = [Path(name).expanduser() for name in named if is_file(name)]
    if len(files) == len(named):
        stamps = tuple(path.stat().st_mtime_ns for path in files if path.is_file())
        if fault := made_and_read(json.dumps(env), source, stamps):
            yield fault
        return
    for path in files:
        try:
            load_table(str(path))
        except ValueError as error:
            yield f"{env['task']['_target_']}: {error}"


def _data_sets(node: dict[str, Any]) -> Iterator[str]:
    """Yield the data sets of an env and of the tasks within its task."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _data_sets(value)
        elif key in ("dataset", "eval_dataset") and isinstance(value, str) and value:
            yield value


def _node(where: str, node: Any) -> Iterator[str]:
    """Yield what is wrong with the task or with one of env.rewards, as far as signatures tell."""
    if not is_node(node):
        yield f"{where}: expected _target_, e.g. envs.rewards.Function; got {node!r:.80}"
        return
    if where.startswith("env.rewards."):
        from conf.check_reward import bare_function  # here: few runs have a reward of their own

        yield from bare_function(where, node)
    inner = node.get("function")
    if isinstance(inner, dict) and inner.get("_partial_") is not True:
        what = f"{where}.function: expected _partial_: true beside its _target_"
        yield f"{what}, so that it is called with each (row, reply); got none"
    try:
        yield from argument_faults(node, where)
    except Exception as error:  # importing a user's module may raise anything
        yield f"{where}: {in_one_line(error)}"


@lru_cache(maxsize=8)  # a sweep asks for each of its jobs
def made_and_read(env: str, source: str, stamps: tuple[int, ...]) -> str | None:
    """Return what making a task and reading its rows complains about, or None.

    `stamps`: when its files were changed, for the cache.
    """
    node = json.loads(env)
    rewards = source == "trainer.Rollouts"
    name = node["task"]["_target_"]
    return complaint(lambda: make_task(node), name, rows=ROWS.get(source), rewards=rewards)
