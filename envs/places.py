"""Where in a user's own code an error came from."""

import sysconfig
import traceback
from pathlib import Path

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
