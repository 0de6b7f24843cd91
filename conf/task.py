"""What is wrong with the task that a configuration names, and with its data. Torch-free.

The parent makes the task as the worker will and looks at its rows, before a worker starts. A data
set of the hub is left to the worker.
"""

import inspect
import json
import re
import traceback
import types
import typing
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from conf.nodes import no_argument
from conf.parts import arguments_of, data_arguments, find, make_task
from envs.data import is_file, load_table
from envs.rewards.rewarded import rewards_anything
from envs.tasks import Task

# What a source of batches asks of a task; rollouts ask for a reward.
ROWS = {"trainer.Demonstrations": "demonstrations", "trainer.PreferencePairs": "preferences"}
JUDGED = (bool, int, float, str, list, dict, types.NoneType)  # and those of collections.abc


def findings(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the task of a resolved configuration and with its data files."""
    env = cfg["env"]
    name = env["task"].get("_target_")
    if name is None:
        yield "expected env.task._target_, e.g. envs.tasks.SortDigits; got none"
        return
    try:
        signature = inspect.signature(kind := find(name))
    except Exception as error:  # importing a user's module may raise anything
        yield f"env.task._target_={name}: {_in_one_line(error)}"
        return
    if inspect.isfunction(kind):
        yield (
            f"env.task._target_={name}: expected a task, which is a class (docs/own_task.md), got "
            "a function; a reward function goes under env.rewards, as env.rewards.mine.function"
        )
        return
    given = data_arguments(env)
    for key in ("dataset", "eval_dataset", "columns"):
        value = env[key]
        if isinstance(value, dict):
            value = {k: v for k, v in value.items() if v is not None}
        if value and key not in given:
            yield f"env.{key}={value}: {name} reads none; use env=gsm8k, env=chats or env=own"
    yield from _misfits("env.task", env["task"], signature, given)
    yield from _rewards(env.get("rewards") or {})
    named = list(_data_sets(env))
    paths = [Path(name).expanduser() for name in named]
    local = [path for name, path in zip(named, paths, strict=True) if is_file(name)]
    if local == paths:
        stamps = tuple(path.stat().st_mtime_ns for path in local if path.is_file())
        fault = _fault(json.dumps(env), cfg["algorithm"]["source"].get("_target_", ""), stamps)
        if fault:
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


def _rewards(rewards: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with env.rewards, as far as signatures tell."""
    for key, node in rewards.items():
        where = f"env.rewards.{key}"
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
            signature = inspect.signature(find(name))
            if isinstance(inner, dict):
                find(name := inner["_target_"])
        except Exception as error:  # importing a user's module may raise anything
            yield f"{where}: {name}: {_in_one_line(error)}"
            return
        yield from _misfits(where, node, signature, {})


def _misfits(
    where: str, node: dict[str, Any], signature: inspect.Signature, given: dict[str, Any]
) -> Iterator[str]:
    """Yield each argument that a node's _target_ does not have, or has with another type."""
    name, parameters = node["_target_"], signature.parameters
    arguments = {key: value for key, value in node.items() if not str(key).startswith("_")}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key, value in arguments.items():
        if key not in parameters:
            if not takes_all:
                yield no_argument(f"{where}.{key}", name, list(parameters))
        elif not fits(value, parameters[key].annotation):
            hint = parameters[key].annotation
            kind, remedy = inspect.formatannotation(hint), ""
            if isinstance(value, str) and typing.get_origin(hint) is Callable:
                kind = "a function"
                remedy = f"; write {where}.{key}='{{_target_: {value}, _partial_: true}}'"
            yield f"expected {where}.{key} to be {kind} ({name}), got {value!r}{remedy}"
    try:
        signature.bind(**{**given, **arguments})
    except TypeError as error:
        yield f"{where}: {name}: {error}; give it as {where}.<argument>=..."


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value of a configuration has an annotated type.

    True for types that YAML has no values of: what a constructor makes of those is its affair.

    >>> fits(3, float), fits("3", int | None), fits([1], list[int]), fits("/tmp", Path)
    (True, False, True, True)
    """
    origin = typing.get_origin(hint) or hint
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in typing.get_args(hint))
    if not isinstance(origin, type):
        return True
    if origin not in JUDGED and origin.__module__ != "collections.abc":
        return True
    if isinstance(value, dict) and "_target_" in value:  # to be made
        return True
    if origin in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if origin is float else origin)


@lru_cache(maxsize=8)  # a sweep asks for each of its jobs
def _fault(env: str, source: str, stamps: tuple[int, ...]) -> str | None:
    """Return what making a task and reading its rows complains about; None if all is well."""
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
            known = sorted(arguments_of(find(name)))
            return no_argument(f"env.task.{handed_on[1]}", name, known)
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
