"""The modes of train.py: one file per mode, with `run(loop, settings) -> float`.

`loop` is the Trainer that conf/run.py builds, `settings` the resolved configuration. All modes
except "train" have a temporary run folder and write their results elsewhere.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer.length_filter import drop_long_rows, find_unlearnt_end, name_unused

if TYPE_CHECKING:
    from trainer.trainer import Trainer


def run_mode(loop: "Trainer", settings: dict[str, Any]) -> float:
    """Run the mode of the settings; return the metric of a sweep, or the number of problems.

    The result is also written to status.json, from which the parent process reads it.
    """
    name = "preflight" if settings["preflight"] else settings["mode"]
    if name in ("train", "evaluate", "frontier"):
        for text in (*name_unused(loop), *drop_long_rows(loop)):
            loop.observers.say(text)
    if name == "train":
        for text in find_unlearnt_end(loop):
            loop.observers.say(text)
        out = loop.run(resume=settings["resume"] is not None)
    else:
        out = float(import_module(f"trainer.modes.{name}").run(loop, settings))
    loop.runtime.write_status(objective=out)
    return out
