"""mode=train: the loop, from its start or from where a checkpoint left it."""

from typing import Any

from trainer.trainer import Trainer


def run(loop: Trainer, settings: dict[str, Any]) -> float:
    """Train to the last iteration; return the objective of a sweep."""
    return loop.run(resume=settings["resume"] is not None)
