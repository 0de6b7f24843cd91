"""What a `_target_` names, and the arguments that it takes. Torch-free, as long as that is."""

import difflib
import inspect
from importlib import import_module
from typing import Any

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def find_target(target: str) -> Any:
    """Return what a `_target_` names; a module without that name is a ValueError."""
    module, _, name = target.rpartition(".")
    if not module:
        raise ValueError(f"expected <module>.<name>, got {target!r}")
    try:
        home = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and imports what is not
        from trainer.runs.not_there import told  # where there is a fault

        raise ModuleNotFoundError(told(error.name), name=error.name) from None
    if not hasattr(home, name):
        names = getattr(home, "__all__", [n for n in vars(home) if not n.startswith("_")])
        close = difflib.get_close_matches(name, names, n=1)
        raise ValueError(f"{module} has no {name}{f'; did you mean {close[0]}?' if close else ''}")
    return getattr(home, name)


def takes_any(thing: Any) -> bool:
    """Return whether a class or function takes arguments by any name (**kwargs).

    A task, or a part of an algorithm, hands them on to its base.
    """
    any_name = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(thing).parameters.values())
    bases = bases_of(thing) if thing.__module__.startswith(("envs.tasks.", "trainer.")) else []
    return takes_any(bases[0]) if any_name and bases else any_name


def arguments_of(thing: Any) -> list[str]:
    """Return the arguments that a class or function names.

    Of a class that hands on others by **kwargs, also those that its bases name.

    >>> sorted(arguments_of(find_target("envs.tasks.SortDigits")))
    ['max_digits', 'min_digits', 'num_rows', 'seed']
    """
    open_ = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(thing).parameters.values())
    made_by = [thing, *bases_of(thing)] if open_ else [thing]
    parameters = [p for made in made_by for p in inspect.signature(made).parameters.values()]
    return list(dict.fromkeys(p.name for p in parameters if p.kind in NAMED))


def bases_of(thing: Any) -> list[type]:
    """Return the bases of a class that have a constructor of their own, written in Python."""
    bases = getattr(thing, "__mro__", ())[1:-1]
    return [base for base in bases if inspect.isfunction(vars(base).get("__init__"))]


def unknown_argument(path: str, target: str, known: list[str]) -> str:
    """Return the line on an argument that a target does not take."""
    close = difflib.get_close_matches(path.rpartition(".")[2], known, n=1)
    meant = f"; did you mean {close[0]}?" if close else ""
    return f"{path}: {target} takes {', '.join(known) or 'no arguments'}{meant}"
