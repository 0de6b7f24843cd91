"""What can be done with the parts of a run: one file a mode, with `run(loop, settings) -> float`.

`loop` is the Trainer that train.py put together, `settings` the resolved configuration. Beside
"train" the run folder of `loop` is one that is removed; what a mode keeps it writes elsewhere.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer.fitting import fit_rows

if TYPE_CHECKING:
    from trainer.trainer import Trainer


def run_mode(loop: "Trainer", settings: dict[str, Any]) -> float:
    """Do what the settings ask for; return the metric of a sweep, or how many problems there are.

    The run's status says it too, which is how the parent hears of it.
    """
    name = "preflight" if settings["preflight"] else settings["mode"]
    if name in ("train", "evaluate", "frontier"):
        for text in fit_rows(loop):
            loop.observers.say(text)
    if name == "train":
        out = loop.run(resume=settings["resume"] is not None)
    else:
        out = float(import_module(f"trainer.modes.{name}").run(loop, settings))
    loop.runtime.write_status(objective=out)
    return out
