"""Rows of a data set of the hub, without the hub's own messages.

What an earlier download left in the cache is read first, as with models: the hub is not waited for.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from logging import CRITICAL
from pathlib import Path
from typing import Any

from policies.reachable import why_unreachable


def read_hub(name: str, subset: str | None, split: str, *, large: int) -> Sequence[dict[str, Any]]:
    """Read a data set from the cache, or download it; one that is nowhere is a ValueError.

    One of more than `large` bytes stays on disk.
    """
    import datasets

    faults = (OSError, ValueError, datasets.exceptions.DatasetsError)
    with _quiet():

        def load() -> Sequence[dict[str, Any]]:
            found = datasets.load_dataset(name, subset, split=split)
            if found.data.nbytes <= large:
                return found.to_list()
            from envs.mapped_rows import ArrowRows

            files = [Path(file["filename"]) for file in found.cache_files]
            origin = [[str(file), file.stat().st_mtime_ns] for file in files]
            origin += [name, subset, split, found._fingerprint]
            return ArrowRows(found.flatten_indices().data.table.to_batches(), origin)

        if not Path(name).is_dir():
            with suppress(*faults), _offline(True):
                return load()
            if alone := why_unreachable():
                raise ValueError(alone)
        try:
            return load()
        except faults as error:
            reason = " ".join(str(error.__cause__ or error).split())
            raise ValueError(reason if len(reason) <= 300 else f"{reason[:297]}...") from None


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
        logger.set_verbosity(CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()
