"""Reading models and tokenizers without the notes of the libraries, their errors in one line."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def readable(folder: Path, part: str) -> Iterator[None]:
    """Turn what the libraries say of damaged files into a ValueError of one line with a remedy."""
    try:
        yield
    except Exception as error:
        if "memory" in str(error):  # not the folder's fault
            raise
        if "weights_only" in str(error):
            raise ValueError(
                f"{folder}: expected weights alone, got a pickle that names code, which loading "
                "would run; nothing of it was run. Do not use it, or get it as .safetensors"
            ) from None
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{folder}: cannot read the {part} ({said}); is a file damaged, incomplete or another "
            "model's? copy or download it again"
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and notes for a while, and put them back."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")  # the refusal says it
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
