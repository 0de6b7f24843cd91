"""Rows of a data set of the hub, or of its cache, without the hub's own messages.

Out of reach, the hub is asked once, not for a minute: what an earlier download left is read then.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 10  # seconds for the hub's first answer


def read_hub(name: str, subset: str | None, split: str) -> list[Any]:
    """Download a data set, or read it from the cache; one that is nowhere is a ValueError."""
    import datasets

    with _quiet():
        reached = datasets.config.HF_HUB_OFFLINE or _answers()
        with _offline(datasets.config.HF_HUB_OFFLINE or not reached):
            try:
                return datasets.load_dataset(name, subset, split=split).to_list()
            except (OSError, ValueError) as error:
                reason = str(error).strip().split("\n")[0]
                raise ValueError(reason if reached else "the hub cannot be reached") from None


def _answers() -> bool:
    """Return whether the hub can be reached; what it says does not matter."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception:  # of whichever HTTP package is below
        return False
    return True


@contextmanager
def _offline(offline: bool) -> Iterator[None]:
    """Read from the cache alone if `offline`, as HF_HUB_OFFLINE=1 does."""
    import datasets
    from huggingface_hub import constants

    homes = (datasets.config, constants)
    before = [home.HF_HUB_OFFLINE for home in homes]
    for home, value in zip(homes, before, strict=True):
        home.HF_HUB_OFFLINE = value or offline
    try:
        yield
    finally:
        for home, value in zip(homes, before, strict=True):
            home.HF_HUB_OFFLINE = value


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the progress bars and warnings of `datasets` and `huggingface_hub` away."""
    import datasets
    import huggingface_hub

    loggers = (datasets.logging, huggingface_hub.logging)
    before = [logger.get_verbosity() for logger in loggers]
    bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    for logger in loggers:
        logger.set_verbosity_error()
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()
