"""What a task's reward gives, and where in a user's own code an error of it came from."""

import signal
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

from envs.tasks.task import Reply, Reward, Row, Task

ROOT = Path(__file__).parents[1]
LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
OTHERS = (*(str(ROOT / part) for part in ("conf", "envs", "policies", "trainer")), *LIBRARIES)


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


def rewards_of(task: Task, rows: Sequence[Row], replies: Sequence[Reply]) -> list[Reward]:
    """Return what a task gives each reply; ValueError unless that is a Reward each.

    An error of the task's own code is noted with its file and line.
    """
    name = type(task).__name__
    try:
        rewards = task.rewards(rows, replies)
    except (KeyboardInterrupt, SystemExit) as stop:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            raise  # it may be somebody's Ctrl-C; in a run that is a signal, not an exception
        where = f"in the reward of {name}, {place_of(stop)}"
        raise RuntimeError(f"{type(stop).__name__} {where}") from stop
    except Exception as error:
        if not is_own(error):
            error.add_note(f"in the reward of {name}, {place_of(error)}{_hint(error, rows)}")
        raise
    got = len(rewards) if isinstance(rewards, Sequence) else repr(rewards)[:80]
    if got != len(rows):
        raise ValueError(f"expected {len(rows)} rewards of {name}.rewards, one a reply, got {got}")
    for reward in rewards:
        if not isinstance(reward, Reward):
            raise ValueError(
                f"expected an envs.tasks.Reward of {name}, got {reward!r:.80} "
                f"({type(reward).__name__}); return Reward(total=1.0, parts={{}}, success=True)"
            )
    return list(rewards)


def _hint(error: Exception, rows: Sequence[Row]) -> str:
    """Return where a key is that a row lacks but its data has."""
    key, cells = (error.args or (None,))[0], rows[0].get("columns") if rows else None
    if not isinstance(error, KeyError) or not cells or key in rows[0]:
        return ""
    return f'; the cells of the data are in row["columns"]: {", ".join(map(str, cells))}'
