"""Where in a user's own code an error came from, and what is wrong with what a reward gave."""

import inspect
import signal
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envs.tasks.task import Reply, Reward, Row, Task

ROOT = Path(__file__).parents[1]
LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
OTHERS = (*(f"{ROOT / part}/" for part in ("conf", "envs", "policies", "trainer")), *LIBRARIES)


def place_of(error: BaseException) -> str:
    """Return file and line of the innermost code that is no library's, else of the innermost.

    >>> try:
    ...     {}["a"]
    ... except KeyError as error:
    ...     place_of(error).endswith("line 2")
    True
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "its traceback is lost"
    own = [f for f in frames if not f.filename.startswith(OTHERS) and f.filename != __file__]
    last = (own or frames)[-1]
    return f"{last.filename}, line {last.lineno}"


def is_own(error: BaseException) -> bool:
    """Return whether an error was raised by leash itself, which says all that there is to say."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(OTHERS[:4])


def noted(error: BaseException, task: Task, rows: Sequence[Row]) -> BaseException:
    """Return an error out of a task's reward with the file and line of the task's own code.

    In a run, what would end the process is an error too.
    """
    name = type(task).__name__
    if isinstance(error, KeyboardInterrupt | SystemExit):
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            return error  # it may be somebody's Ctrl-C; in a run that is a signal, not an exception
        what = f"{type(error).__name__} in the reward of {name}, {place_of(error)}"
        (ended := RuntimeError(what)).__cause__ = error
        return ended
    if isinstance(error, Exception) and not is_own(error):
        error.add_note(f"in the reward of {name}, {place_of(error)}{hint(error, rows)}")
    return error


def defined_at(function: Any) -> str:
    """Return file and line where a function of one's own begins; empty for those of leash."""
    function = getattr(function, "func", function)  # of a partial
    if not hasattr(function, "__code__"):
        function = getattr(type(function), "__call__", None)  # noqa: B004
    code = getattr(function, "__code__", None)
    if code is None or code.co_filename.startswith(OTHERS):
        return ""
    return f"{code.co_filename}, line {code.co_firstlineno}"


def no_rewards(task: Task, given: Any, found: Sequence[Reward | None], replies: list[Reply]) -> str:
    """Return what is wrong with what a task gave for replies; `found`: what of it is a reward."""
    name, kind = type(task).__name__, type(task)
    several = list(given) if hasattr(given, "__len__") else [given]
    place = defined_at(kind.reward if kind.rewards is Task.rewards else kind.rewards)
    at = f" ({place})" if place else ""
    if waiting := [each for each in several if inspect.iscoroutine(each)]:
        for each in waiting:
            each.close()  # nobody will await it
        remedy = "give it as the function of an envs.rewards.Function in env.rewards, which awaits"
        return f"expected a plain reward of {name}, got an async one{at}; {remedy}"
    if len(found) != len(replies):
        got = len(found) if hasattr(given, "__len__") else f"{given!r:.80}"
        return f"expected {len(replies)} rewards of {name}.rewards, one a reply, got {got}{at}"
    value, reply = next(
        (v, r) for v, f, r in zip(several, found, replies, strict=True) if f is None
    )
    number = value.total if isinstance(value, Reward) else value
    if hasattr(number, "__float__") and not getattr(number, "ndim", 0):
        what = f"expected a finite reward of {name}, got {number} for the reply {reply.text!r:.80}"
        return f"{what}{at}; return a number"
    what = f"expected a number or an envs.tasks.Reward of {name}, got {value!r:.80}"
    made = "return Reward(total=1.0, parts={}, success=True)"
    return f"{what} ({type(value).__name__}){at}; {made}"


def hint(error: Exception, rows: Sequence[Row]) -> str:
    """Return where a key is that a row lacks but its data has."""
    key, cells = (error.args or (None,))[0], rows[0].get("columns") if rows else None
    if not isinstance(error, KeyError) or not cells or key in rows[0]:
        return ""
    return f'; the cells of the data are in row["columns"]: {", ".join(map(str, cells))}'
