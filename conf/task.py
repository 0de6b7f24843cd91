"""What is wrong with the task that a configuration names, and with its data. Torch-free.

The parent makes the task as the worker will and looks at its rows, before a worker starts. A data
set of the hub is left to the worker.
"""

import difflib
import inspect
import json
import re
import traceback
import types
import typing
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from conf.parts import data_arguments, find, make_task
from envs.data import is_file, load_table
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
        signature = inspect.signature(find(name))
    except Exception as error:  # importing a user's module may raise anything
        yield f"env.task._target_={name}: {_in_one_line(error)}"
        return
    given = data_arguments(env)
    for key in ("dataset", "eval_dataset", "columns"):
        value = env[key]
        if isinstance(value, dict):
            value = {k: v for k, v in value.items() if v is not None}
        if value and key not in given:
            yield f"env.{key}={value}: {name} reads none; use env=gsm8k, env=chats or env=own"
    arguments = {key: value for key, value in env["task"].items() if key != "_target_"}
    yield from _misfits(name, signature, arguments)
    try:
        signature.bind(**{**given, **arguments})
    except TypeError as error:
        yield f"env.task: {name}: {error}; give it as env.task.<argument>=..."
    named = [env[key] for key in ("dataset", "eval_dataset") if env[key]]
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


def _misfits(name: str, signature: inspect.Signature, arguments: dict[str, Any]) -> Iterator[str]:
    """Yield each argument that the constructor does not have, or has with another type."""
    parameters = signature.parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key, value in arguments.items():
        if key not in parameters:
            if not takes_all:
                yield _no_argument(name, key, list(parameters))
        elif not fits(value, parameters[key].annotation):
            kind = inspect.formatannotation(parameters[key].annotation)
            yield f"expected env.task.{key} to be {kind} ({name}), got {value!r}"


def _no_argument(name: str, key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    meant = f"; did you mean {close[0]}?" if close else ""
    return f"env.task.{key}: {name} takes {', '.join(known) or 'no arguments'}{meant}"


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value of a configuration has an annotated type; True for odd annotations.

    >>> fits(3, float), fits("3", int | None), fits([1], list[int]), fits(True, int)
    (True, False, True, False)
    """
    origin = typing.get_origin(hint) or hint
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in typing.get_args(hint))
    if not isinstance(origin, type) or origin is inspect.Parameter.empty:
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
        elif source == "trainer.Rollouts" and _rewards_nothing(type(task)):
            return f"{name} rewards nothing, which GRPO and PPO need; override reward(row, reply)"
    except Exception as error:  # a task is anybody's code
        handed_on = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if handed_on and handed_on[1] in node["task"]:  # by **kwargs, to a base that lacks it
            kinds = [kind.__init__ for kind in find(name).__mro__[:-1]]
            taken = {key for kind in kinds for key in inspect.signature(kind).parameters}
            return _no_argument(name, handed_on[1], sorted(taken - {"self", "args", "kwargs"}))
        return f"{name}: {_in_one_line(error)}"
    return None


def _rewards_nothing(kind: type[Task]) -> bool:
    return kind.reward is Task.reward and kind.rewards is Task.rewards


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
